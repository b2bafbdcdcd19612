"""A row as pieces of text for a page: prompt and answer, what is trained on and what not, special tokens apart.

Long rows are shortened before anything is decoded, so that a megabyte of one letter costs what its shown part costs.
Texts travel as they are; the page spells out control characters and only ever sets them as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Literal

from draftmill.dashboard.target_tokens import Tokens

Kind = Literal["prompt", "trained", "masked", "left_out"]
SHORT, LONG = 1_000, 60_000
"""Tokens, or characters by four, that are shown of a prompt or an answer at first and at most."""
_CHARACTERS = 4
_PIECES = 400
# How special tokens are written by most vocabularies; used only where there is no tokenizer to ask.
_LIKE_SPECIAL = re.compile(r"(<\|[^|<>\s]{1,40}\|>|</?(?:think|tool_call|s)>)")


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a row; `left_out` tells in words how much is not shown there."""

    kind: Kind
    text: str
    special: bool = False


def pieces(row: Mapping[str, Any], record: str | None, tokens: Tokens | None, limit: int) -> list[dict[str, Any]]:
    """A completions row as JSON values of pieces. `record` is the prompt's record, for want of a tokenizer."""
    if tokens is not None:
        found = [*_prompt_ids(row["prompt_ids"], tokens, limit), *_answer_ids(row, tokens, limit)]
    else:
        asked = _prompt_text(record, limit) or [Piece("left_out", f"{len(row['prompt_ids']):,} tokens of the prompt")]
        found = [*asked, *_answer_text(row, limit)]
    return [asdict(piece) for piece in found[:_PIECES]] + _rest(len(found))


def prompt_pieces(record: str | None, limit: int) -> list[dict[str, Any]]:
    """The prompt of a row that has no answer."""
    return [asdict(piece) for piece in _prompt_text(record, limit)]


def _rest(count: int) -> list[dict[str, Any]]:
    return [asdict(Piece("left_out", f"{count - _PIECES} more pieces"))] if count > _PIECES else []


# By ids ---------------------------------------------------------------------------------------------------------------


def _prompt_ids(ids: Sequence[int], tokens: Tokens, limit: int) -> list[Piece]:
    return _ids(ids, ["prompt"] * len(ids), tokens, limit)


def _answer_ids(row: Mapping[str, Any], tokens: Tokens, limit: int) -> list[Piece]:
    ids, mask = row["output_ids"], row["loss_mask"]
    if mask is None:
        return _ids(ids, ["trained"] * len(ids), tokens, limit)
    return _ids(ids, ["trained" if bit else "masked" for bit in mask], tokens, limit)


def _ids(ids: Sequence[int], kinds: Sequence[Kind], tokens: Tokens, limit: int) -> list[Piece]:
    """Ids with each one's kind; of a long row the beginning and the end."""
    if len(ids) <= limit:
        return _runs(ids, kinds, tokens)
    head, tail = limit * 3 // 4, limit // 4
    return [
        *_runs(ids[:head], kinds[:head], tokens),
        Piece("left_out", f"{len(ids) - head - tail:,} tokens"),
        *_runs(ids[-tail:], kinds[-tail:], tokens),
    ]


def _runs(ids: Sequence[int], kinds: Sequence[Kind], tokens: Tokens) -> list[Piece]:
    found = []
    places = range(len(ids))
    for (kind, special), group in groupby(places, key=lambda place: (kinds[place], ids[place] in tokens.special)):
        run = [ids[place] for place in group]
        if special:
            found += [Piece(kind, tokens.special[one], True) for one in run]
        else:
            found.append(Piece(kind, tokens.decode(run)))
    return found


# By text --------------------------------------------------------------------------------------------------------------


def _answer_text(row: Mapping[str, Any], limit: int) -> list[Piece]:
    return _marked("trained", str(row["text"]), limit)


def _prompt_text(record: str | None, limit: int) -> list[Piece]:
    if record is None:
        return []
    try:
        value = json.loads(record)
    except ValueError:
        return _marked("prompt", record, limit)
    turns = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(turns, list):
        return _marked("prompt", record, limit)
    found = []
    for turn in turns:
        found.append(Piece("prompt", f"{turn.get('role', '?')}:", True))
        content = turn.get("content", "")
        found += _marked("prompt", content if isinstance(content, str) else json.dumps(content), limit)
    return found


def _marked(kind: Kind, text: str, limit: int) -> list[Piece]:
    """A text with what looks like special tokens apart; of a long one the beginning and the end."""
    room = limit * _CHARACTERS
    if len(text) <= room:
        return _split(kind, text)
    head, tail = room * 3 // 4, room // 4
    return [
        *_split(kind, text[:head]),
        Piece("left_out", f"{len(text) - head - tail:,} characters"),
        *_split(kind, text[-tail:]),
    ]


def _split(kind: Kind, text: str) -> list[Piece]:
    parts = _LIKE_SPECIAL.split(text)
    return [Piece(kind, part, place % 2 == 1) for place, part in enumerate(parts) if part]
