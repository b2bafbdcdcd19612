"""What the package asks of a store: whole objects by key, one listing, conditional creation.

Keys are relative paths with forward slashes. Objects are published whole or not at all; a listing may be older than the
last put of another machine but never shows half an object.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object in a listing: its key, its size in bytes and the time of its last change in seconds since 1970."""

    key: str
    size: int
    modified: float


class Store(Protocol):
    """A place for objects."""

    url: str

    def list(self, prefix: str = "") -> dict[str, ObjectInfo]:
        """Every object whose key starts with the prefix."""
        ...

    def get(self, key: str) -> bytes:
        """An object's bytes. Raises KeyError if there is none."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Publish an object whole, replacing an older one."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Publish an object unless one exists; False if it does."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; no error if there is none."""
        ...
