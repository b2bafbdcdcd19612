"""Numbers, times and estimates as short text for a screen."""

from __future__ import annotations

from draftmill.state.eta import NOT_BEGUN
from draftmill.state.types import Eta

_UNITS = ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))


def number(value: float | None) -> str:
    """A count or a rate: 1,234 or 12.3; a dash where it is not known."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def duration(seconds: float) -> str:
    """A time span in its two largest units: 2 d 3 h, 14 min 5 s, 9 s."""
    whole = round(max(seconds, 0.0))
    for large, name, small, part in _UNITS:
        if whole >= large:
            rest = whole % large // small
            return f"{whole // large} {name} {rest} {part}" if rest else f"{whole // large} {name}"
    return f"{whole} s"


def eta(value: Eta) -> str:
    """An estimate: the interval, or unknown and why."""
    if value.low is None or value.high is None:
        return value.reason if value.reason == NOT_BEGUN else f"unknown: {value.reason}"
    if value.high == 0:
        return "done"
    low, high = duration(value.low), duration(value.high)
    return low if low == high else f"{low} to {high}"


def whole_eta(value: Eta) -> str:
    """The estimate of a build, with what it leaves out."""
    text = eta(value)
    left = f", without {', '.join(value.leaves_out)} (not measured yet)" if value.leaves_out and value.low else ""
    return text + left


def share(part: float, whole: float | None) -> float:
    """A share between 0 and 1; 0 of nothing."""
    return min(max(part / whole, 0.0), 1.0) if whole else 0.0
