"""Tokens, limits and the audit log, each by itself."""

import json
import os

import pytest

from servers import CHEAP
from wfilter.serve import new_token, tokens
from wfilter.serve.audit import AuditError, AuditLog
from wfilter.serve.limits import Buckets, Refusal, Seats

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
