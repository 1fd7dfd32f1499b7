"""Check logits, predictions and labels given to a metric; say what is wrong with them."""

import torch
from torch import Tensor


def as_predictions(outputs: Tensor) -> Tensor:
    """Predicted classes, int64 (samples,), from logits (samples, classes) or from predictions.

    Example:
        >>> as_predictions(torch.tensor([[0.1, 0.9], [2.0, 1.0]]))
        tensor([1, 0])
    """
    if outputs.is_floating_point():
        return check_logits(outputs).argmax(-1)
    if outputs.ndim != 1 or outputs.dtype == torch.bool:
        raise ValueError(
            f"outputs of shape {tuple(outputs.shape)} and dtype {outputs.dtype} are neither "
            "float logits (samples, classes) nor int predictions (samples,)."
        )
    return outputs.long()


def check_logits(logits: Tensor, name: str = "outputs") -> Tensor:
    """The logits given, if they are (samples, classes) without NaN and not empty.

    Minus infinity is allowed: it is what a masked class has.

    Example:
        >>> check_logits(torch.zeros(2, 3)).shape
        torch.Size([2, 3])
    """
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ValueError(
            f"{name} has shape {tuple(logits.shape)} and dtype {logits.dtype}; "
            "expected float logits of shape (samples, classes)."
        )
    if not len(logits):
        raise ValueError(f"{name} has no samples. Check that the class is in the data at all.")
    if logits.isnan().any():
        raise ValueError(
            f"{name} contains NaN in {int(logits.isnan().any(-1).sum())} of {len(logits)} samples. "
            "The model diverged, or its input was not finite."
        )
    return logits


def check_labels(labels: Tensor, samples: int, num_classes: int | None = None) -> Tensor:
    """The labels given as int64, if they are one class per sample within range.

    Example:
        >>> check_labels(torch.tensor([0, 2]), samples=2, num_classes=3)
        tensor([0, 2])
    """
    if labels.ndim != 1 or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(
            f"labels have shape {tuple(labels.shape)} and dtype {labels.dtype}; "
            "expected one integer class per sample, shape (samples,)."
        )
    if len(labels) != samples:
        raise ValueError(f"labels has {len(labels)} entries\nfor {samples} samples. Pass one each.")
    upper = int(labels.max()) if samples else 0
    if samples and (int(labels.min()) < 0 or (num_classes is not None and upper >= num_classes)):
        bound = "0 and above" if num_classes is None else f"0..{num_classes - 1}"
        raise ValueError(f"labels lie in {int(labels.min())}..{upper}; expected {bound}.")
    return labels.long()
