"""Rows to look at: random, shortest, longest, repeating themselves, said to many prompts, rejected, or holding a text.

What is asked for is bounded in rows, shards and time, and the answer says how many shards were read, so that nobody takes
a part for the whole.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from draftmill.audit.columns import Ragged, ragged
from draftmill.audit.repetition import repeated_ngrams
from draftmill.dashboard.board import View
from draftmill.dashboard.row_text import LONG, SHORT, pieces, prompt_pieces
from draftmill.dashboard.shards_with import Place, ordered, places
from draftmill.dashboard.tables import Tables
from draftmill.dashboard.target_tokens import Tokens, tokens_of
from draftmill.schemas import COMPLETIONS, REJECTED

ROWS, SHARDS, SECONDS = 12, 8, 3.0
"""Rows that are given at once, shards that are read for them, and how long a search may read."""
_REPEATED_LEAST = 2

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Query:
    """What somebody wants to see. `text` is what a search is for; it goes on at shard `start`, behind `skip` rows of it."""

    kind: str = "random"
    shard: str | None = None
    source: str | None = None
    text: str = ""
    seed: int = 0
    start: int = 0
    skip: int = 0
    rows: int = ROWS


@dataclass(frozen=True, slots=True)
class Hit:
    """One row found: its place, its number in the table, and what orders it among others (smaller first)."""

    place: Place
    row: int
    rank: float
    note: str = ""


Found = tuple[list[Hit], int, dict[str, int] | None]
"""Rows, how many shards were read for them, and where to go on."""


class Samples:
    """Finds and shows rows of one store."""

    def __init__(self, tables: Tables, clock: Callable[[], float] = time.monotonic) -> None:
        self._tables, self._clock = tables, clock

    def find(self, view: View, query: Query) -> dict[str, Any]:
        """Rows as a JSON value, with `read` of `shards` shards, and `next`, the start and skip where a search goes on."""
        chosen = [place for place in places(view) if query.shard in (None, place.shard)]
        line = ordered(chosen, query.kind, query.source, query.seed)
        look = self._search if query.kind == "search" else self._best
        hits, read, further = look(view, line, query)
        tokens = self._tokens(view)
        return {
            "rows": [self._shown(view, hit, tokens, SHORT) for hit in hits],
            "read": read,
            "shards": len(chosen),
            "next": further,
            "tokenizer": tokens is not None,
        }

    def _best(self, view: View, line: Sequence[Place], query: Query) -> Found:
        """The rows that stand out most in the first shards of a line."""
        hits: list[Hit] = []
        read, end = 0, self._clock() + SECONDS
        for place in line[:SHARDS]:
            if read and self._clock() > end:
                break
            hits += self._hits(view, place, query)
            read += 1
        return sorted(hits, key=lambda hit: hit.rank)[: query.rows], read, None

    def _search(self, view: View, line: Sequence[Place], query: Query) -> Found:
        """The next rows in order that hold the text; a shard is gone through over as many pages as it takes."""
        hits: list[Hit] = []
        read, end = 0, self._clock() + SECONDS
        for place in line:
            if place.number < query.start:
                continue
            if len(hits) == query.rows or (read and self._clock() > end):
                return hits, read, {"start": place.number, "skip": 0}
            skip = query.skip if place.number == query.start else 0
            found = list(self._hits(view, place, query))[skip:]
            room = query.rows - len(hits)
            hits += found[:room]
            read += 1
            if len(found) > room:
                return hits, read, {"start": place.number, "skip": skip + room}
        return hits, read, None

    def row(self, view: View, shard: str, row: int, *, rejected: bool) -> dict[str, Any] | None:
        """One row as a whole, as far as any page should show it; None if it is gone."""
        place = next((place for place in places(view) if place.shard == shard), None)
        if place is None:
            return None
        table = self._table(view, place, rejected)
        if table is None or not 0 <= row < table.num_rows:
            return None
        return self._shown(view, Hit(place, row, 0.0, "rejected" if rejected else ""), self._tokens(view), LONG)

    def lengths(self, view: View, shards: int = 24) -> dict[str, Any]:
        """Answers of some shards by their output tokens: `by_source` {source: {length: rows}}, and `read` of `shards`."""
        found = places(view)
        counts: dict[str, Counter[int]] = {}
        read, end = 0, self._clock() + SECONDS
        for place in ordered(found, "random", None, 0)[:shards]:
            if read and self._clock() > end:
                break
            table = self._table(view, place, False)
            if table is not None:
                read += 1
                for source, length in zip(table["source"].to_pylist(), _outputs(table).lengths.tolist(), strict=True):
                    counts.setdefault(source, Counter())[length] += 1
        by_source = {source: dict(sorted(counts[source].items())) for source in sorted(counts)}
        return {"by_source": by_source, "read": read, "shards": len(found)}

    # One shard -------------------------------------------------------------------------------------------------------

    def _table(self, view: View, place: Place, rejected: bool) -> pa.Table | None:
        key, schema = (place.rejected, REJECTED) if rejected else (place.completions, COMPLETIONS)
        table = self._tables.table(key, view.snapshot.listing)
        return table if table is not None and set(schema.names) <= set(table.column_names) else None

    def _hits(self, view: View, place: Place, query: Query) -> Iterator[Hit]:
        rejected = query.kind == "rejected"
        table = self._table(view, place, rejected)
        if table is None or not table.num_rows:
            return iter(())
        rows = np.arange(table.num_rows)
        if query.source is not None:
            rows = rows[pc.equal(table["source"], query.source).to_numpy()]
        if query.kind == "search":
            rows = rows[self._holding(view, place, table, query.text)[rows]]
        return _ranked(place, table, rows, query)

    def _holding(self, view: View, place: Place, table: pa.Table, text: str) -> npt.NDArray[np.bool_]:
        """Which rows hold the text in answer, prompt or id, whatever its case."""

        def holds(column: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
            found: npt.NDArray[np.bool_] = pc.match_substring(column, text, ignore_case=True).to_numpy()
            return found

        found = holds(table["text"]) | holds(table["prompt_id"])
        prompts = self._tables.table(place.prompts, view.snapshot.listing)
        if prompts is not None:
            asked = prompts["prompt_id"].filter(pc.match_substring(prompts["record"], text, ignore_case=True))
            found |= pc.is_in(table["prompt_id"], value_set=asked.combine_chunks()).to_numpy()
        return found

    # One row ---------------------------------------------------------------------------------------------------------

    def _tokens(self, view: View) -> Tokens | None:
        return tokens_of(view.picture.plan.config.target) if view.picture is not None else None

    def _shown(self, view: View, hit: Hit, tokens: Tokens | None, limit: int) -> dict[str, Any]:
        rejected = hit.note == "rejected"
        table = self._table(view, hit.place, rejected)
        if table is None:
            return {"shard": hit.place.shard, "row": hit.row, "gone": True, "pieces": []}
        values = table.slice(hit.row, 1).to_pylist()[0]
        record = self._record(view, hit.place, values["prompt_id"])
        known = {"shard": hit.place.shard, "row": hit.row, "note": hit.note, "rejected": rejected}
        known |= {name: values[name] for name in ("prompt_id", "sample", "source")}
        if rejected:
            return known | {
                "reason": values["reason"],
                "detail": values["detail"][: limit * 4],
                "pieces": prompt_pieces(record, limit),
                "more": record is not None and len(record) > limit * 4,
            }
        return known | _facts(values) | {
            "pieces": pieces(values, record, tokens, limit),
            "more": max(len(values["output_ids"]), len(values["prompt_ids"])) > limit,
        }  # fmt: skip

    def _record(self, view: View, place: Place, prompt_id: str) -> str | None:
        prompts = self._tables.table(place.prompts, view.snapshot.listing)
        if prompts is None or "record" not in prompts.column_names:
            return None
        place_of = pc.index(prompts["prompt_id"], prompt_id).as_py()
        return None if place_of < 0 else str(prompts["record"][place_of].as_py())


def _outputs(table: pa.Table) -> Ragged:
    return ragged(table["output_ids"], np.int32)


def _ranked(place: Place, table: pa.Table, rows: Ints, query: Query) -> Iterator[Hit]:
    """The first rows of a shard for a query."""
    if query.kind == "repeated":
        return _repeated(place, table, rows)
    ranks = _ranks(place, table, query)[rows]
    order = np.argsort(ranks, kind="stable")
    if query.kind != "search":
        order = order[: query.rows]
    note = "rejected" if query.kind == "rejected" else ""
    return (Hit(place, int(rows[k]), float(ranks[k]), note or _note(query.kind, float(ranks[k]))) for k in order)


def _ranks(place: Place, table: pa.Table, query: Query) -> npt.NDArray[np.float64]:
    if query.kind in ("shortest", "longest"):
        return _loss_tokens(table).astype(np.float64) * (1 if query.kind == "shortest" else -1)
    if query.kind == "repetitive":
        repeated, total = repeated_ngrams(_outputs(table))
        # A short answer's share says little: it is weighed by its length.
        return -repeated / np.maximum(total, 1) * np.minimum(total / 32, 1.0)
    if query.kind == "random":
        draw = random.Random(f"{query.seed} {place.shard}")
        return np.array([draw.random() for _ in range(table.num_rows)])
    return np.arange(table.num_rows, dtype=np.float64)


def _note(kind: str, rank: float) -> str:
    return f"{-rank:.0%} of its 4-grams occurred in it before" if kind == "repetitive" else ""


def _loss_tokens(table: pa.Table) -> Ints:
    outputs, masks = _outputs(table), ragged(table["loss_mask"], np.bool_)
    given = table["loss_mask"].is_valid().to_numpy()
    return np.where(given, masks.count(masks.flat), outputs.lengths)


def _repeated(place: Place, table: pa.Table, rows: Ints) -> Iterator[Hit]:
    """The answers that several rows of a shard have, each once."""
    texts = table["text"].to_pylist()
    groups: dict[str, list[int]] = {}
    for row in rows.tolist():
        groups.setdefault(texts[row], []).append(row)
    for group in groups.values():
        if len(group) >= _REPEATED_LEAST:
            yield Hit(place, group[0], -len(group), f"{len(group)} rows of this shard have this answer")


def _facts(values: Mapping[str, Any]) -> dict[str, Any]:
    mask, outputs = values["loss_mask"], len(values["output_ids"])
    return {
        "origin": values["origin"],
        "finish": values["finish_reason"],
        "setting": values.get("setting", ""),
        "prompt_tokens": len(values["prompt_ids"]),
        "output_tokens": outputs,
        "loss_tokens": outputs if mask is None else sum(mask),
        "masked": mask is not None,
    }
