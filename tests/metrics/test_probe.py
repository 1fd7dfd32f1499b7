"""Probes against scikit-learn, and the features that they see."""

import math

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, recall_score
from sklearn.neighbors import NearestCentroid
from sklearn.preprocessing import StandardScaler
from torch import nn

import digits
from wfilter import baselines, metrics


def digit_features(model):
    return [
        part for split in digits.data() for part in metrics.collect_features(
            model, digits.batches(split)
        )
    ]  # fmt: skip


def test_probes_equal_scikit_learn():
    features, labels, test_features, test_labels = digit_features(digits.trained_cnn())
    scaler = StandardScaler().fit(features)
    expected = LogisticRegression(max_iter=1000).fit(scaler.transform(features), labels)
    predictions = expected.predict(scaler.transform(test_features))
    linear = metrics.linear_probe(features, labels, test_features, test_labels)
    assert linear.accuracy == pytest.approx(accuracy_score(test_labels, predictions))
    recalls = recall_score(test_labels, predictions, average=None)
    assert list(linear.by_class.values()) == pytest.approx(recalls)

    centroids = NearestCentroid().fit(features, labels)
    nearest = metrics.nearest_class_mean(features, labels, test_features, test_labels)
    assert nearest.accuracy == pytest.approx(centroids.score(test_features, test_labels))
    cosine = metrics.nearest_class_mean(
        features, labels, test_features, test_labels, distance="cosine"
    )
    assert cosine.accuracy > 0.9


def test_a_masked_logit_gives_no_accuracy_and_the_originals_probe():
    train, test = digits.data()
    model = digits.trained_cnn()
    masked = baselines.logit_mask(model, 3, digits.batches(train))
    logits, labels = metrics.collect_logits(masked, digits.batches(test))
    assert metrics.set_accuracies(logits, labels, 3)[1] == 0
    before, after = digit_features(model), digit_features(masked)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert metrics.linear_probe(*after) == metrics.linear_probe(*before)


def test_random_features_of_other_labels_give_a_probe_at_chance():
    features, labels = torch.randn(400, 8), torch.randint(4, (400,))
    probe = metrics.linear_probe(features[:200], labels[:200], features[200:], labels[200:])
    assert probe.accuracy < 0.45


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "mobilenetv3_small_050"])
def test_features_of_a_timm_model_are_its_pre_logits(name):
    timm = pytest.importorskip("timm")
    size = {"img_size": 32} if "vit" in name else {}
    model = timm.create_model(name, num_classes=7, **size).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model.forward_head(model.forward_features(images), pre_logits=True)
        torch.testing.assert_close(metrics.penultimate_features(model, images), expected)
        head = metrics.find_head(model)
        torch.testing.assert_close(head(expected), model(images))


def test_features_of_a_model_with_two_heads_lie_side_by_side():
    timm = pytest.importorskip("timm")
    model = timm.create_model("deit_tiny_distilled_patch16_224", img_size=32, num_classes=7).eval()
    assert metrics.penultimate_features(model, torch.randn(2, 3, 32, 32)).shape == (2, 384)


@pytest.mark.parametrize(
    ("name", "width"), [("resnet18", 512), ("squeezenet1_1", 512), ("mobilenet_v3_small", 1024)]
)
def test_features_of_a_torchvision_model_are_the_input_of_its_head(name, width):
    models = pytest.importorskip("torchvision.models")
    model = getattr(models, name)(num_classes=7).eval()
    features = metrics.penultimate_features(model, torch.randn(2, 3, 64, 64))
    assert features.shape == (2, width)


def test_features_can_be_taken_through_another_forward():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    images = torch.randn(5, 4)
    doubled = metrics.penultimate_features(model, images, forward=lambda x: model(2 * x))
    torch.testing.assert_close(doubled, 2 * images)
    assert not model[1]._forward_pre_hooks


def test_a_head_that_is_never_called_is_refused():
    with pytest.raises(ValueError, match="it is not the head"):
        metrics.penultimate_features(nn.Linear(2, 2), torch.zeros(1, 2), head=nn.Linear(2, 2))
    with pytest.raises(ValueError, match="could not guess an input that ReLU takes"):
        metrics.find_head(nn.ReLU())


def test_probes_refuse_unseen_classes_and_nan():
    x, y = torch.randn(4, 2), torch.tensor([0, 0, 1, 1])
    with pytest.raises(ValueError, match=r"class\(es\) \[2\] of test_labels"):
        metrics.linear_probe(x, y, x, y + 1)
    with pytest.raises(ValueError, match="test_features contains NaN"):
        metrics.nearest_class_mean(x, y, x * math.nan, y)
    with pytest.raises(ValueError, match="distance='manhattan' is unknown"):
        metrics.nearest_class_mean(x, y, x, y, distance="manhattan")
