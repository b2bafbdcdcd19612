"""Which shards hold the same prompts: how the rows of an old shard are found when an edit has made a new one of it.

Two objects stand beside the index. `history.parquet` has the prompts of every shard of the index and of those that it
replaced, newest first, eight bytes a prompt; it is read only when the index changes, and old shards are forgotten when
they hold more than twice as many prompts as the index. `kin.json` is made from it: for each shard the others that share
prompts with it and which of its rows these are. It is small, so a plan and a job read that alone. Both decide nothing:
without them, or with wrong ones, rows are generated again. They are published before the index that they belong to, and
publishing twice changes nothing, so that a build killed in between finds them or makes them again.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from draftmill import layout
from draftmill.canonical import canonical_json
from draftmill.store.base import Store

if TYPE_CHECKING:
    import numpy as np

# By shard and other shard: the rows of the shard, as half-open ranges, whose prompts the other one holds too.
Ranges = Sequence[Sequence[int]]
Kin = Mapping[str, Mapping[str, Ranges]]
# Prompts by shard, in the shard's order, each as the first eight bytes of its id.
Members = dict[str, "np.ndarray[Any, Any]"]

_KEPT = 2
_KEY_BYTES = 8


def keys_of(ids: Sequence[bytes]) -> np.ndarray[Any, Any]:
    """The prompts of a shard as the history knows them."""
    import numpy as np

    return np.frombuffer(b"".join(prompt[:_KEY_BYTES] for prompt in ids), dtype=">u8").astype(np.uint64)


def extended(store: Store, current: Members) -> Members:
    """The shards of the index and behind them, as far as there is room, those that the store's history has beside."""
    members, room = dict(current), _KEPT * sum(map(len, current.values()))
    for shard, keys in _load(store).items():
        if shard not in members:
            room -= len(keys)
            if room < 0:
                break
            members[shard] = keys
    return members


def publish(store: Store, members: Members, kin: Kin) -> None:
    """Write both objects; the index that they belong to comes after."""
    store.put(layout.HISTORY, _packed(members))
    store.put(layout.KIN, canonical_json(kin).encode())


def load_kin(store: Store) -> Kin:
    """The kin of every shard that the store's history knows; empty without a history."""
    try:
        kin = json.loads(store.get(layout.KIN))
    except (KeyError, ValueError):
        return {}
    return kin if isinstance(kin, dict) else {}


def kin_of(members: Members) -> Kin:
    """Which shards share prompts, and which rows these are. O(n log n) in the prompts."""
    import numpy as np

    names = list(members)
    sizes = [len(keys) for keys in members.values()]
    if not names:
        return {}
    keys = np.concatenate(list(members.values()))
    shard = np.repeat(np.arange(len(names)), sizes)
    row = np.concatenate([np.arange(size) for size in sizes])
    order = np.argsort(keys, kind="stable")
    pairs = []
    for distance in range(1, len(names)):
        same = np.flatnonzero(keys[order[:-distance]] == keys[order[distance:]])
        if not len(same):
            break
        one, other = order[same], order[same + distance]
        pairs += [(shard[one], shard[other], row[one]), (shard[other], shard[one], row[other])]
    return _by_name(names, pairs)


def _by_name(names: Sequence[str], pairs: Sequence[tuple[Any, Any, Any]]) -> Kin:
    import numpy as np

    if not pairs:
        return {}
    shard, other, row = (np.concatenate(column) for column in zip(*pairs, strict=True))
    order = np.lexsort((row, other, shard))
    shard, other, row = shard[order], other[order], row[order]
    begins = (np.diff(shard) != 0) | (np.diff(other) != 0) | (np.diff(row) != 1)
    starts = [0, *(np.flatnonzero(begins) + 1).tolist()]
    stops = [*starts[1:], len(row)]
    kin: dict[str, dict[str, list[list[int]]]] = {}
    for start, stop in zip(starts, stops, strict=True):
        ranges = kin.setdefault(names[shard[start]], {}).setdefault(names[other[start]], [])
        ranges.append([int(row[start]), int(row[stop - 1]) + 1])
    return kin


def _packed(members: Members) -> bytes:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = np.repeat(np.arange(len(members), dtype=np.int32), [len(keys) for keys in members.values()])
    shard = pa.DictionaryArray.from_arrays(pa.array(numbers), pa.array(list(members), pa.string()))
    keys = np.concatenate(list(members.values())) if members else np.zeros(0, np.uint64)
    written = io.BytesIO()
    table = pa.table({"shard": shard, "key": pa.array(keys, pa.uint64())})
    pq.write_table(table, written, compression="zstd", use_dictionary=["shard"])
    return written.getvalue()


def _load(store: Store) -> Members:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(io.BytesIO(store.get(layout.HISTORY)))
        shards, keys = table.column("shard").cast(pa.string()).to_pylist(), table.column("key").to_numpy()
    except (KeyError, pa.ArrowException, OSError):
        return {}
    members: Members = {}
    start = 0
    for shard, run in groupby(shards):
        stop = start + sum(1 for _ in run)
        members[shard], start = keys[start:stop], stop
    return members
