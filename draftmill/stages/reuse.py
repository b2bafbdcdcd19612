"""Rows of old shards, taken over instead of generated again.

An edit of some prompts makes new shards of the ones that held them. Most prompts of a new shard were answered in the old
one, under the same spec, and their rows still lie in the old shard's completions; the index's history says where
(prompts/history.py). A row is taken over if it was generated under the same generate fingerprint (which the file's name
says), for exactly the same prompt ids, and keeps today's row rules. Rejected rows are tried again.

Every engine may reuse. A fingerprint promises valid rows of its spec, and the same bytes only where the engine can: a row
that was generated beside other rows may differ from one generated afresh in how sums were rounded, on a CPU too, because
the batches of an edited shard are other batches. It is no worse a sample, only not the same one, so the bytes of a shard
with edited prompts depend on whether its forerunner was there; without edits nothing is ever reused and builds are equal.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill import layout
from draftmill.engines.base import Key, Result
from draftmill.errors import UserError
from draftmill.prompts.history import Kin, Ranges, load_kin
from draftmill.schemas import COMPLETIONS, MIXED_COMPLETIONS, Row, read_rows
from draftmill.stages.rows import Asked, Ledger, RowRules
from draftmill.store.base import Store


def old_shards(kin: Kin, shard: str) -> list[str]:
    """Shards that hold prompts of this one, those with the most first."""
    others = kin.get(shard, {})
    return sorted(others, key=lambda other: (-_count(others[other]), other))


def _count(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def reusable_rows(
    store: Store, shard: str, gen: str, wanted: Collection[Key], *, mixed: bool = False
) -> dict[Key, Row]:
    """Generated rows of those keys that old completions of the same generate fingerprint hold.

    `mixed`: they have a column for their setting. A file that is gone or damaged only means that its rows are generated
    again.
    """
    found: dict[Key, Row] = {}
    for old in old_shards(load_kin(store), shard):
        if len(found) == len(wanted):
            break
        for row in _completions(store, old, gen, MIXED_COMPLETIONS if mixed else COMPLETIONS):
            key = (row["prompt_id"], row["sample"])
            if key in wanted and row["origin"] == "generated":
                found.setdefault(key, row)
    return found


def _completions(store: Store, shard: str, gen: str, schema: Any) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "completions.parquet"
        try:
            store.fetch(layout.completions(shard, gen), path)
        except KeyError:
            return []
        try:
            return read_rows(path, schema)
        except UserError:
            return []


def valid_results(rows: Mapping[Key, Row], asked: Sequence[Asked], rules: RowRules) -> list[Result]:
    """The results of those old rows that answer what is asked now, in its order."""
    results = []
    for item in asked:
        row = rows.get(item.key)
        if row is None or row["prompt_ids"] != list(item.prompt_ids) or row.get("setting", "") != item.setting.name:
            continue
        result = Result(item.key, tuple(row["output_ids"]), row["finish_reason"])
        if rules.fault(result, item.setting.sampling.max_new_tokens) is None:
            results.append(result)
    return results


@dataclass(frozen=True, slots=True)
class Forerunners:
    """Where the rows of a shard may lie already: the store, the shard, and the fingerprint of its generate stage.

    `mixed`: completions have a column for the setting of a row.
    """

    store: Store
    shard: str
    gen: str
    mixed: bool = False

    def hand_over(self, asked: Sequence[Asked], ledger: Ledger, rules: RowRules) -> int:
        """Journal what forerunners answered as the first attempt of rows that have no answer yet; how many there were.

        It is flushed at once: after a kill the old file may be gone.
        """
        left = [item for item in asked if item.key not in ledger.answers]
        rows = reusable_rows(self.store, self.shard, self.gen, {item.key for item in left}, mixed=self.mixed)
        count = sum(ledger.note(result, 0) for result in valid_results(rows, left, rules))
        if count:
            ledger.flush()
            print(f"shard {self.shard}: {count} rows are taken from earlier shards", flush=True)
        return count
