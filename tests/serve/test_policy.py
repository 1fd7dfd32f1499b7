"""A policy is whole and right, or it is not used."""

import json
import logging
import os
import time

import pytest

from servers import NAMES, Book
from wfilter.serve import PolicyError, parse_policy
from wfilter.serve.watch import SETTLED, PolicyFile

LINE = "scrypt:4096:8:1:0123456789abcdef:" + "00" * 16 + ":" + "11" * 32
OTHER = LINE.replace("0123456789abcdef", "fedcba9876543210")
GOOD = f"""
[tenants.museum]
forget = ["digit-1", 7]
tokens = ["{LINE}"]
burst = 3

[tenants."second-hand.shop"]
forget = []
tokens = []
requests_per_second = 0.5
"""


def test_good_policy_gives_classes_tokens_and_limits():
    policy = parse_policy(GOOD, NAMES)
    museum, shop = policy.tenants["museum"], policy.tenants["second-hand.shop"]
    assert museum.forget == {1, 7}
    assert (museum.burst, shop.requests_per_second) == (3, 0.5)
    assert policy.holders["0123456789abcdef"][0] is museum
    assert parse_policy(GOOD + "# changed", NAMES).version != policy.version


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('"digit-1"', '"digit1"'), r"line 3: tenant 'museum' forgets 'digit1', .* digit-1"),
        (("7]", "10]"), r"line 3: tenant 'museum' forgets 10, .*0\.\.9"),
        (("7]", "true]"), "line 3: tenant 'museum' forgets True"),
        (("7]", "1]"), "line 3: tenant 'museum' forgets 'digit-1' twice"),
        (('["digit-1", 7]', "[0,1,2,3,4,5,6,7,8,9]"), "line 3: .*forgets every class"),
        (('forget = ["digit-1", 7]', ""), "line 2: tenant 'museum' lacks 'forget'"),
        (("forget = []", 'forget = "digit-1"'), "line 8: .*has no list as 'forget'"),
        (("tokens = []", "token = []"), "line 9: .*unknown key 'token'"),
        (("tokens = []", f'tokens = ["{LINE}"]'), "line 9: .*in tenant 'museum' too"),
        (("burst = 3", f'tokens = ["{LINE}", "{LINE}"]'), "not valid TOML"),
        (("burst = 3", "burst = 0"), "line 5: tenant 'museum' has burst = 0"),
        (("burst = 3", f"burst = {10**400}"), "line 5: .* 1000000000 at most"),
        (("per_second = 0.5", "per_second = inf"), "line 10: .* = inf. .* 1000000000 at most"),
        (("per_second = 0.5", "per_second = nan"), "line 10: .* = nan. Write a number above 0"),
        (("burst = 3", "burst = 1.5"), r"line 5: tenant 'museum' has burst = 1\.5"),
        (("= 0.5", "= inf"), "line 10: .*requests_per_second = inf"),
        (("[tenants.museum]", '[tenants.""]'), "line 2: '' is no name for a tenant"),
        (("[tenants.museum]", '[tenants."a b"]'), "line 2: 'a b' is no name"),
        (("[tenants.museum]", "[tenant.museum]"), "line 2: 'tenant' is unknown"),
        (("forget = []", "forget = ["), r"not valid TOML: .*line"),
    ],
)
def test_mistake_is_named_with_its_line_and_a_remedy(change, words):
    text = GOOD.replace(*change)
    assert text != GOOD
    with pytest.raises(PolicyError, match=words):
        parse_policy(text, NAMES, "policy.toml")


def test_all_mistakes_are_told_at_once():
    text = GOOD.replace("7]", "99]").replace("burst = 3", "burst = -1")
    with pytest.raises(PolicyError) as caught:
        parse_policy(text, NAMES)
    assert len(str(caught.value).splitlines()) == 2


LATIN, CYRILLIC = "cat", "c\u0430t"
COMPOSED, DECOMPOSED = "caf\u00e9", "cafe\u0301"


def forgetting(*names):
    return f"[tenants.a]\nforget = {json.dumps(names)}\ntokens = []"


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (DECOMPOSED, r"reads like class 0, .*caf\\xe9.*, but is spelt otherwise\. Write the index"),
        ("dog\u200b", r"spelt 'dog\\u200b'.*reads like class 1, 'dog'"),
        ("dog ", "reads like class 1, 'dog'"),
        ("d\u043eg", r"spelt 'd\\u043eg'\).*Closest names: dog"),
    ],
)
def test_name_that_only_looks_right_is_refused_and_spelt_out(written, words):
    with pytest.raises(PolicyError, match=words):
        parse_policy(forgetting(written), [COMPOSED, "dog", "bird"])


