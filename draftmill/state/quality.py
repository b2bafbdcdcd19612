"""The quality of the answers so far: the shards' audits added up, those that are over a limit among them.

Duplicates are counted inside each shard, because finding them across shards needs every answer's digest; the audit page
of the whole set has the exact number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from draftmill.audit.counts import Counts
from draftmill.audit.limits import Check, check
from draftmill.config import AuditConfig
from draftmill.state.documents import ShardAudit, SourceCounts
from draftmill.state.jobs import Picture

_TALLIES = ("histogram", "histogram_cut", "finish", "thinking", "rejected")
_NUMBERS = ("rows", "empty", "template_only", "repetitive", "duplicates", "boundary_moved")


@dataclass(frozen=True, slots=True)
class Point:
    """One shard's audit: when it was made (seconds since 1970), and shares of its answers."""

    shard: str
    at: float
    verdict: str
    rows: int
    rejected: int
    mean_loss_tokens: float
    spike: float
    short: float
    empty: float
    repetitive: float
    duplicates: float
    cut: float


@dataclass(frozen=True, slots=True)
class Quality:
    """All audits of a plan: counts overall and by source, the limits held against the whole, and each shard's point."""

    overall: Counts
    by_source: Mapping[str, Counts]
    checks: tuple[Check, ...]
    limits: AuditConfig
    points: tuple[Point, ...]
    shards: int
    failed: tuple[str, ...]
    """Shards whose audit is over a limit."""

    def to_json(self) -> dict[str, Any]:
        """A JSON value. Counts carry their `spike` [loss tokens, rows], `mean` and `loss_tokens` beside the fields."""
        return {
            "overall": _counts_json(self.overall),
            "by_source": {source: _counts_json(counts) for source, counts in self.by_source.items()},
            "checks": [asdict(one) for one in self.checks],
            "limits": self.limits.model_dump(mode="json"),
            "points": [asdict(point) for point in self.points],
            "shards": self.shards,
            "failed": list(self.failed),
        }


def _counts_json(counts: Counts) -> dict[str, Any]:
    derived = {"spike": list(counts.spike), "mean": counts.mean, "loss_tokens": counts.loss_tokens, "cut": counts.cut}
    return counts.model_dump(mode="json") | derived | {"rejections": counts.rejections}


def quality(picture: Picture) -> Quality:
    """The audits of a plan's shards."""
    snapshot, graph = picture.snapshot, picture.graph
    found: dict[str, tuple[str, ShardAudit]] = {}
    for shard in graph.shards:
        for key in (graph.failed_audit(shard), graph.audit(shard)):
            if key in snapshot.audits:
                found[shard] = (key, snapshot.audits[key])
    limits = picture.plan.config.audit
    by_source = _by_source(audit for _, audit in found.values())
    overall = _add(by_source.values())
    points = [_point(shard, snapshot.listing[key].modified, audit, limits) for shard, (key, audit) in found.items()]
    return Quality(
        overall,
        by_source,
        tuple(check(overall, limits)),
        limits,
        tuple(sorted(points, key=lambda point: (point.at, point.shard))),
        len(found),
        tuple(shard for shard, (_, audit) in found.items() if audit.verdict != "pass"),
    )


def _by_source(audits: Iterable[ShardAudit]) -> dict[str, Counts]:
    parts: dict[str, list[SourceCounts]] = {}
    for audit in audits:
        for source, counts in audit.by_source.items():
            parts.setdefault(source, []).append(counts)
    return {source: _add(parts[source]) for source in sorted(parts)}


def _add(parts: Iterable[SourceCounts | Counts]) -> Counts:
    """The sum of some counts; each tally is added in place, for adding pairwise is quadratic in the bins."""
    numbers: Counter[str] = Counter()
    tallies: dict[str, Counter[Any]] = {name: Counter() for name in _TALLIES}
    for part in parts:
        for name in _NUMBERS:
            numbers[name] += getattr(part, name)
        for name in _TALLIES:
            tallies[name].update(getattr(part, name))
    ordered = {name: dict(sorted(tally.items())) for name, tally in tallies.items()}
    return Counts(**{name: numbers[name] for name in _NUMBERS}, **ordered)


def _point(shard: str, at: float, audit: ShardAudit, limits: AuditConfig) -> Point:
    counts = _add(audit.by_source.values())
    rows = max(counts.rows, 1)
    return Point(
        shard,
        at,
        audit.verdict,
        counts.rows,
        counts.rejections,
        counts.mean,
        counts.spike[1] / rows,
        counts.short(limits.short_tokens) / rows,
        counts.empty / rows,
        counts.repetitive / rows,
        counts.duplicates / rows,
        counts.cut / rows,
    )
