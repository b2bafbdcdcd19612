"""Digests of files that are read again and again, remembered by path, size and modification time.

The cache is a convenience of this machine and decides nothing: an entry that does not fit is computed afresh, and a
damaged cache is an empty one.
"""

from __future__ import annotations

import json
from pathlib import Path

from draftmill.canonical import canonical_json, digest_file
from draftmill.store.local import publishing


class DigestCache:
    """Remembers `sha256` digests of local files."""

    def __init__(self, path: Path, *, write: bool) -> None:
        """`path` is the cache file; with write=False it is only read."""
        self._path, self._write, self._changed = path, write, False
        self._known: dict[str, list[int | str]] = self._load()

    def _load(self) -> dict[str, list[int | str]]:
        try:
            known = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}

    def digest(self, path: Path) -> str:
        """The file's digest as 'sha256:<hex>'. Raises OSError if it cannot be read."""
        status = path.stat()
        stamp: list[int | str] = [status.st_size, status.st_mtime_ns]
        entry = self._known.get(str(path.resolve()))
        if entry is not None and entry[:2] == stamp:
            return str(entry[2])
        digest = digest_file(path)
        self._known[str(path.resolve())] = [*stamp, digest]
        self._changed = True
        return digest

    def save(self) -> None:
        """Keep what was learned, if this cache may write."""
        if self._write and self._changed:
            with publishing(self._path) as temporary:
                temporary.write_text(canonical_json(self._known), encoding="utf-8")
            self._changed = False
