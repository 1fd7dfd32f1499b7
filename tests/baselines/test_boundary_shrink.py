import torch
from torch import nn
from torch.nn import functional as F

from wfilter import baselines


def test_images_get_the_label_across_the_nearest_boundary():
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    images, labels = torch.randn(16, 3).double(), torch.arange(4).repeat(4)
    changed = baselines.boundary_shrink(model, 0, [(images, labels)], bound=0.3, epochs=1, lr=0.1)
    forgotten = images[labels == 0]
    p = model(forgotten).softmax(1)
    p[:, 0] -= 1  # the gradient of the loss in the logits
    moved = forgotten + 0.3 * (p @ model.weight).sign()
    nearest = model(moved)[:, 1:].argmax(1) + 1
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(forgotten), nearest), model.weight)
    torch.testing.assert_close(changed.weight, model.weight - 0.1 * gradient)
