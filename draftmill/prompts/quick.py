"""The quick way from a line of JSON to a prompt: orjson, only where it cannot differ from the standard parser.

A large set is a million short conversations, and half of what it costs to index them is parsing and writing JSON. orjson
does that three times as fast but keeps to 64-bit integers, its own depth and its own reasons. So its result is taken
only for sound records whose canonical form is nothing but strings; every other record goes the standard way, which
alone says what is wrong with it.
"""

from __future__ import annotations

from typing import Any

try:
    import orjson
except ImportError:  # a host without it reads the same prompts in twice the time
    orjson = None  # type: ignore[assignment]

from draftmill.prompts.bad import BadRecord
from draftmill.prompts.read import Raw
from draftmill.prompts.record import Prompt, Record, Rules, canonical_record, identify_text, parse

# Far from the depth at which either parser gives up.
_MOST_BRACKETS = 400


def parse_raw(raw: Raw, rules: Rules) -> Prompt:
    """Turn a raw record into a prompt. Raises BadRecord with the kind of fault and the reason."""
    prompt = _quick(raw.value, rules) if isinstance(raw.value, bytes) else None
    return prompt if prompt is not None else parse(raw.decode(), rules)


def _quick(line: bytes, rules: Rules) -> Prompt | None:
    if orjson is None or line.count(b"[") + line.count(b"{") > _MOST_BRACKETS:
        return None
    try:
        value: Any = orjson.loads(line)
        record = canonical_record(value, rules)
        return identify_text(record, orjson.dumps(record, option=orjson.OPT_SORT_KEYS)) if _plain(record) else None
    except (ValueError, TypeError, BadRecord):
        return None


def _plain(record: Record) -> bool:
    turns = record.get("messages")
    if turns is None or "tools" in record or len(record.get("answer", "ab")) != 2:
        return False
    return all(len(turn) == 2 for turn in turns)
