"""JSON for a browser: whatever the store holds, the bytes can be parsed there."""

from __future__ import annotations

import json
import math
from typing import Any


def to_bytes(value: Any) -> bytes:
    """A value as JSON in ASCII; numbers that JSON cannot say are null, lone surrogates stay escaped."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))
    return text.encode("ascii")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value


def embedded(value: Any) -> str:
    """The same as text for a script element of a page: no `<`, so that nothing in it can end the element."""
    return to_bytes(value).decode("ascii").replace("<", "\\u003c")
