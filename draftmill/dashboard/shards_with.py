"""Which shards to read for the rows that somebody wants to see: their audits tell, so that not all have to be read.

A shard's audit knows the fewest and the most loss tokens of its answers, how many repeat themselves, are equal or were
rejected. Shards without an audit are tried last.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from draftmill.catalog import identify
from draftmill.dashboard.board import View
from draftmill.state.documents import ShardAudit, SourceCounts

KINDS = ("random", "shortest", "longest", "repetitive", "repeated", "rejected", "search")


@dataclass(frozen=True, slots=True)
class Place:
    """One shard that has completions: its number among all, keys of its objects, and its audit if there is one."""

    number: int
    shard: str
    completions: str
    rejected: str
    prompts: str
    audit: ShardAudit | None


def places(view: View) -> list[Place]:
    """All shards with completions, of the plan or, where none is known, of any settings."""
    from draftmill import layout

    listing, audits = view.snapshot.listing, view.snapshot.audits
    if view.picture is None:
        found = [entry for key in listing if (entry := identify(key)) and entry.kind == "completions"]
        return [
            Place(number, one.shard, one.key, layout.rejected(one.shard, one.fp), layout.prompts(one.shard), None)
            for number, one in enumerate(sorted(found, key=lambda one: one.key))
        ]
    graph = view.picture.graph
    return [
        Place(
            number,
            shard,
            graph.completions(shard),
            graph.rejected(shard),
            layout.prompts(shard),
            audits.get(graph.failed_audit(shard)) or audits.get(graph.audit(shard)),
        )
        for number, shard in enumerate(graph.shards)
        if graph.completions(shard) in listing
    ]


def ordered(found: Sequence[Place], kind: str, source: str | None, seed: int) -> list[Place]:
    """The shards in the order in which rows of a kind are to be looked for; of those ranked alike a random one first."""
    held = [place for place in found if _may_hold(place, source)]
    if kind == "search":
        return held
    mixed = held.copy()
    random.Random(seed).shuffle(mixed)
    rank = _RANKS.get(kind)
    if rank is None:
        return sorted(mixed, key=lambda place: source is not None and place.audit is None)
    scored = [(score, place) for place in mixed if (score := _score(place, rank, source)) is not None]
    return [place for _, place in sorted(scored, key=lambda one: one[0])]


def _may_hold(place: Place, source: str | None) -> bool:
    """Whether a shard may have rows of a source: only an audit knows that it has none."""
    return source is None or place.audit is None or source in place.audit.by_source


def _score(place: Place, rank: Callable[[Sequence[SourceCounts]], float | None], source: str | None) -> float | None:
    """Smaller is looked at earlier; None where the audit says there is nothing."""
    if place.audit is None:
        return float("inf")
    by_source: Mapping[str, SourceCounts] = place.audit.by_source
    parts = [counts for name, counts in by_source.items() if source is None or name == source]
    return rank(parts)


def _lengths(parts: Sequence[SourceCounts]) -> list[int]:
    return [value for part in parts for tally in (part.histogram, part.histogram_cut) for value in tally]


def _shortest(parts: Sequence[SourceCounts]) -> float | None:
    return min(_lengths(parts), default=None)


def _longest(parts: Sequence[SourceCounts]) -> float | None:
    lengths = _lengths(parts)
    return -max(lengths) if lengths else None


def _most(name: str) -> Callable[[Sequence[SourceCounts]], float | None]:
    return lambda parts: -sum(getattr(part, name) for part in parts) or None


def _rejected(parts: Sequence[SourceCounts]) -> float | None:
    return -sum(sum(part.rejected.values()) for part in parts) or None


_RANKS = {
    "shortest": _shortest,
    "longest": _longest,
    "repetitive": _most("repetitive"),
    "repeated": _most("duplicates"),
    "rejected": _rejected,
}
