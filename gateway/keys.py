"""API keys: what a header shows, and what the file of keys says of each.

The file is TOML, one table for each key:

    [[keys]]
    name = "batch"
    sha256 = "9f86d0..."        # of the key itself, in hexadecimal
    priority = -10              # this and the following are optional
    max_concurrent = 8
    requests_per_minute = 600
    tokens_per_minute = 100000
    max_tokens = 1024

Only hashes are kept. A plain SHA-256 is right for them: a key is 256 random bits, which nobody can
guess from its hash. A slow hash with a salt protects what people make up, which can be guessed; for
random bits it would add nothing but work, which anybody could cause by sending bad keys.

Neither keys nor hashes are in any message. Knows nothing of where the file is (`key_file.py`)
and of what a key may have at a moment (`admission.py`).
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from dataclasses import dataclass, field
from typing import Any

from outrider.params import MAX_PRIORITY
from outrider.serving.errors import Unauthenticated
from outrider.text import one_line

_MOST = 10**9
LIMITS = {
    "priority": (-MAX_PRIORITY, MAX_PRIORITY),
    "max_concurrent": (1, _MOST),
    "requests_per_minute": (1, _MOST),
    "tokens_per_minute": (1, _MOST),
    "max_tokens": (1, _MOST),
}
"""The optional fields of a key, each a whole number from the first to the second."""
_FIELDS = ("name", "sha256", *LIMITS)
NAME_RULE = "1 to 32 letters, digits and ._@-, the first a letter or digit"
# No key and no hash is that short: one that was pasted here by mistake is not shown as a name.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,31}")
_HASH = re.compile(r"[0-9A-Fa-f]{64}")
_MAYBE_SECRET = re.compile(r"[^\s'\"]{33,}")
_SALT_DOMAIN = b"outrider cache salt\0"
_SALT_BYTES = 16

MAX_FILE_BYTES = 4 * 1024 * 1024
"""Some twenty thousand keys."""
_MAX_HEADER_CHARS = 1024


class KeyFileError(ValueError):
    """The file cannot be used; the message names the entry and the field, and shows no value."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key that is known, and what its requests may do; None for no limit."""

    name: str
    sha256: bytes = field(repr=False)
    priority: int | None = None
    """Of its requests, which may only lower it."""
    max_concurrent: int | None = None
    """Most requests at once."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Of prompts and answers together."""
    max_tokens: int | None = None
    """Most that a request may ask for."""

    @property
    def cache_salt(self) -> bytes:
        """What keeps its cached prefixes from everybody else's. Tells nothing of the key or its
        hash, and is the same at every gateway that has the key."""
        return hashlib.sha256(_SALT_DOMAIN + self.sha256).digest()[:_SALT_BYTES]


Keys = tuple[ApiKey, ...]


def key_hash(key: str) -> bytes:
    """SHA-256 of a key: what is looked up, so that no time tells how nearly a key was right."""
    return hashlib.sha256(key.encode("ascii")).digest()


def bearer_key(authorization: str | None) -> str:
    """The key of an `authorization` header, printable ASCII. Raises Unauthenticated."""
    if authorization is None or not authorization.strip():
        raise _unauthenticated("no API key was sent")
    if len(authorization) > _MAX_HEADER_CHARS:
        raise _unauthenticated(f"the header has more than {_MAX_HEADER_CHARS} characters")
    if not authorization.isascii():
        raise _unauthenticated("the header has characters that are not ASCII")
    scheme, *rest = authorization.split()
    if scheme.lower() != "bearer":
        raise _unauthenticated("the header's scheme is not Bearer")
    if len(rest) != 1 or not rest[0].isprintable():
        raise _unauthenticated("behind Bearer there must be one key")
    return rest[0]


def unknown_key() -> Unauthenticated:
    """For a key that is well formed, and not in the file."""
    return _unauthenticated("the API key is not known")


def _unauthenticated(reason: str) -> Unauthenticated:
    return Unauthenticated(f"{reason}; send the header `authorization: Bearer KEY`")


def is_name(name: str) -> bool:
    """Whether a key can be called that."""
    return _NAME.fullmatch(name) is not None


def parse_keys(content: bytes) -> Keys:
    """The keys of a file, each name and each hash once. Raises KeyFileError."""
    if len(content) > MAX_FILE_BYTES:
        raise KeyFileError(f"larger than {MAX_FILE_BYTES} bytes")
    try:
        tables = tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        raise KeyFileError("not UTF-8") from error
    except RecursionError as error:
        raise KeyFileError("nested too deeply") from error
    except ValueError as error:
        raise KeyFileError(f"not TOML: {_shown(str(error))}") from error
    entries = tables.pop("keys", [])
    for unknown in tables:
        raise KeyFileError(f"unknown field {_shown(unknown)}; there is only [[keys]]")
    if not isinstance(entries, list):
        raise KeyFileError("keys must be a list of tables, [[keys]]")
    keys = tuple(_parse_key(f"entry {number}", entry) for number, entry in enumerate(entries, 1))
    _check_unique("name", [key.name for key in keys])
    _check_unique("sha256", [key.sha256 for key in keys])
    return keys


def _parse_key(where: str, entry: Any) -> ApiKey:
    if not isinstance(entry, dict):
        raise KeyFileError(f"{where}: must be a table, [[keys]]")
    name, sha256 = entry.get("name"), entry.get("sha256")
    if not isinstance(name, str) or not is_name(name):
        raise KeyFileError(f"{where}: name must be {NAME_RULE}")
    where = f"{where} ({name})"
    for unknown in entry.keys() - set(_FIELDS):
        known = ", ".join(_FIELDS)
        raise KeyFileError(f"{where}: unknown field {_shown(unknown)}; there are: {known}")
    if not isinstance(sha256, str) or not _HASH.fullmatch(sha256):
        raise KeyFileError(f"{where}: sha256 must be 64 hexadecimal digits, the hash of the key")
    limits = {name: entry[name] for name in LIMITS if name in entry}
    for limit, value in limits.items():
        low, high = LIMITS[limit]
        if type(value) is not int or not low <= value <= high:  # a bool is an int, too
            raise KeyFileError(f"{where}: {limit} must be a whole number from {low} to {high}")
    return ApiKey(name, bytes.fromhex(sha256), **limits)


def _shown(text: str) -> str:
    """What the file says, without what may be a key or a hash: both are pasted to wrong places."""
    return one_line(_MAYBE_SECRET.sub("...", text))


def _check_unique(name: str, values: list[Any]) -> None:
    first: dict[Any, int] = {}
    for number, value in enumerate(values, 1):
        if value in first:
            raise KeyFileError(f"entry {number}: {name} is that of entry {first[value]} too")
        first[value] = number
