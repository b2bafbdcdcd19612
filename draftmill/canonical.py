"""Canonical JSON and digests: the one way anything is turned into a name.

Keys sorted, no blanks, UTF-8 unescaped, no NaN: equal values give equal bytes on every machine and Python version.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

FINGERPRINT_DIGITS = 12
_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


def canonical_json(value: Any) -> str:
    """The canonical text of a JSON value. Raises ValueError for NaN and infinities."""
    return _encode(value)


def fingerprint(value: Any) -> str:
    """First 12 hex digits of the sha256 of a value's canonical JSON."""
    return digest_bytes(canonical_json(value).encode()).removeprefix("sha256:")[:FINGERPRINT_DIGITS]


def digest_bytes(data: bytes) -> str:
    """The sha256 of bytes as 'sha256:<hex>'."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def seed_of(text: str) -> int:
    """A seed in [0, 2^63) from a text, the same on every machine and independent between texts."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def digest_file(path: Path) -> str:
    """The sha256 of a file as 'sha256:<hex>', read in pieces."""
    with path.open("rb") as stream:
        return "sha256:" + hashlib.file_digest(stream, "sha256").hexdigest()
