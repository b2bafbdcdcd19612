"""What the package asks of a store: whole objects by key, one listing, conditional creation.

Keys are relative paths with forward slashes. Objects are published whole or not at all; a listing may be older than the
last put of another machine but never shows half an object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object: its key, its size in bytes and the time of its last change in seconds since 1970.

    `etag` changes with the content and is empty for a directory. `sha256` is the digest that was stored beside the
    object; only `info` knows it, and it is empty where the store keeps none. So it is with `first`, the digest of the
    first output of the job that made the object as a later one (store/workplace.py).
    """

    key: str
    size: int
    modified: float
    etag: str = ""
    sha256: str = ""
    first: str = ""


class Store(Protocol):
    """A place for objects. What a person can mend raises UserError."""

    url: str

    def list(self, prefix: str = "") -> dict[str, ObjectInfo]:
        """Every object whose key starts with the prefix."""
        ...

    def info(self, key: str) -> ObjectInfo | None:
        """One object without its bytes; None if there is none."""
        ...

    def get(self, key: str) -> bytes:
        """An object's bytes. Raises KeyError if there is none."""
        ...

    def part(self, key: str, start: int, stop: int) -> bytes:
        """The bytes from `start` up to `stop` of an object. Raises KeyError if there is none."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Publish an object whole, replacing an older one."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Publish an object unless one exists; False if it does. Of several that try at once, one succeeds."""
        ...

    def replace(self, key: str, data: bytes, old: bytes) -> bool:
        """Publish an object in the place of one that still has the bytes `old`; False if it has others or is gone."""
        ...

    def fetch(self, key: str, path: Path) -> None:
        """Copy an object into a file, which appears whole or not at all. Raises KeyError if there is none."""
        ...

    def publish(self, key: str, path: Path) -> None:
        """Publish a finished local file whole, replacing an older object."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; no error if there is none."""
        ...

    def address(self, key: str) -> str:
        """Where an object lies or would lie, for people: a path or a URL."""
        ...

    def free_bytes(self) -> int | None:
        """Room that is left; None where a store knows no limit."""
        ...

    def remove_unfinished(self, older_than_s: float, *, done: Sequence[str] = (), dry: bool = False) -> Sequence[str]:
        """Remove what killed publications left behind; says what was, or `dry` would be.

        Removed is what is older than that, what nobody can be at work on any more, and what was to become an object
        whose key starts with one of `done`: of these jobs nothing is published any more.
        """
        ...
