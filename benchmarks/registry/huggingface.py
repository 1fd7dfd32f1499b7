"""One small random network for each family of image classifiers in transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 8,
}
_DINO = {key: value for key, value in _PLAIN.items() if key != "intermediate_size"}
_WINDOWS = {
    **{"image_size": 32, "patch_size": 2, "embed_dim": 16, "window_size": 4},
    **{"depths": [1, 1], "num_heads": [2, 2]},
}
_STAGES = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
_TWO = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}
_PYRAMID = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
_HEADS = {**_PYRAMID, "num_attention_heads": [1, 1, 2, 2]}
_THREE = {"depths": [1, 1, 1], "num_attention_heads": [1, 2, 3], "key_dim": [8, 8, 8]}
_CONV = {"depth": [1, 2, 3], "embed_dim": [8, 8, 16], "num_heads": [1, 1, 2]}
_LATENTS = {"num_latents": 4, "d_latents": 16, "d_model": 16, "image_size": 16}
_SHALLOW = {"num_blocks": 1, "num_self_attends_per_block": 1, "num_self_attention_heads": 2}
_FOCAL = {"depths": [1, 1], "focal_levels": [1, 1], "focal_windows": [3, 3]}
_MASKED = {"masked_unit_size": [4, 4], "num_query_pool": 1, "patch_size": [7, 7]}
_KERNELS = {f"conv_layer_{name}": [value] * 4 for name, value in
            (("kernel_sizes", [[3, 3]]), ("strides", [2]))}  # fmt: skip

# Family -> settings of a small network, edge of its images: large enough that attention has several
# keys to choose from, without which queries and keys do nothing.
FAMILIES: dict[str, tuple[dict[str, Any], int]] = {
    "beit": (_PLAIN, 16),
    "bit": ({**_STAGES, "num_groups": 4}, 32),
    "clip": ({"vision_config": _PLAIN}, 16),
    "convnext": (_TWO, 32),
    "convnextv2": (_TWO, 32),
    "cvt": (_CONV, 32),
    "data2vec-vision": (_PLAIN, 16),
    "deit": (_PLAIN, 16),
    "dinov2": ({**_DINO, "mlp_ratio": 2}, 16),
    "dinov2_with_registers": ({**_DINO, "mlp_ratio": 2}, 16),
    "donut-swin": (_WINDOWS, 32),
    "efficientnet": (
        {"width_coefficient": 0.25, "depth_coefficient": 0.1, "hidden_dim": 320, "image_size": 32},
        32,
    ),
    "focalnet": ({"image_size": 32, "embed_dim": 8, "hidden_sizes": [8, 16], **_FOCAL}, 32),
    "hgnet_v2": ({}, 32),
    "hiera": (
        {
            "embed_dim": 8,
            "image_size": [64, 64],
            "depths": [1, 1],
            "num_heads": [1, 2],
            "patch_stride": [4, 4],
            "patch_padding": [3, 3],
            **_MASKED,
        },
        64,
    ),
    "ijepa": (_PLAIN, 16),
    "levit": ({"image_size": 32, "hidden_sizes": [16, 32, 48], **_THREE}, 32),
    "metaclip_2": ({"vision_config": _PLAIN}, 16),
    "mobilenet_v1": ({"depth_multiplier": 0.25}, 32),
    "mobilenet_v2": ({"depth_multiplier": 0.35}, 32),
    "mobilevit": (
        {
            "image_size": 64,
            "hidden_sizes": [16, 16, 16],
            "num_attention_heads": 2,
            "neck_hidden_sizes": [8, 8, 8, 8, 16, 16, 32],
        },
        64,
    ),
    "mobilevitv2": ({"image_size": 64, "width_multiplier": 0.25}, 64),
    "perceiver": ({**_LATENTS, **_SHALLOW, "num_cross_attention_heads": 1}, 16),
    "poolformer": (_PYRAMID, 32),
    "pp_lcnet": ({"scale": 0.25}, 32),
    "pvt": ({**_HEADS, "image_size": 64}, 64),
    "pvt_v2": ({**_HEADS, "image_size": 64}, 64),
    "regnet": ({**_STAGES, "groups_width": 8}, 32),
    "resnet": ({**_STAGES, "layer_type": "basic"}, 32),
    "segformer": (_HEADS, 64),
    "siglip": ({"vision_config": _PLAIN}, 16),
    "swiftformer": ({"image_size": 32, "depths": [1] * 4, "embed_dims": [8, 8, 16, 16]}, 32),
    "swin": (_WINDOWS, 32),
    "swinv2": (_WINDOWS, 32),
    "textnet": ({**_KERNELS, "hidden_sizes": [8, 8, 8, 16, 16], "stem_out_channels": 8}, 32),
    "timm_wrapper": ({}, 32),
    "vit": (_PLAIN, 16),
    "vit_msn": (_PLAIN, 16),
}
# What cannot be built here, or takes no images alone.
UNSUITABLE = {
    "dinat": "needs the natten library",
    "imagegpt": "takes tokens, which are integers, instead of images",
    "shieldgemma2": "takes text and images, and answers by a language model",
    "siglip2": "takes patches with their masks and places instead of images",
}
# Families with several classifiers, of which one has to be named.
_CLASSES = {
    "deit": "DeiTForImageClassification",
    "levit": "LevitForImageClassification",
    "perceiver": "PerceiverForImageClassificationLearned",
}


def families() -> list[str]:
    """Every family in the installed version's own list."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    )

    return sorted(MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES)


def make(family: str, classes: int) -> nn.Module:
    """A small network of the family, randomly initialised, in eval mode."""
    import transformers

    config = transformers.AutoConfig.for_model(family, num_labels=classes, **FAMILIES[family][0])
    if family in _CLASSES:
        return getattr(transformers, _CLASSES[family])(config).eval()
    return transformers.AutoModelForImageClassification.from_config(config).eval()


def images(family: str, number: int, seed: int = 1) -> Tensor:
    """Random images of the size that the small network takes."""
    edge = FAMILIES[family][1]
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(number, 3, edge, edge, generator=draw)
