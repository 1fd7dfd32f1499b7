"""Images of Pillow made alike, for teaching and for serving: 8-bit grey or colour, and square."""

from __future__ import annotations

from typing import Any

import numpy as np

SHORT_SIDE = 8 / 7  # short side over size before the centre is cut out: 256 for 224, as torchvision
DEEPEST = 65_535  # the largest number in 16 bits


def eight_bits(image: Any, channels: int) -> Any:
    """An image in 8-bit grey (one channel) or colour (three); transparency is ignored.

    Pillow alone would clip grey of 16 bits at 255, which leaves almost every picture white.

    Raises:
        ValueError: The numbers in the image are no brightness of 16 bits.
    """
    from PIL import Image

    if image.mode.startswith(("I", "F")):
        deep = np.asarray(image)
        if image.mode == "F" or deep.min() < 0 or deep.max() > DEEPEST:
            raise ValueError("its pixels are no whole numbers in 0..65535. Save it with 8 bits.")
        image = Image.fromarray((deep.astype(np.float32) / 257).astype(np.uint8))
    if image.mode == "P":
        image = image.convert("RGBA" if "transparency" in image.info else "RGB")
    return image.convert("RGB" if channels == 3 else "L")


def square(image: Any, size: int) -> Any:
    """The centre of an image, scaled first so that its short side is 8/7 of ``size``."""
    from PIL import Image

    if image.size == (size, size):
        return image
    scale = size * SHORT_SIDE / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    scaled = image.resize((width, height), Image.Resampling.BICUBIC)
    return scaled.crop((left, top, left + size, top + size))
