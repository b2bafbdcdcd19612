"""The golden file, and what counts as a difference: anything but a float that moved by rounding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).with_name("golden.json")
# Rounding of stored bfloat16 is 2^-8 of a value, that of two digits 0.005.
ABSOLUTE, RELATIVE = 0.03, 0.01


def read() -> dict[str, Any]:
    return dict(json.loads(GOLDEN.read_text(encoding="utf-8"))) if GOLDEN.exists() else {}


def difference(old: Any, new: Any, where: str = "") -> str | None:
    """Where two outputs differ first, or None."""
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        return next((d for key in old if (d := difference(old[key], new[key], f"{where}.{key}"))), None)
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return next((d for n, pair in pairs if (d := difference(*pair, f"{where}[{n}]"))), None)
    if isinstance(old, float) and isinstance(new, float) and abs(old - new) <= ABSOLUTE + RELATIVE * abs(old):
        return None
    return None if type(old) is type(new) and old == new else f"{where}: {old!r} became {new!r}"[:300]
