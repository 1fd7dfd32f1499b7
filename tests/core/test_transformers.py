"""The image classifiers of transformers, one small random network per family, by the whole API."""

import pytest
import torch

import wfilter
from helpers import close, shuffle_alphas
from wfilter.core.outputs import logits_of

transformers = pytest.importorskip("transformers")

PLAIN = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 8,
}
DINO = {key: value for key, value in PLAIN.items() if key != "intermediate_size"}
WINDOWS = {
    **{"image_size": 32, "patch_size": 2, "embed_dim": 16, "window_size": 4},
    **{"depths": [1, 1], "num_heads": [2, 2]},
}
STAGES = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
PYRAMID = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
HEADS = {**PYRAMID, "num_attention_heads": [1, 1, 2, 2]}
# Family -> settings of a small network, edge of its images.
FAMILIES = {
    "vit": (PLAIN, 16),
    "deit": (PLAIN, 16),
    "beit": (PLAIN, 16),
    "vit_msn": (PLAIN, 16),
    "dinov2": ({**DINO, "mlp_ratio": 2}, 16),
    "swin": (WINDOWS, 32),
    "swinv2": (WINDOWS, 32),
    "convnext": ({"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}, 32),
    "convnextv2": ({"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}, 32),
    "resnet": ({**STAGES, "layer_type": "basic"}, 32),
    "regnet": ({**STAGES, "groups_width": 8}, 32),
    "bit": ({**STAGES, "num_groups": 4}, 32),
    "mobilenet_v1": ({"depth_multiplier": 0.25}, 32),
    "poolformer": (PYRAMID, 32),
    "pvt": ({**HEADS, "image_size": 32}, 32),
    "pvt_v2": ({**HEADS, "image_size": 32}, 32),
    "segformer": (HEADS, 32),
    "siglip": ({"vision_config": PLAIN}, 16),
    "clip": ({"vision_config": PLAIN}, 16),
}
CLASSES = 5
LABELS = torch.tensor([3, -1, 0])


def small(kind):
    settings, edge = FAMILIES[kind]
    config = transformers.AutoConfig.for_model(kind, num_labels=CLASSES, **settings)
    if kind == "deit":
        config.architectures = ["DeiTForImageClassification"]
        model = transformers.DeiTForImageClassification(config)
    else:
        model = transformers.AutoModelForImageClassification.from_config(config)
    return model.double().eval(), torch.rand(3, 3, edge, edge).double()


@torch.no_grad()
@pytest.mark.parametrize("kind", FAMILIES)
def test_small_network_of_each_family_is_right_by_keyword_and_in_its_features(kind):
    model, x = small(kind)
    wf = shuffle_alphas(wfilter.apply_weight_filtering(model, example_input={"pixel_values": x}))
    assert wf.num_classes == CLASSES
    output = wf(pixel_values=x, forget=LABELS)
    assert type(output) is type(model(x))
    assert torch.equal(wf(pixel_values=x).logits, model(x).logits)
    for sample, row in enumerate(LABELS.tolist()):
        one = wf.bake(row) if row >= 0 else model
        close(output.logits[sample], one(x[sample : sample + 1]).logits[0], 1e-7)
    features = wf.features(pixel_values=x, forget=LABELS)
    assert len(features) == 3
    assert not torch.equal(features[0], wf.features(x)[0])


def test_untrain_evaluate_save_and_load_take_a_model_output(tmp_path):
    model, _ = small("vit")
    images, labels = torch.rand(20, 3, 16, 16).double(), torch.arange(20) % CLASSES
    wf = wfilter.apply_weight_filtering(model, example_input=images[:1])
    wfilter.untrain(wf, [(images, labels)], recipe="distill", steps=1)
    assert "Acc_r" in str(wfilter.evaluate(wf, [(images, labels)]))
    path = wf.save(tmp_path / "filters.safetensors")
    model, _ = small("vit")
    model.load_state_dict(wf.base.state_dict())
    loaded = wfilter.load(path, model, example_input=images[:1])
    forget = torch.arange(20) % CLASSES
    close(logits_of(loaded(images, forget)), logits_of(wf(images, forget)))
