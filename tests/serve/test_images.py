"""Images from strangers: read as their senders see them, or refused in words."""

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from servers import png
from wfilter.data.backbones import InputFormat
from wfilter.data.formats import EncodedImages
from wfilter.serve.images import decode
from wfilter.serve.limits import Refusal

GREY, COLOUR = InputFormat(8, 1), InputFormat(8, 3, (0.5, 0.4, 0.3), (0.5, 0.6, 0.7))


@pytest.mark.parametrize("size", [8, 20])
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_image_is_read_as_the_library_reads_files(size, kind):
    content = png(3, size, "RGB", kind)
    stored = EncodedImages((content,), 8, 3)[torch.tensor([0])][0].float() / 255
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (COLOUR.mean, COLOUR.std))
    torch.testing.assert_close(decode(content, COLOUR), (stored - mean) / std)


def save(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_sixteen_bit_image_is_scaled_not_clipped():
    deep = Image.fromarray(np.full((8, 8), 32768, np.uint16))
    assert float(decode(save(deep), GREY).mean()) == pytest.approx(0.498, abs=0.01)


def test_photograph_is_turned_as_its_sender_sees_it():
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    pixels = np.zeros((8, 8), np.uint8)
    pixels[:4] = 255
    turned = decode(save(Image.fromarray(pixels), exif=exif), GREY)
    assert turned[0, 0, 0] == 0
    assert turned[0, 7, 0] == 1


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("turn", range(10))
def test_every_orientation_is_undone_as_pillow_does(turn, kind):
    exif = Image.Exif()
    exif[0x0112] = turn
    content = save(Image.open(io.BytesIO(png(size=8, mode="RGB"))), kind, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    torch.testing.assert_close(decode(content, COLOUR), decode(save(upright), COLOUR))


def test_orientation_counts_where_another_tag_is_broken():
    tags = struct.pack("<HHIHH", 0x0112, 3, 1, 6, 0)  # a quarter turn
    tags += struct.pack("<HHII", 0x8769, 4, 1, 0xFFFF)  # a table far outside the file
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + tags + bytes(4)
    plain = Image.open(io.BytesIO(png(size=8, mode="RGB")))
    upright = plain.transpose(Image.Transpose.ROTATE_270)
    content = save(plain, "PNG", exif=exif)
    torch.testing.assert_close(decode(content, COLOUR), decode(save(upright), COLOUR))


def test_animation_is_answered_by_its_first_picture():
    first, *others = (Image.open(io.BytesIO(png(seed, mode="RGB"))) for seed in range(4))
    moving = save(first, save_all=True, append_images=others)
    assert Image.open(io.BytesIO(moving)).n_frames == 4
    torch.testing.assert_close(decode(moving, COLOUR), decode(save(first), COLOUR))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_every_common_kind_of_image_is_taken(mode):
    image = Image.fromarray(np.zeros((9, 12, 3), np.uint8)).convert(mode)
    kind = "JPEG" if mode == "CMYK" else "PNG"
    assert decode(save(image, kind), GREY).shape == (1, 8, 8)


def chunk(kind, data):
    checked = kind + data
    return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))


def with_text(kind, begin):
    """A PNG that says something compressed of itself: 20 kB that unpack to 20 MB."""
    whole = png()
    return whole[:33] + chunk(kind, begin + zlib.compress(bytes(20_000_000), 9)) + whole[33:]


def bomb(width, height):
    """A small PNG that claims to be huge."""
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"0" * 99))


def many_scans(count, size=2000):
    """A progressive JPEG whose last scan is there many times: small to send, long to decode."""
    whole = save(Image.new("L", (size, size), 90), "JPEG", progressive=True)
    last = whole[whole.rindex(b"\xff\xda") : -2]
    return whole[:-2] + last * count + whole[-2:]


BROKEN = {
    "empty": (b"", 400),
    "text": (b"not an image", 400),
    "GIF": (save(Image.new("L", (8, 8)), "GIF"), 400),
    "cut short": (png(size=64)[:200], 400),
    "header only": (png()[:20], 400),
    "one pixel in a million": (bomb(1, 1_000_000), 400),
    "bomb": (bomb(6000, 6000), 413),
    "bomb beyond Pillow's own limit": (bomb(60000, 60000), 413),
    "less data than claimed": (bomb(100, 100), 400),
    "text that unpacks to megabytes": (with_text(b"zTXt", b"k\0\0"), 400),
    "profile that unpacks to megabytes": (with_text(b"iCCP", b"k\0\0"), 400),
    "JPEG of a thousand scans": (many_scans(1000), 413),
    "bytes turned": (bytes(b ^ 255 for b in png()), 400),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_or_hostile_image_is_refused_in_words(name):
    content, status = BROKEN[name]
    with pytest.raises(Refusal) as caught:
        decode(content, GREY)
    assert caught.value.status == status


def test_usual_progressive_photograph_is_taken():
    content = save(Image.new("RGB", (3000, 2000), "red"), "JPEG", progressive=True)
    assert decode(content, COLOUR).shape == (3, 8, 8)


def test_damaged_image_is_refused_or_decoded_never_worse():
    rng, whole = np.random.default_rng(0), png(size=32, mode="RGB", kind="JPEG")
    statuses = set()
    for _ in range(150):
        damaged = bytearray(whole)
        for place in rng.integers(0, len(whole), 4):
            damaged[place] = rng.integers(0, 256)
        try:
            assert decode(bytes(damaged), COLOUR).shape == (3, 8, 8)
        except Refusal as refusal:
            statuses.add(refusal.status)
    assert statuses <= {400, 413}
