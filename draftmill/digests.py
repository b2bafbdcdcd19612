"""Digests of files that are read again and again, remembered by path, size and times.

The cache is a convenience of this machine and decides nothing: an entry that does not fit is computed afresh, a damaged
cache is an empty one, and a folder that cannot be written costs only the next look.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from draftmill.canonical import canonical_json, digest_file
from draftmill.store.local import publish_text

# A file changed more recently could change again within the grain of its time stamp.
SETTLED_S = 2.0


class DigestCache:
    """Remembers `sha256` digests of local files."""

    def __init__(self, path: Path, *, write: bool, settled_s: float = 0.0) -> None:
        """`path` is the cache file, only read with write=False; files that changed in the last `settled_s` are not kept."""
        self._path, self._write, self._settled_ns, self._changed = path, write, int(settled_s * 1e9), False
        self._known: dict[str, list[str]] = self._load()

    def _load(self) -> dict[str, list[str]]:
        try:
            known = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}

    def digest(self, path: Path) -> str:
        """The file's digest as 'sha256:<hex>'. Raises OSError if it cannot be read."""
        status, key = path.stat(), str(path.resolve())
        stamp = f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
        entry = self._known.get(key)
        if isinstance(entry, list) and entry[:-1] == [stamp]:
            return str(entry[-1])
        digest = digest_file(path)
        if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) >= self._settled_ns:
            self._known[key] = [stamp, digest]
            self._changed = True
        return digest

    def save(self) -> None:
        """Keep what was learned, if this cache may write."""
        if self._write and self._changed:
            with contextlib.suppress(OSError):
                publish_text(self._path, canonical_json(self._known))
            self._changed = False
