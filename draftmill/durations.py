"""Spans of time as options of the command line take them: 90s, 30m, 12h, 7d, 2w."""

from __future__ import annotations

import re

from draftmill.errors import UserError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def seconds(option: str, text: str) -> float:
    """A span of time in seconds. Raises UserError, which names the option, for anything but a number with its unit."""
    # No unit means none: seven seconds of grace where somebody meant days would remove what is being made.
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if found is None:
        raise UserError(f"{option}: {text!r} is no span of time: give a number with s, m, h, d or w, as in 12h or 7d.")
    return float(found[1]) * _UNITS[found[2]]
