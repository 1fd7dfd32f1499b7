"""Tokens, limits, the audit log and images, each by itself."""

import io
import json
import os
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from servers import CHEAP, png
from wfilter.data.backbones import InputFormat
from wfilter.data.formats import EncodedImages
from wfilter.serve import new_token, tokens
from wfilter.serve.audit import AuditError, AuditLog
from wfilter.serve.images import decode
from wfilter.serve.limits import Buckets, Refusal, Seats

GREY, COLOUR = InputFormat(8, 1), InputFormat(8, 3, (0.5, 0.4, 0.3), (0.5, 0.6, 0.7))


# ---- tokens -------------------------------------------------------------------------------------


@pytest.fixture
def _cheap(monkeypatch):
    monkeypatch.setattr(tokens, "N", CHEAP)


@pytest.mark.usefixtures("_cheap")
def test_remembered_token_is_bound_to_the_line_it_matched():
    memory, (token, line), (_, other) = tokens.Remembered(), new_token(), new_token()
    hashed = tokens.parse_line(line)
    assert memory.check(token, hashed)
    assert memory.knows(token, hashed)
    assert not memory.knows(token, tokens.parse_line(other)), "a revoked line ends it"
    assert not memory.knows(token[:-1] + "0", hashed) or token.endswith("0")


@pytest.mark.usefixtures("_cheap")
def test_wrong_token_is_never_remembered():
    memory, (_, line) = tokens.Remembered(), new_token()
    wrong = "wf_0123456789abcdef_" + "0" * 64
    assert not memory.check(wrong, tokens.parse_line(line))
    assert not memory.knows(wrong, tokens.parse_line(line))


def test_hash_says_nothing_of_the_token():
    token, line = new_token()
    assert token.split("_")[2] not in line


@pytest.mark.parametrize("n", ["1", "3", "2048", "999999", "131072"])
def test_line_with_a_cost_out_of_range_is_refused(n):
    with pytest.raises(ValueError, match="out of range"):
        tokens.parse_line(f"scrypt:{n}:8:1:0123456789abcdef:{'00' * 16}:{'11' * 32}")


# ---- limits -------------------------------------------------------------------------------------


def test_bucket_fills_at_its_rate_and_never_above_its_burst():
    now = [0.0]
    buckets = Buckets(lambda: now[0])
    taken = [buckets.wait("a", 2.0, 3) for _ in range(4)]
    assert taken == [0, 0, 0, 0.5]
    assert buckets.wait("b", 2.0, 3) == 0, "another tenant has its own"
    now[0] = 100.0
    assert [buckets.wait("a", 2.0, 3) for _ in range(4)] == [0, 0, 0, 0.5]


def test_seats_are_given_back_whatever_happens():
    seats = Seats(total=2, per_tenant=1)
    with pytest.raises(KeyError), seats.taken("a"):
        raise KeyError
    with seats.taken("a"):
        with pytest.raises(Refusal) as own, seats.taken("a"):
            pass
        with seats.taken("b"), pytest.raises(Refusal) as full, seats.taken("c"):
            pass
    assert (own.value.status, full.value.status) == (429, 503)
    assert full.value.headers["Retry-After"] == "1"
    assert seats.count == 0
    assert not seats.inside


# ---- audit log ----------------------------------------------------------------------------------


def test_full_file_is_put_aside_and_the_oldest_deleted(tmp_path):
    log = AuditLog(tmp_path, "a", most_bytes=40, keep=2)
    for number in range(8):
        log.write({"number": number, "pad": "x" * 5})
    kept = [
        [json.loads(line)["number"] for line in (tmp_path / name).read_text().splitlines()]
        for name in ("a.2.jsonl", "a.1.jsonl", "a.jsonl")
    ]
    assert kept == [[5], [6], [7]]
    log.close()


def test_log_goes_on_where_it_was(tmp_path):
    for number in range(2):
        log = AuditLog(tmp_path, "a")
        log.write({"number": number})
        log.close()
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 2


def test_deleted_file_is_begun_anew(tmp_path):
    log = AuditLog(tmp_path, "a")
    log.write({"number": 0})
    (tmp_path / "a.jsonl").unlink()
    log.write({"number": 1})
    assert json.loads((tmp_path / "a.jsonl").read_text()) == {"number": 1}
    log.close()


@pytest.mark.parametrize("on_failure", ["refuse", "serve"])
def test_full_disk_is_never_silent_and_leaves_no_half_line(tmp_path, monkeypatch, on_failure):
    log = AuditLog(tmp_path, "a", on_failure=on_failure)
    log.write({"number": 0})
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr("wfilter.serve.audit.os.write", lambda file, data: write(file, data[:5]))
        if on_failure == "refuse":
            with pytest.raises(AuditError):
                log.write({"number": 1})
        else:
            log.write({"number": 1})
            assert log.lost == 1
        assert log.failing
    log.write({"number": 2})
    assert not log.failing
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines] == [0, 2]
    log.close()


# ---- images -------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_every_common_kind_of_image_is_taken(mode):
    image = Image.fromarray(np.zeros((9, 12, 3), np.uint8)).convert(mode)
    kind = "JPEG" if mode == "CMYK" else "PNG"
    assert decode(save(image, kind), GREY).shape == (1, 8, 8)


def bomb(width, height):
    """A small PNG that claims to be huge."""

    def chunk(kind, data):
        checked = kind + data
        return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))

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
