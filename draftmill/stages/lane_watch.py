"""How full the servers were, second by second, and why they were not: the lane's own account of its speed.

Every place that a server has and the lane does not use is counted under its reason, so that the log of a build that was
slower than the servers can be says why. A line tells of ten seconds, or of a minute as long as every place was in use.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass

_WINDOW, _LINE, _CALM_LINE = 10, 10, 60
_REMEMBERED = 61


@dataclass(frozen=True, slots=True)
class Look:
    """One look: rows in flight, places, rows of coming shards that were taken, rows not sent yet, rows answered in all.

    `reason` says why a place would be empty.
    """

    flying: int
    places: int
    ahead: int
    unsent: int
    answered: int
    reason: str


class Timeline:
    """Looks a second apart."""

    def __init__(self) -> None:
        self._looks: deque[Look] = deque(maxlen=_REMEMBERED)
        self._untold: list[Look] = []
        self._late = 0.0

    def note(self, look: Look, late_s: float) -> str | None:
        """Take a look, and by how much it came too late; gives a line for the log when one is due."""
        self._looks.append(look)
        self._untold.append(look)
        self._late = max(self._late, late_s)
        calm = all(one.flying >= one.places for one in self._untold)
        if len(self._untold) < (_CALM_LINE if calm else _LINE):
            return None
        return self._line()

    def rate(self) -> float:
        """Rows a second in the best ten seconds of the last minute, or of what there was."""
        counts = [look.answered for look in self._looks]
        if len(counts) < 2:
            return 0.0
        span = min(_WINDOW, len(counts) - 1)
        return max(counts[n + span] - counts[n] for n in range(len(counts) - span)) / span

    def _line(self) -> str | None:
        looks, late = self._untold, self._late
        self._untold, self._late = [], 0.0
        last = looks[-1]
        if not any(look.places or look.flying for look in looks):
            return None
        rows = (last.answered - looks[0].answered) / max(len(looks) - 1, 1)
        said = [f"{rows:.0f} rows/s, {last.ahead} ahead, {last.unsent} unsent", f"loop at most {late:.2f} s late"]
        if all(look.flying >= look.places for look in looks):
            said.insert(0, f"{last.flying} of {last.places} in flight for {len(looks)} s")
        else:
            short = Counter(look.reason for look in looks if look.flying < look.places)
            said.insert(0, f"{' '.join(str(look.flying) for look in looks)} of {last.places} in flight")
            said.append("too few, s: " + ", ".join(f"{reason} {count}" for reason, count in short.items()))
        return f"{time.strftime('%H:%M:%S')} " + "; ".join(said)
