"""Digests of source files, remembered by size and times so that an unchanged file costs one look.

What is remembered is a convenience of one machine and stands in no committed object. A file changed in the last seconds
is not remembered: it could change again within the grain of its time stamp.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from draftmill.canonical import digest_file
from draftmill.prompts.files import SourceFile, unreadable
from draftmill.store.local import publishing

NAME = "digests.json"
_GRAIN_NS = 2_000_000_000


class Digests:
    """The digest of each source file, read from and kept in one small local file."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._known: dict[str, list[object]] = {}
        self._changed = False
        with contextlib.suppress(OSError, ValueError):
            loaded = json.loads(self._path.read_text(encoding="utf-8"))
            self._known = loaded if isinstance(loaded, dict) else {}

    def of(self, file: SourceFile) -> str:
        """A local file's 'sha256:<hex>'; of an object its ETag, which costs no download."""
        if file.remote:
            return f"etag:{file.stamp}"
        key = os.path.abspath(file.path)
        known = self._known.get(key)
        if isinstance(known, list) and known[:2] == [file.size, file.stamp] and len(known) == 3:
            return str(known[2])
        try:
            digest = digest_file(Path(file.path))
        except OSError as error:
            raise unreadable(file.path, error) from None
        if time.time_ns() - max(map(int, file.stamp.split(":"))) > _GRAIN_NS:
            self._known[key] = [file.size, file.stamp, digest]
            self._changed = True
        return digest

    def save(self) -> None:
        """Keep what was learnt; a folder that cannot be written costs only the next look."""
        if self._changed:
            with contextlib.suppress(OSError), publishing(self._path) as temporary:
                temporary.write_text(json.dumps(self._known, indent=0, sort_keys=True), encoding="utf-8")
