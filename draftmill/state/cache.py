"""Small objects of a store, each fetched once a version.

A version is what the listing says: the ETag, or time and size where there is none. What was read can be kept in a file,
so that a command that looks once does not fetch thousands of heartbeats that ended days ago. The file is only a copy:
damaged or absent, everything is read again.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from draftmill.canonical import canonical_json
from draftmill.store.base import ObjectInfo, Store
from draftmill.store.local import publish_text

FORMAT = 1
_THREADS = 16
_WORTH_SAVING = 50

Version = str
Reduce = Callable[[bytes], Any]


def version_of(info: ObjectInfo) -> Version:
    """What changes when an object does."""
    return info.etag or f"{info.modified!r} {info.size}"


def cache_file(folder: Path, url: str) -> Path:
    """Where the copies of one store's objects are kept."""
    return folder / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}.json"


class Cache:
    """JSON values made from objects of a store, by key; threads may share it."""

    def __init__(self, store: Store, file: Path | None = None) -> None:
        """`file` keeps the values between processes; None keeps them in memory only."""
        self._store, self._file = store, file
        self._held: dict[str, tuple[Version, Any]] = _read(file) if file else {}
        self._lock = threading.Lock()
        self._unsaved = 0
        self.fetched = 0

    def values(self, keys: Iterable[str], listing: Mapping[str, ObjectInfo], reduce: Reduce) -> dict[str, Any]:
        """The reduced values of the keys, fetching those whose version changed; a key that is gone is left out.

        `reduce` turns bytes into a JSON value; None stands for an unreadable object and is a value like another.
        """
        wanted = {key: version_of(listing[key]) for key in keys}
        with self._lock:
            held = {key: self._held[key] for key in wanted if key in self._held}
        missing = [key for key, version in wanted.items() if key not in held or held[key][0] != version]
        found = dict(zip(missing, self._get_all(missing), strict=True))
        refused = {key for key, data in found.items() if isinstance(data, OSError)}
        fetched = {key: (wanted[key], reduce(data)) for key, data in found.items() if isinstance(data, bytes)}
        with self._lock:
            self._hold(found.keys() - refused, fetched)
        known = held | fetched | dict.fromkeys(refused, ("", None))
        return {key: known[key][1] for key in wanted if key in known and found.get(key, b"") is not None}

    def _get_all(self, keys: Sequence[str]) -> list[bytes | OSError | None]:
        if len(keys) <= 1:
            return [self._get(key) for key in keys]
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(self._get, keys))

    def _get(self, key: str) -> bytes | OSError | None:
        """An object's bytes, None if it is gone since the listing, or why this one cannot be read."""
        try:
            return self._store.get(key)
        except KeyError:
            return None
        except OSError as error:
            return error

    def _hold(self, looked: Set[str], fetched: Mapping[str, tuple[Version, Any]]) -> None:
        """Keep what was fetched, and forget of what was looked for the rest."""
        for key in looked - fetched.keys():
            self._held.pop(key, None)
        self._held.update(fetched)
        self._unsaved += len(looked)
        self.fetched += len(fetched)

    def forget_all_but(self, listing: Mapping[str, ObjectInfo]) -> None:
        """Drop what is no longer listed."""
        with self._lock:
            for key in self._held.keys() - listing.keys():
                del self._held[key]

    def save(self) -> None:
        """Write the file if enough changed to be worth it; a folder that cannot be written is no fault."""
        if self._file is None or self._unsaved < _WORTH_SAVING:
            return
        with self._lock:
            kept = {key: list(held) for key, held in self._held.items()}
        try:
            publish_text(self._file, canonical_json({"format": FORMAT, "held": kept}))
        except (OSError, ValueError):
            return
        self._unsaved = 0


def _read(file: Path) -> dict[str, tuple[Version, Any]]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        held = value["held"].items() if value["format"] == FORMAT else ()
        return {str(key): (str(version), reduced) for key, (version, reduced) in held}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
