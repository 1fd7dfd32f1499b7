"""Notice what a backward pass runs again outside the gates, as gradient checkpointing does.

Gradient checkpointing runs layers again, and an autograd function of the model's own has a backward
that reads the plain weights: neither is under the mode that gated the forward. Both show while the
forward runs: gradients are off where the call has them on, or tensors are saved by other hooks.
"""

from __future__ import annotations

import torch


class Recomputation:
    """Asked at each filtered layer: does it run as part of the call, or again for its gradients?

    Args:
        needed: Whether anything in the call wants a gradient.
    """

    def __init__(self, needed: bool):
        self.needed = needed and torch.is_grad_enabled()
        self._hooks = _saving_hooks() if self.needed else None

    def refuse(self) -> None:
        """Stop where the layer that runs now would get a wrong gradient, or none."""
        if not self.needed:
            return
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "a filtered layer runs without gradients inside a forward that needs them, as in "
                "an autograd function of the model's own or under gradient checkpointing: its "
                "backward would not know the gates. Turn that off, or use torch.no_grad()."
            )
        if _saving_hooks() != self._hooks:
            raise RuntimeError(
                "a filtered layer runs under gradient checkpointing: it would run again in the "
                "backward pass, without gates. Turn that off, or use torch.no_grad()."
            )


def _saving_hooks() -> object:
    """What autograd calls for each tensor it keeps for the backward pass, if anything."""
    if torch.compiler.is_dynamo_compiling():
        return None
    return torch._C._autograd._top_saved_tensors_default_hooks(True)
