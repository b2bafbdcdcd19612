"""The Parquet objects of shards, read whole and kept while there is room, by key and version."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from io import BytesIO

import pyarrow as pa
import pyarrow.parquet as pq

from draftmill.state.cache import version_of
from draftmill.store.base import ObjectInfo, Store

_ROOM = 256 << 20


class Tables:
    """Reads and keeps tables of one store."""

    def __init__(self, store: Store, room: int = _ROOM) -> None:
        """`room` is how many bytes of tables are kept."""
        self._store, self._room = store, room
        self._kept: OrderedDict[tuple[str, str], pa.Table] = OrderedDict()
        self._lock = threading.Lock()

    def table(self, key: str, listing: Mapping[str, ObjectInfo]) -> pa.Table | None:
        """A table; None if the object is gone or is no Parquet. Raises UserError if the store cannot be read."""
        info = listing.get(key)
        if info is None:
            return None
        place = (key, version_of(info))
        with self._lock:
            found = self._kept.get(place)
            if found is not None:
                self._kept.move_to_end(place)
                return found
        try:
            table = pq.read_table(BytesIO(self._store.get(key)))
        except (KeyError, pa.ArrowException, OSError, ValueError):
            return None
        self._keep(place, table)
        return table

    def _keep(self, place: tuple[str, str], table: pa.Table) -> None:
        with self._lock:
            self._kept[place] = table
            while len(self._kept) > 1 and sum(one.nbytes for one in self._kept.values()) > self._room:
                self._kept.popitem(last=False)
