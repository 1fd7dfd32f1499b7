"""The policy: which tenants there are, what each must not recognise, and by which tokens they come.

It is TOML, checked in full before it is used: every mistake is named with its line and a remedy,
and a policy with one mistake is not used at all.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from wfilter.serve.tokens import HashedToken, parse_line

RATE, BURST = 50.0, 100
MOST_REQUESTS = 10**9
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MOST_MISTAKES = 20  # named one by one; any more are only counted
_KEYS = ("forget", "tokens", "requests_per_second", "burst")


class PolicyError(ValueError):
    """A policy that must not be used; the message has one line for each mistake."""


@dataclass(frozen=True)
class Tenant:
    """A customer: the classes that must not be recognised for it, and how often it may ask."""

    name: str
    forget: frozenset[int]
    tokens: tuple[HashedToken, ...]
    requests_per_second: float = RATE
    burst: int = BURST
    set_hash: str = ""


@dataclass(frozen=True)
class Policy:
    """All tenants at one moment; ``version`` is a digest of the text it was read from."""

    version: str
    tenants: Mapping[str, Tenant]
    holders: Mapping[str, tuple[Tenant, HashedToken]]  # by the id inside a token


def parse_policy(text: str, class_names: Sequence[str], source: str = "policy") -> Policy:
    r"""The policy in a TOML text, for a model with these classes.

    Args:
        text: The TOML.
        class_names: The model's classes, in the order of its outputs.
        source: What to call the text in errors.

    Raises:
        PolicyError: Something is wrong; every mistake has its line and what to do.

    Example:
        >>> policy = parse_policy('[tenants.museum]\nforget = ["cat"]\ntokens = []', ["cat", "dog"])
        >>> policy.tenants["museum"].forget
        frozenset({0})
        >>> parse_policy('[tenants.museum]\nforget = ["cow"]\ntokens = []', ["cat", "dog"], "a.toml")
        Traceback (most recent call last):
        ...
        wfilter.serve.policy.PolicyError: a.toml line 2: tenant 'museum' forgets 'cow', which is no class of the model. Closest names: cat, dog.
    """  # noqa: E501
    try:
        table: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"{source} is not valid TOML: {error}.") from None
    reader = _Reader(text, source, tuple(class_names))
    policy = reader.policy(table)
    if reader.mistakes:
        more = [f"and {reader.untold} more."] if reader.untold else []
        raise PolicyError("\n".join([*reader.mistakes, *more]))
    return policy


class _Reader:
    """Reads one text and collects what is wrong with it."""

    def __init__(self, text: str, source: str, class_names: tuple[str, ...]):
        self.lines = text.splitlines()
        self.source, self.class_names = source, class_names
        self.indices = {name: index for index, name in enumerate(class_names)}
        self.version = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.mistakes: list[str] = []
        self.untold = 0

    @cached_property
    def alike(self) -> dict[str, set[int]]:
        """The classes that a reader cannot tell apart, by what is read."""
        alike: dict[str, set[int]] = {}
        for index, name in enumerate(self.class_names):
            alike.setdefault(_as_read(name), set()).add(index)
        return alike

    @cached_property
    def headers(self) -> list[list[str] | None]:
        """For each line, the path of the table that it begins, if it begins one."""
        return [_header(line) for line in self.lines]

    def policy(self, table: dict[str, Any]) -> Policy:
        for key in table.keys() - {"tenants"}:
            self.wrong(f"{key!r} is unknown. A policy has [tenants.NAME] tables.", key=key)
        tables = table.get("tenants")
        if not isinstance(tables, dict) or not tables:
            self.wrong("there is no tenant. Add a table [tenants.NAME] with forget and tokens.")
            tables = {}
        tenants = {name: self.tenant(name, values) for name, values in tables.items()}
        return Policy(self.version, tenants, self.holders(tenants.values()))

    def tenant(self, name: str, values: Any) -> Tenant:
        if not _NAME.fullmatch(name):
            self.wrong(
                f"{name!r} is no name for a tenant. Use up to 64 letters, digits and ._- that "
                "begin with a letter or digit.",
                name,
            )
        if not isinstance(values, dict):
            self.wrong(f"tenant {name!r} is no table. Write [tenants.{name}].", name)
            values = {"forget": [], "tokens": []}
        for key in values.keys() - {*_KEYS}:
            known = ", ".join(_KEYS)
            self.wrong(
                f"tenant {name!r} has an unknown key {key!r}. Known are: {known}.", name, key
            )
        forget = frozenset(self.classes(name, values))
        return Tenant(
            name,
            forget,
            tuple(self.tokens(name, values)),
            self.number(name, values, "requests_per_second", RATE),
            int(self.number(name, values, "burst", BURST)),
            set_hash([self.class_names[index] for index in forget]),
        )

    def classes(self, name: str, values: dict[str, Any]) -> Iterator[int]:
        """The indices of a tenant's classes, given by name or index."""
        remedy = "[] for a tenant that may recognise every class"
        read = [self.index(name, value) for value in self.list(name, values, "forget", remedy)]
        indices = [index for index in read if index is not None]
        for index in {index for index in indices if indices.count(index) > 1}:
            listed = self.class_names[index]
            self.wrong(f"tenant {name!r} forgets {listed!r} twice. Name it once.", name, "forget")
        for index in set(indices):
            for other in sorted(self.alike[_as_read(self.class_names[index])] - set(indices)):
                self.wrong(
                    f"tenant {name!r} forgets {_spelt(self.class_names[index])}, but not class "
                    f"{other}, {_spelt(self.class_names[other])}, which reads the same. List both.",
                    name,
                    "forget",
                )
        if len(set(indices)) == len(self.class_names):
            self.wrong(
                f"tenant {name!r} forgets every class: no answer is left. Take its tokens away "
                "instead.",
                name,
                "forget",
            )
        yield from indices

    def index(self, name: str, value: Any) -> int | None:
        count = len(self.class_names)
        if isinstance(value, str) and value in self.indices:
            return self.indices[value]
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < count:
            return value
        twins = self.alike.get(_as_read(value), set()) if isinstance(value, str) else set()
        if twins:
            listed = " or ".join(f"{i}, {_spelt(self.class_names[i])}" for i in sorted(twins))
            remedy = f"It reads like class {listed}, but is spelt otherwise. Write the index."
        elif isinstance(value, str):
            close = difflib.get_close_matches(value, self.class_names, 3) or self.class_names[:3]
            remedy = f"Closest names: {', '.join(close)}."
        else:
            remedy = f"Write a name, or an index in 0..{count - 1}."
        shown = _spelt(value) if isinstance(value, str) else repr(value)
        words = f"tenant {name!r} forgets {shown}, which is no class of the model. {remedy}"
        self.wrong(words, name, "forget", value)
        return None

    def tokens(self, name: str, values: dict[str, Any]) -> Iterator[HashedToken]:
        remedy = "[] for a tenant that may not ask"
        for number, value in enumerate(self.list(name, values, "tokens", remedy), 1):
            try:
                yield parse_line(value if isinstance(value, str) else "")
            except ValueError as error:  # the value itself is not repeated: it may be a secret
                words = f"token {number} of tenant {name!r} {error}"
                self.wrong(words, name, "tokens", value)

    def holders(self, tenants: Any) -> dict[str, tuple[Tenant, HashedToken]]:
        holders: dict[str, tuple[Tenant, HashedToken]] = {}
        for tenant in tenants:
            for token in tenant.tokens:
                if token.id in holders:
                    other = holders[token.id][0].name
                    where = "twice" if other == tenant.name else f"in tenant {other!r} too"
                    words = (
                        f"a token of tenant {tenant.name!r} stands {where}. Keep it in one place."
                    )
                    self.wrong(words, tenant.name, "tokens", token.line)
                holders[token.id] = (tenant, token)
        return holders

    def list(self, name: str, values: dict[str, Any], key: str, remedy: str) -> Sequence[Any]:
        """A list that must be there, if only empty: half a table must not pass for a whole one."""
        value = values.get(key)
        if isinstance(value, list):
            return value
        fault = "lacks" if value is None else "has no list as"
        self.wrong(f"tenant {name!r} {fault} {key!r}. Write {key} = [...], {remedy}.", name, key)
        return []

    def number(self, name: str, values: dict[str, Any], key: str, default: float) -> float:
        value = values.get(key, default)
        kinds = int if key == "burst" else int | float
        fits = isinstance(value, kinds) and not isinstance(value, bool)
        if fits and 0 < value <= MOST_REQUESTS:
            return float(value)
        kind = "whole number of 1 or more" if key == "burst" else "number above 0"
        most = f", {MOST_REQUESTS} at most" if fits and value > 0 else ""
        self.wrong(
            f"tenant {name!r} has {key} = {repr(value)[:40]}. Write a {kind}{most}.", name, key
        )
        return float(default)

    def wrong(
        self, words: str, tenant: str | None = None, key: str = "", value: Any = None
    ) -> None:
        if len(self.mistakes) >= MOST_MISTAKES:  # finding the line of each might take minutes
            self.untold += 1
            return
        line = self.find(tenant, key, value)
        self.mistakes.append(f"{self.source} line {line}: {words}")

    def find(self, tenant: str | None, key: str, value: Any) -> int:
        """The line of a value, else of its key, else of its table, else the first."""
        best, inside, of_key = 1, tenant is None, False
        for number, line in enumerate(self.lines, 1):
            path = self.headers[number - 1]
            if path is not None:
                inside = tenant is None or path == ["tenants", tenant]
                best, of_key = (number, False) if inside and tenant is not None else (best, False)
                if inside and key in path:
                    return number
            elif inside:
                begins = re.match(rf"""\s*["']?{re.escape(key)}["']?\s*=""", line)
                if key and begins:
                    best, of_key = number, True
                elif re.match(r"\s*[\w\"'-]+\s*=", line):
                    of_key = False
                if of_key and (value is None or _stands_in(value, line)):
                    return number
        return best


