"""Your own layer: tell wfilter which torch function uses the weight, and it takes the fast path.

    python examples/own_layer.py

A linear layer written with einsum is exact without help, at the cost of weights of its own for
every sample; one line of `register` makes it as fast as any other. A second on one core.
"""

import torch
from torch import nn

import wfilter


class EinsumLayer(nn.Module):
    """A linear layer without bias, written with einsum."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Inputs ``(batch, inputs)`` to outputs ``(batch, outputs)``."""
        return torch.einsum("bi,oi->bo", x, self.weight)


network = nn.Sequential(EinsumLayer(16, 32), nn.ReLU(), nn.Linear(32, 5))
x, labels = torch.randn(6, 16), torch.tensor([0, 1, 2, 3, 4, -1])

plan = wfilter.find_targets(network, "0.weight", example_input=x)
print("without a rule:", plan[0].path, "-", plan[0].why)
assert plan[0].path == "exact"

wfilter.register(torch.einsum, weight=(2, "weight"))  # einsum("bi,oi->bo", x, weight)
wf = wfilter.apply_weight_filtering(network, targets="0.weight", example_input=x)

print("with the rule: ", wf.plan[0].path, "-", wf.plan[0].why)
assert wf.plan[0].path == "fused"
nn.init.normal_(wf.alphas)
assert wf.verify(x, labels)["fused"] < 1e-5, "and still the same as one sample at a time"
