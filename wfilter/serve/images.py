"""Images from strangers: decoded within limits, or refused in words that help an honest sender."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wfilter.data.backbones import InputFormat
from wfilter.data.pixels import eight_bits, square
from wfilter.serve.limits import Refusal

FORMATS = ("JPEG", "PNG")
NARROWEST = 50  # times as long as wide; beyond, scaling the short side up would take gigabytes
MOST_SCANS = 20  # for an image of most_pixels; decoding a JPEG makes one pass over it for each scan
ORIENTATION = 0x0112  # EXIF's tag for how the camera was held


def decode(content: bytes, inputs: InputFormat, most_pixels: int = 25_000_000) -> Tensor:
    """One image as the model wants to see it: float32 ``(channels, size, size)``.

    Args:
        content: A JPEG or PNG file.
        inputs: Size, channels and normalisation.
        most_pixels: An image of more is refused before anything is decoded.

    Raises:
        Refusal: 400 for what is no whole JPEG or PNG, 413 for too many pixels.

    Example:
        >>> decode(b"GIF89a", InputFormat(8, 1))
        Traceback (most recent call last):
        ...
        wfilter.serve.limits.Refusal: the image is no JPEG or PNG file.
    """
    image = _opened(content, most_pixels)
    try:
        pixels = square(eight_bits(_upright(image), inputs.channels), inputs.size)
    except Exception as error:  # Pillow has no common class for what a broken file can raise
        raise Refusal(400, "the image is damaged or cut short.") from error
    array = torch.from_numpy(np.array(pixels)).view(inputs.size, inputs.size, inputs.channels)
    values = array.permute(2, 0, 1).float().div_(255)
    return values.sub_(_per_channel(inputs.mean)).div_(_per_channel(inputs.std))


def _opened(content: bytes, most_pixels: int) -> Any:
    """The image with only its header read; refused if too large, narrow or of too many scans."""
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise Refusal(413, f"the image has more than {most_pixels} pixels.") from error
    except Exception as error:
        raise Refusal(400, "the image is no JPEG or PNG file.") from error
    width, height = image.size
    if width * height > most_pixels:
        raise Refusal(413, f"the image has {width} x {height} pixels, more than {most_pixels}.")
    if max(width, height) > NARROWEST * max(1, min(width, height)):
        raise Refusal(400, f"the image of {width} x {height} pixels is too narrow.")
    # Every scan begins with this marker. Compressed pixels never hold it, other data may: the
    # count is never too low.
    scans = content.count(b"\xff\xda") if image.format != "PNG" else 1
    if scans * max(width * height, 10_000) > MOST_SCANS * max(most_pixels, 10_000):
        raise Refusal(413, f"the image of {width} x {height} pixels has {scans} scans, too many.")
    return image


def _upright(image: Any) -> Any:
    """The image decoded in full, turned as its sender sees it."""
    image.load()
    # Only the one tag is read: Pillow's exif_transpose refuses photographs for odd other tags.
    turn = _turns().get(image.getexif().get(ORIENTATION))
    return image if turn is None else image.transpose(turn)


def _turns() -> dict[Any, Any]:
    """What undoes each orientation of EXIF; 1 is upright."""
    from PIL.Image import Transpose

    return {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }


def _per_channel(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values).view(-1, 1, 1)
