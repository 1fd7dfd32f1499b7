"""Two lines that give any timm or torchvision classifier its filters.

    python examples/wrap_any_model.py

Prints what would be filtered in three networks, then runs a batch in which every image forgets
another class, and compares it with one image at a time. A few seconds on one core.
"""

import timm
import torch
import torchvision

import wfilter

NETWORKS = {
    "torchvision resnet18": torchvision.models.resnet18(num_classes=10),
    "timm vit": timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10),
    "timm convnext": timm.create_model("convnext_atto", num_classes=10),
}
images = torch.rand(4, 3, 32, 32)
labels = torch.tensor([0, 3, 9, -1])  # -1: this image forgets nothing

for name, network in NETWORKS.items():
    before = network.eval()(images)

    wf = wfilter.apply_weight_filtering(network, example_input=images)
    logits = wf(images, forget=labels)

    fused = sum(row.path == "fused" for row in wf.plan)
    print(f"{name}: {len(wf.plan)} targets, {fused} of them fused, logits {tuple(logits.shape)}")
    assert torch.equal(wf(images), before), "without forget it is the base model, bit for bit"
    assert torch.allclose(logits[3], before[3], atol=1e-5), "and so it is for label -1"
    assert max(wf.verify(images, labels).values()) < 1e-4, "mixed equals one image at a time"
    assert wfilter.remove_weight_filtering(wf) is network

print(wfilter.find_targets(NETWORKS["timm vit"], example_input=images))
