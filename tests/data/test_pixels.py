"""Pixels that are read for teaching are those that a server reads."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from wfilter.data.backbones import InputFormat
from wfilter.data.formats import EncodedImages
from wfilter.data.pixels import eight_bits

DEEP = np.linspace(0, 65_535, 64).astype(np.uint16).reshape(8, 8)


def stored(array, kind="PNG"):
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize("channels", [1, 3])
def test_grey_of_sixteen_bits_is_scaled_not_clipped(channels):
    read = EncodedImages((stored(DEEP),), 8, channels)[torch.tensor([0])]
    assert read.shape == (1, channels, 8, 8)
    np.testing.assert_array_equal(read[0, 0].numpy(), (DEEP / 257).astype(np.uint8))
    assert read.unique().numel() > 50, "Pillow alone leaves 0 and 255"


def test_server_reads_sixteen_bits_as_the_library_does():
    images = pytest.importorskip("wfilter.serve.images", reason="needs wfilter[serve]")
    content = stored(DEEP)
    read = EncodedImages((content,), 8, 1)[torch.tensor([0])].float() / 255
    torch.testing.assert_close(images.decode(content, InputFormat(8, 1)), read[0])


@pytest.mark.parametrize(
    "array",
    [
        np.full((8, 8), 70_000, np.int32),
        np.full((8, 8), -1, np.int32),
        np.full((8, 8), 0.5, np.float32),
    ],
    ids=["beyond 16 bits", "below 0", "fractions"],
)
def test_numbers_that_are_no_brightness_are_refused_in_words(array):
    with pytest.raises(ValueError, match=r"no whole numbers in 0\.\.65535"):
        eight_bits(Image.fromarray(array), 1)
    with pytest.raises(ValueError, match="an image of the zip cannot be decoded"):
        EncodedImages((stored(array, "TIFF"),), 8, 1)[torch.tensor([0])]