@pytest.mark.parametrize("twin", [DECOMPOSED, COMPOSED + "\u200d", " " + COMPOSED])
def test_set_without_the_twin_of_a_class_is_refused(twin):
    """A customer would read the forbidden name in its answers."""
    names = [COMPOSED, "dog", twin]
    with pytest.raises(PolicyError, match=r"but not class 2, .*reads the same\. List both"):
        parse_policy(forgetting(COMPOSED), names)
    assert parse_policy(forgetting(COMPOSED, twin), names).tenants["a"].forget == {0, 2}
    assert parse_policy(forgetting("dog"), names).tenants["a"].forget == {1}


def test_tenant_that_stands_twice_is_refused():
    with pytest.raises(PolicyError, match=r"not valid TOML: .* twice .*line 7"):
        parse_policy(GOOD.replace('"second-hand.shop"', '"museum"'), NAMES)


def test_value_of_a_long_list_is_found_on_its_own_line():
    text = GOOD.replace('["digit-1", 7]', '[\n  "digit-1",\n  "cat",\n]')
    with pytest.raises(PolicyError, match="line 5: tenant 'museum' forgets 'cat'"):
        parse_policy(text, NAMES)


def test_token_in_plain_text_is_refused_and_not_repeated():
    secret = "wf_0123456789abcdef_" + "ab" * 32
    with pytest.raises(PolicyError, match="token 1 of tenant 'museum' is a token in plain") as got:
        parse_policy(GOOD.replace(LINE, secret), NAMES)
    assert secret not in str(got.value)


@pytest.mark.parametrize("text", ["", "tenants = {}", "tenants = 3", "[limits]"])
def test_policy_without_tenants_is_refused(text):
    with pytest.raises(PolicyError, match=r"there is no tenant\. Add"):
        parse_policy(text, NAMES)


def test_every_cut_of_a_policy_is_refused_or_keeps_whole_tenants_only():
    whole = parse_policy(GOOD, NAMES)
    for end in range(len(GOOD)):
        try:
            part = parse_policy(GOOD[:end], NAMES)
        except PolicyError:
            continue
        for name, tenant in part.tenants.items():
            assert tenant.forget == whole.tenants[name].forget
            assert set(tenant.tokens) <= set(whole.tenants[name].tokens)


# ---- the file -----------------------------------------------------------------------------------


def test_replaced_file_is_in_force_at_the_next_look(tmp_path):
    book = Book(tmp_path / "policy.toml", {"a": [1]})
    file = PolicyFile(book.path, NAMES)
    first = file.current()
    assert file.current() is first, "an unchanged file is not read again"
    book.forget["a"] = [2]
    book.write()
    assert file.current().tenants["a"].forget == {2}


def test_refused_file_leaves_the_last_good_policy_in_force(tmp_path):
    book = Book(tmp_path / "policy.toml", {"a": [1]})
    file = PolicyFile(book.path, NAMES)
    first = file.current()
    book.forget["a"] = [99]
    book.write()
    assert file.current() is first
    assert "forgets 99" in file.problem
    book.path.unlink()
    assert file.current() is first
    assert "No such file" in file.problem
    book.forget["a"] = [3]
    book.write()
    assert file.current().tenants["a"].forget == {3}
    assert file.problem is None


def test_file_written_in_place_is_used_only_when_it_has_settled(tmp_path):
    book = Book(tmp_path / "policy.toml", {"a": [1], "b": [2]})
    file = PolicyFile(book.path, NAMES)
    whole = book.text()
    half = whole[: whole.index("[tenants.b]")]
    book.path.write_text(half)  # a valid policy, without tenant b: the editor is not done
    assert set(file.current().tenants) == {"a", "b"}
    old = time.time() - 2 * SETTLED
    os.utime(book.path, (old, old))
    assert set(file.current().tenants) == {"a"}


