"""The parts of a view as JSON for a page: small enough to be sent again whenever something changed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from draftmill.audit.counts import Counts
from draftmill.audit.limits import check
from draftmill.dashboard.board import View
from draftmill.state.lanes import Segment, segments
from draftmill.state.quality import Point, Quality, quality
from draftmill.state.shards import ShardRow, shard_rows
from draftmill.state.training import training

HOURS = (1, 6, 24, 168)
_POINTS, _CURVE, _PIXELS, _PROCESSES = 120, 800, 900, 40
_SHARES = ("spike", "short", "empty", "repetitive", "duplicates", "cut")


# Quality --------------------------------------------------------------------------------------------------------------


def quality_part(view: View) -> dict[str, Any] | None:
    """The audits so far: counts, checks by source, and shares over time in at most 120 groups of shards."""
    if view.picture is None:
        return None
    found = quality(view.picture)
    checks = {source: _checks(counts, found) for source, counts in found.by_source.items()}
    return found.to_json() | {"points": _over_time(found.points), "checks_by_source": checks}


def _checks(counts: Counts, found: Quality) -> list[dict[str, Any]]:
    return [
        {"code": one.code, "measured": one.measured, "count": one.count, "over": one.over}
        for one in check(counts, found.limits)
    ]


def _over_time(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Neighbouring shards in time as one point each, weighed by their rows."""
    size = max(1, -(-len(points) // _POINTS))
    return [_group(points[start : start + size]) for start in range(0, len(points), size)]


def _group(points: Sequence[Point]) -> dict[str, Any]:
    rows, rejected = sum(point.rows for point in points), sum(point.rejected for point in points)
    weights = [(point, point.rows / max(rows, 1)) for point in points]
    return {
        "at": points[-1].at,
        "shards": len(points),
        "rows": rows,
        "failed": [point.shard for point in points if point.verdict != "pass"],
        "rejected": rejected / max(rows + rejected, 1),
        "mean": sum(point.mean_loss_tokens * weight for point, weight in weights),
        **{name: sum(getattr(point, name) * weight for point, weight in weights) for name in _SHARES},
    }


# Shards ---------------------------------------------------------------------------------------------------------------


def shards_part(view: View) -> list[dict[str, Any]] | None:
    """Every shard as a slim row; its chain comes when it is opened."""
    return None if view.picture is None else [_slim(row) for row in shard_rows(view.picture)]


def _slim(row: ShardRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "split": row.split,
        "window": row.window,
        "pilot": row.pilot,
        "rows": row.rows,
        "useful": row.useful,
        "rejected": row.rejected,
        "tokens": row.tokens,
        "verdict": row.verdict,
        "state": row.state,
        "at": next((link.stage for link in row.chain if link.state != "done"), "done"),
        "modified": max((link.modified for link in row.chain if link.modified is not None), default=None),
        "seconds": sum(link.seconds for link in row.chain if link.seconds is not None),
    }


# Lanes ----------------------------------------------------------------------------------------------------------------


def lanes_part(view: View, hours: float) -> dict[str, Any]:
    """What each lane did since some hours, with servers and verdicts; jobs closer than a pixel are one span.

    Where no GPU is told each job is a process and so a lane: of these the newest are given, and how many are left out.
    """
    now = view.state.now
    since = now - hours * 3600
    found = sorted(segments(view.snapshot, since, now), key=lambda one: (one.lane, one.start))
    apart = hours * 3600 / _PIXELS
    processes = sorted((one for one in found if one.gpu is None), key=lambda one: -one.end)
    newest = list(dict.fromkeys(one.lane for one in processes))
    left_out = set(newest[_PROCESSES:])
    found = [one for one in found if one.lane not in left_out]
    return {
        "since": since,
        "now": now,
        "lanes": [_lane(view, lane, list(group), apart) for lane, group in groupby(found, lambda one: one.lane)],
        "left_out": len(left_out),
    }


def _lane(view: View, lane: str, found: Sequence[Segment], apart: float) -> dict[str, Any]:
    first = found[0]
    return {
        "id": lane,
        "gpu": first.gpu,
        "host": first.host,
        "spans": _spans(found, apart),
        "servers": _servers(view, found),
        "gates": _gates(view, found),
        "busy": sum(one.end - one.start for one in found),
    }


def _spans(found: Sequence[Segment], apart: float) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    for one in found:
        last = spans[-1] if spans else None
        if last and (last["stage"], last["state"]) == (one.stage, one.state) and one.start - last["end"] < apart:
            last.update(end=max(last["end"], one.end), jobs=last["jobs"] + 1, subject=one.subject)
            continue
        spans.append(
            {
                "stage": one.stage,
                "state": one.state,
                "subject": one.subject,
                "jobs": 1,
                "start": one.start,
                "end": one.end,
            }
        )
    return spans


def _servers(view: View, found: Sequence[Segment]) -> list[dict[str, Any]]:
    """Spans in which one server in one life of it answered."""
    spans: list[dict[str, Any]] = []
    for one in found:
        beat = view.snapshot.beats.get((one.stage, one.name))
        if beat is None or beat.server is None:
            continue
        server = {"url": beat.server.url, "state": beat.server.state, "epoch": beat.server.epoch}
        if spans and {name: spans[-1][name] for name in server} == server:
            spans[-1]["end"] = max(spans[-1]["end"], one.end)
        else:
            spans.append({**server, "start": one.start, "end": one.end})
    return spans


def _gates(view: View, found: Sequence[Segment]) -> list[dict[str, Any]]:
    """Verdicts of the GPU gate where they differ from the one before."""
    changes: list[dict[str, Any]] = []
    for one in found:
        beat = view.snapshot.beats.get((one.stage, one.name))
        if beat is None or beat.gate is None:
            continue
        if not changes or changes[-1]["verdict"] != beat.gate.verdict:
            at = beat.gate.checked_at or one.start
            changes.append({"verdict": beat.gate.verdict, "at": at, "reasons": list(beat.gate.reasons)})
    return changes


# Training -------------------------------------------------------------------------------------------------------------


def training_part(view: View, reader: Any) -> dict[str, Any] | None:
    """Curves of all windows in at most 800 points, the scores of epochs, and every evaluation."""
    if view.picture is None:
        return None
    found = training(reader, view.picture).to_json()
    windows = {number: _window(window) for number, window in found["windows"].items()}
    points = sum(len(window["curve"]) for window in windows.values())
    every = max(1, -(-points // _CURVE))
    for window in windows.values():
        window["curve"] = window["curve"][::-every][::-1]
    for one in found["evaluations"]:
        one["evaluation"].pop("provenance", None)
        one["evaluation"]["divergences"] = len(one["evaluation"]["divergences"])
    return found | {"windows": windows}


def _window(window: dict[str, Any]) -> dict[str, Any]:
    return {name: window[name] for name in ("rows", "held_out_rows", "steps", "steps_before", "curve", "epochs")}
