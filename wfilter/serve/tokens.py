"""Bearer tokens: made at random, kept only as scrypt hashes, checked in microseconds once known.

A token is ``wf_ID_SECRET``. The id picks the one hash to compare with, so that a stranger's token
costs no scrypt at all and a customer's first request costs one, however many tenants there are.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections import OrderedDict
from dataclasses import dataclass

N, R, P = 2**14, 8, 1  # scrypt: 16 MiB and about 40 ms
MOST_MEMORY = 2**27
MOST_REMEMBERED = 2**16
_TOKEN = re.compile(r"wf_([0-9a-f]{16})_([0-9a-f]{64})")
_LINE = re.compile(r"scrypt:(\d{1,6}):(\d{1,2}):(\d):([0-9a-f]{16}):([0-9a-f]{32}):([0-9a-f]{64})")


@dataclass(frozen=True)
class HashedToken:
    """What a policy keeps of a token: enough to recognise it, too little to make it."""

    line: str
    id: str
    n: int
    r: int
    p: int
    salt: bytes
    hash: bytes

    def matches(self, token: str) -> bool:
        """Whether ``token`` is the one that was hashed; slow on purpose, against guessing."""
        return hmac.compare_digest(_scrypt(token, self.salt, self.n, self.r, self.p), self.hash)


def new_token() -> tuple[str, str]:
    """A new random token, and the line that stands for it in a policy.

    The token is shown once and kept nowhere: give it to its holder, and put the line into the
    policy.

    Example:
        >>> token, line = new_token()
        >>> parse_line(line).matches(token), parse_line(line).matches(new_token()[0])
        (True, False)
    """
    name, salt = secrets.token_hex(8), secrets.token_bytes(16)
    token = f"wf_{name}_{secrets.token_hex(32)}"
    digest = _scrypt(token, salt, N, R, P)
    return token, f"scrypt:{N}:{R}:{P}:{name}:{salt.hex()}:{digest.hex()}"


def parse_line(line: str) -> HashedToken:
    """The hashed token of a policy's line.

    Raises:
        ValueError: The line is no hashed token; a token in plain text is refused, too.

    Example:
        >>> parse_line("secret")
        Traceback (most recent call last):
        ...
        ValueError: is no hashed token. Make one with wfilter token and paste its 'scrypt:...' line.
    """
    parts = _LINE.fullmatch(line)
    if parts is None:
        kind = "a token in plain text: revoke it" if _TOKEN.fullmatch(line) else "no hashed token"
        raise ValueError(f"is {kind}. Make one with wfilter token and paste its 'scrypt:...' line.")
    n, r, p = (int(parts.group(i)) for i in (1, 2, 3))
    # The limits keep a mistyped line from taking gigabytes, and a hash from being easy to guess.
    if n.bit_count() != 1 or not (2**12 <= n <= 2**16 and 8 <= r <= 16 and 1 <= p <= 4):
        raise ValueError("has scrypt settings out of range. Make one with wfilter token.")
    salt, digest = (bytes.fromhex(parts.group(i)) for i in (5, 6))
    return HashedToken(line, parts.group(4), n, r, p, salt, digest)


def token_id(token: str) -> str | None:
    """The id in a token, which is no secret, or nothing if the text is no token of ours."""
    parts = _TOKEN.fullmatch(token)
    return parts.group(1) if parts else None


class Remembered:
    """Tokens that have matched before, by a keyed digest: a repeated check takes microseconds.

    What is remembered is the policy's line that a token matched. A line that is gone from the
    policy is never looked up again, so that revoking a token need not clear this memory.

    Example:
        >>> memory, (token, line) = Remembered(), new_token()
        >>> memory.knows(token, parse_line(line))
        False
        >>> memory.check(token, parse_line(line)), memory.knows(token, parse_line(line))
        (True, True)
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._lines: OrderedDict[bytes, str] = OrderedDict()

    def knows(self, token: str, hashed: HashedToken) -> bool:
        """Whether this token has matched this very hash before."""
        line = self._lines.get(self._digest(token), "")
        return hmac.compare_digest(line, hashed.line)

    def check(self, token: str, hashed: HashedToken) -> bool:
        """Compare by scrypt, and remember a match."""
        if not hashed.matches(token):
            return False
        self._lines[self._digest(token)] = hashed.line
        while len(self._lines) > MOST_REMEMBERED:
            self._lines.popitem(last=False)
        return True

    def _digest(self, token: str) -> bytes:
        # Keyed by a secret of this process: how long a look-up takes says nothing about a token.
        return hashlib.blake2b(token.encode(), key=self._key, digest_size=32).digest()


def _scrypt(token: str, salt: bytes, n: int, r: int, p: int) -> bytes:
    return hashlib.scrypt(token.encode(), salt=salt, n=n, r=r, p=p, maxmem=MOST_MEMORY, dklen=32)
