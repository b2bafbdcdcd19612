"""What a board saw of each lane over time: memory, and each change of state, verdict or server.

A store keeps only the last heartbeat of a job, so this is known as far back as the board has been looking, and gone with
it; it decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from draftmill.state.types import Lane

_POINTS, _CHANGES = 360, 60
_EVERY_S = 10.0
_FORGOTTEN_S = 3600.0


@dataclass(slots=True)
class _Seen:
    at: float
    memory: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_POINTS))
    changes: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_CHANGES))


class History:
    """Keeps the last hour or so of each lane, and no lane that was not seen for an hour: a process is one for itself."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Seen] = {}

    def add(self, lanes: Iterable[Lane], now: float) -> None:
        """Take what one look saw."""
        for lane in lanes:
            seen = self._lanes.setdefault(lane.id, _Seen(now))
            seen.at = now
            if lane.memory_bytes is not None and (not seen.memory or now - seen.memory[-1][0] >= _EVERY_S):
                seen.memory.append((now, lane.memory_bytes))
            change = _standing(lane)
            if not seen.changes or {**seen.changes[-1], "at": 0.0} != {**change, "at": 0.0}:
                seen.changes.append({**change, "at": now})
        self._lanes = {lane: seen for lane, seen in self._lanes.items() if now - seen.at < _FORGOTTEN_S}

    def to_json(self, lanes: Iterable[str]) -> dict[str, Any]:
        """Of each lane that is known: `memory` as [time, bytes] and `changes`, oldest first."""
        known = self._lanes
        found = {lane: known[lane] for lane in lanes if lane in known}
        return {
            lane: {"memory": [list(point) for point in tuple(seen.memory)], "changes": list(seen.changes)}
            for lane, seen in found.items()
        }


def _standing(lane: Lane) -> dict[str, Any]:
    gate, server = lane.gate, lane.server
    return {
        "at": 0.0,
        "state": lane.state,
        "verdict": gate.verdict if gate else None,
        "reasons": list(gate.reasons) if gate else [],
        "server": server.state if server else None,
        "epoch": server.epoch if server else None,
    }
