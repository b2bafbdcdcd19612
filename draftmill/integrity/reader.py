"""Objects of a store as local files, and what the store and the records say of their bytes.

A directory's objects are read where they lie. Those of a remote store are fetched into a temporary folder, one at a time
and only while they are looked at; objects above a bound only for a deep look, for hidden states are terabytes.
"""

from __future__ import annotations

import errno
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from draftmill import layout, provenance
from draftmill.canonical import digest_file
from draftmill.catalog import Entry
from draftmill.records import Content, Record, parse_record
from draftmill.store.base import ObjectInfo, Store
from draftmill.store.local import LocalStore

# A completions shard has a few MB, a shard of hidden states of a large target tens of GB.
FETCH_BYTES = 256 << 20


class Gone(Exception):
    """An object that was listed and is not there any more: somebody builds, or cleans up, at this moment."""


class Reader:
    """One store at one listing. Records are read when they are first asked for; threads may share a reader."""

    def __init__(self, store: Store, listing: Mapping[str, ObjectInfo] | None = None) -> None:
        self.store = store
        self.listing = store.list() if listing is None else listing
        self.present = frozenset(self.listing)
        self._records: dict[str, Record | None] = {}
        self._digests: dict[str, str] = {}
        self._lock = threading.Lock()

    @property
    def local(self) -> bool:
        """Whether objects are read where they lie."""
        return isinstance(self.store, LocalStore)

    def within_reach(self, key: str) -> bool:
        """Whether an object is looked into without --deep."""
        return self.local or self.listing[key].size <= FETCH_BYTES

    @contextmanager
    def file(self, key: str) -> Iterator[Path]:
        """An object as a local file. Raises Gone."""
        with self.files(key) as (path,):
            yield path

    @contextmanager
    def files(self, *keys: str) -> Iterator[tuple[Path, ...]]:
        """Objects as local files that lie to one another as in the store. Raises Gone, also if one vanishes inside."""
        if isinstance(self.store, LocalStore):
            paths = tuple(self.store.path(key) for key in keys)
            if not all(path.is_file() for path in paths):
                raise Gone(keys[0])
            with _asked_again(paths):
                yield paths
            return
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="draftmill-")))
            try:
                for key in keys:
                    self.store.fetch(key, folder / key)
            except KeyError as error:
                raise Gone(str(error)) from None
            yield tuple(folder / key for key in keys)

    def digest(self, key: str) -> str:
        """The sha256 of an object's bytes in hex digits, read once. Raises Gone."""
        if key not in self._digests:
            with self.file(key) as path:
                self._digests[key] = digest_file(path).removeprefix("sha256:")
        return self._digests[key]

    def stored_digest(self, key: str) -> str:
        """The sha256 that the store keeps beside an object; empty where it keeps none."""
        if self.local:
            return ""
        info = self.store.info(key)
        if info is None:
            raise Gone(key)
        return info.sha256

    def record(self, stage: str, name: str) -> Record | None:
        """The record of a job; None if there is none or it is damaged."""
        key = layout.record(stage, name)
        if key not in self.present:
            return None
        with self._lock:
            if key in self._records:
                return self._records[key]
        try:
            found = parse_record(self.store.get(key))
        except KeyError:
            found = None
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            found = None
        with self._lock:
            return self._records.setdefault(key, found)

    def recorded(self, entry: Entry) -> Content | None:
        """What the record of its job says of an object's bytes."""
        record = self.record(entry.stage, entry.name) if entry.job else None
        return None if record is None else record.outputs.get(entry.key)

    def provenance(self, key: str) -> dict[str, Any]:
        """What an object says of its making; empty if it is gone, damaged, or says nothing."""
        try:
            if key.endswith("/model.safetensors"):  # of weights the file beside them says it
                return self.provenance(key.replace("model.safetensors", "config.json"))
            info = self.listing.get(key) or self.store.info(key)
            return provenance.of_object(self.store, key, info.size) if info is not None else {}
        except (KeyError, ValueError, OSError):
            return {}


@contextmanager
def _asked_again(paths: Iterable[Path]) -> Iterator[None]:
    """Let an error inside give way to what the system says of the files now: libraries hide why they could not open one.

    Raises Gone for a file that has vanished, and OSError.
    """
    try:
        yield
    except Exception:
        for path in paths:
            _open_once(path)
        raise


def _open_once(path: Path) -> None:
    try:
        path.open("rb").close()
    except (FileNotFoundError, NotADirectoryError):
        raise Gone(str(path)) from None
