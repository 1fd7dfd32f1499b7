import pytest
import torch

import digits
from digits import train
from wfilter import baselines, metrics


def test_projection_removes_the_head_vector_from_the_features():
    model = digits.trained_cnn()
    changed = baselines.projection(model, [3, 5], train(), mask=False)
    images = digits.data()[1][0]
    features = metrics.penultimate_features(changed, images)
    head = model[-1]
    assert features.matmul(head.weight[[3, 5]].T).abs().max() < 1e-4
    logits = changed(images)
    torch.testing.assert_close(logits[:, [3, 5]], head.bias[[3, 5]].expand(500, 2))
    before = metrics.penultimate_features(model, images)
    w = head.weight[3]
    one = baselines.projection(model, 3, train(), mask=False)
    expected = before - (before @ w)[:, None] * w / (w @ w)
    torch.testing.assert_close(metrics.penultimate_features(one, images), expected)


def test_projection_works_inside_timm_and_torchvision_models():
    timm, models = pytest.importorskip("timm"), pytest.importorskip("torchvision.models")
    batch = (torch.randn(4, 3, 32, 32), torch.arange(4))
    for model in (timm.create_model("resnet18", num_classes=4), models.resnet18(num_classes=4)):
        changed = baselines.projection(model.eval(), 1, [batch])
        assert changed(batch[0])[:, 1].isinf().all()
        features = metrics.penultimate_features(changed, batch[0])
        assert (features @ metrics.find_head(model).weight[1]).abs().max() < 1e-4