def _as_read(name: str) -> str:
    """A name as it looks: without what differs in Unicode alone, invisible letters and blanks."""
    plain = unicodedata.normalize("NFKC", name)
    seen = (" " if c.isspace() else c for c in plain if unicodedata.category(c) != "Cf")
    return " ".join("".join(seen).split())


def _spelt(name: str) -> str:
    """A name in quotes; where it is not plain ASCII, its letters by number, too."""
    return repr(name) if name.isascii() else f"{name!r} (spelt {name!a})"


def _header(line: str) -> list[str] | None:
    """The path of a table's header, or nothing for any other line."""
    if not line.lstrip().startswith("["):
        return None
    try:
        inner: Any = tomllib.loads(line)
    except (ValueError, RecursionError):
        return None
    path = []
    while isinstance(inner, dict) and inner:
        name, inner = next(iter(inner.items()))
        path.append(name)
    return path or None


def _stands_in(value: Any, line: str) -> bool:
    return (
        (json.dumps(value) in line or f"'{value}'" in line)
        if isinstance(value, str)
        else re.search(rf"(?<![\w.]){re.escape(str(value))}(?![\w.])", line) is not None
    )


def set_hash(names: Sequence[str]) -> str:
    """A digest of a set of classes by name: the same in any order and for every tenant.

    Example:
        >>> set_hash(["dog", "cat"]) == set_hash(["cat", "dog"])
        True
    """
    return hashlib.sha256(json.dumps(sorted(names)).encode()).hexdigest()[:16]
