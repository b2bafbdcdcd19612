"""Hostile text made harmless, once, before it is stored or shown.

Completions may hold terminal escapes, NULs, marks that turn the writing direction. Spelt out, they can play neither
with a page nor with a terminal that shows an audit's JSON.
"""

from __future__ import annotations

import unicodedata

_SPELT_OUT = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def visible(text: str) -> str:
    """The text with control, format and unassigned characters spelt out as ⟦U+001B⟧; newline and tab stay."""
    return "".join(
        f"⟦U+{ord(c):04X}⟧" if c not in "\n\t" and unicodedata.category(c) in _SPELT_OUT else c for c in text
    )
