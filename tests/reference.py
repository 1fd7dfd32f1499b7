"""What a filtered model means, written without wfilter's forward paths.

For each sample: copy the base model, multiply its weights by hand, run the sample alone.
"""

import copy

import torch
from torch import Tensor, nn

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def logits(wf, x: Tensor, forget: Tensor) -> Tensor:
    """Logits of a mixed batch: ``forget`` are labels ``(batch,)`` or sets ``(batch, classes)``."""
    rows = [_classes(wanted) for wanted in forget]
    return torch.cat([filtered_copy(wf, row)(image[None]) for image, row in zip(x, rows)])


def filtered_copy(wf, classes: list[int]) -> nn.Module:
    """A copy of the base model that has forgotten ``classes``; gradients reach ``wf.alphas``."""
    model = copy.deepcopy(wf.base).eval()
    holders = _holders(model)
    for name, alpha in wf.alpha.items():
        for module, tensor, parameter in holders[name]:
            gate = torch.ones_like(alpha[0])
            for row in classes:
                gate = gate / (1 + torch.exp(-alpha[row]))
            if tensor == "weight" and _standardises(module):
                module.register_forward_hook(_scale(gate))
                continue
            gate = _spread(gate, module, tensor, parameter)
            del module._parameters[tensor]
            setattr(module, tensor, parameter * gate.to(parameter.dtype))
    return model


def _classes(wanted: Tensor) -> list[int]:
    rows = wanted.nonzero().flatten().tolist() if wanted.dtype == torch.bool else [int(wanted)]
    return [row for row in rows if row != -1]


def _holders(model: nn.Module) -> dict[str, list[tuple[nn.Module, str, nn.Parameter]]]:
    """First name of each parameter -> every place that holds it (several when tied)."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    holders: dict[str, list[tuple[nn.Module, str, nn.Parameter]]] = {n: [] for n in first.values()}
    for module in model.modules():
        for tensor, parameter in module._parameters.items():
            if parameter is not None:
                holders[first[id(parameter)]].append((module, tensor, parameter))
    return holders


def _spread(gate: Tensor, module: nn.Module, tensor: str, parameter: Tensor) -> Tensor:
    if gate.numel() == parameter.numel():
        return gate.reshape(parameter.shape)
    if isinstance(module, TRANSPOSED) and tensor == "weight":
        return gate.reshape(1, -1, *[1] * (parameter.ndim - 2))
    return gate.reshape(-1, *[1] * (parameter.ndim - 1))


def _standardises(module: nn.Module) -> bool:
    return type(module).__name__ in ("StdConv2d", "StdConv2dSame", "ScaledStdConv2d")


def _scale(gate: Tensor):
    """Gates act on the standardised weight: on the output, but for the bias."""

    def hook(module, inputs, output):
        scale = gate.reshape(-1, 1, 1)
        if module.bias is None:
            return output * scale
        bias = module.bias.reshape(-1, 1, 1)
        return (output - bias) * scale + bias

    return hook