def test_missing_policy_is_refused_at_the_start(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a file"):
        PolicyFile(tmp_path / "none.toml", NAMES)


def test_file_replaced_twice_between_two_looks_is_in_force_at_once(tmp_path):
    book = Book(tmp_path / "policy.toml", {"a": [1]})
    file = PolicyFile(book.path, NAMES)
    for number in range(2, 10):
        for chosen in (0, number):  # the second may get the number of the inode first read
            book.forget["a"] = [chosen]
            book.write()
        assert set(file.current().tenants["a"].forget) == {number}


def test_date_in_the_future_does_not_keep_a_policy_out_of_force(tmp_path):
    book = Book(tmp_path / "policy.toml", {"a": [1]})
    file = PolicyFile(book.path, NAMES)
    book.path.write_text(book.text().replace("[1]", "[2]"))
    later = time.time() + 1e6
    os.utime(book.path, (later, later))
    assert file.current().tenants["a"].forget == {1}
    time.sleep(SETTLED + 0.1)
    assert file.current().tenants["a"].forget == {2}


def test_link_to_another_folder_is_followed_at_once(tmp_path):
    """As a mounted secret is replaced: the file's own path leads through a link that is renamed."""
    for name, classes in (("one", [1]), ("two", [2])):
        (tmp_path / name).mkdir()
        Book(tmp_path / name / "policy.toml", {"a": classes})
    (tmp_path / "now").symlink_to("one")
    file = PolicyFile(tmp_path / "now" / "policy.toml", NAMES)
    assert file.current().tenants["a"].forget == {1}
    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").replace(tmp_path / "now")
    assert file.current().tenants["a"].forget == {2}


def test_pipe_in_place_of_the_policy_stops_nothing(tmp_path):
    book = Book(tmp_path / "policy.toml", {"a": [1]})
    file = PolicyFile(book.path, NAMES)
    book.path.unlink()
    os.mkfifo(book.path)
    assert file.current().tenants["a"].forget == {1}
    assert "is not a file" in file.problem


def test_pipe_put_there_after_the_look_stops_nothing(tmp_path, monkeypatch):
    book = Book(tmp_path / "policy.toml", {"a": [1]})
    file = PolicyFile(book.path, NAMES)
    book.forget["a"] = [2]
    book.write()
    status = os.stat(book.path)
    book.path.unlink()
    os.mkfifo(book.path)
    monkeypatch.setattr("wfilter.serve.watch.os.stat", lambda _: status)
    assert file.current().tenants["a"].forget == {1}
    assert "is not a file" in file.problem


def test_link_to_what_is_no_policy_leaves_the_last_good_one_in_force(tmp_path):
    book = Book(tmp_path / "policy.toml", {"a": [1]})
    file = PolicyFile(book.path, NAMES)
    for target, words in (("/dev/zero", "is not a file"), (__file__, "not valid TOML")):
        (tmp_path / "next").symlink_to(target)
        (tmp_path / "next").replace(book.path)
        assert file.current().tenants["a"].forget == {1}
        assert words in file.problem


def test_folder_that_everybody_may_write_is_told_of_unless_sticky(tmp_path, caplog):
    book = Book(tmp_path / "policy.toml", {"a": [1]})
    for mode, told in ((0o1777, False), (0o777, True)):
        tmp_path.chmod(mode)
        with caplog.at_level(logging.WARNING, "wfilter.serve"):
            PolicyFile(book.path, NAMES)
        assert ("chmod o-w" in caplog.text) is told


def test_policy_that_everybody_may_write_is_told_of(tmp_path, caplog):
    book = Book(tmp_path / "policy.toml", {"a": [1]})
    book.path.chmod(0o666)
    with caplog.at_level(logging.WARNING, "wfilter.serve"):
        PolicyFile(book.path, NAMES)
    assert "chmod o-w" in caplog.text


def test_large_policy_of_another_model_is_refused_in_seconds():
    text = "".join(f"[tenants.t{i}]\nforget = ['no-{i}']\ntokens = []\n" for i in range(3000))
    began = time.process_time()
    with pytest.raises(PolicyError, match="and 2980 more"):
        parse_policy(text, NAMES)
    assert time.process_time() - began < 10


def test_last_good_policy_stays_whatever_is_wrong_with_the_next(tmp_path, monkeypatch):
    book = Book(tmp_path / "policy.toml", {"museum": [1]})
    file = PolicyFile(book.path, NAMES)
    before = file.current()

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr("wfilter.serve.watch.parse_policy", fail)
    book.forget["museum"] = []
    book.write()
    assert file.current() is before
    assert file.problem == "MemoryError"
