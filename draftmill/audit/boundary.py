"""Where an answer begins and ends in token ids that were made elsewhere.

It begins where the prompt, rendered with the generation prompt, ends. If that rendering is no true prefix of the whole
conversation (a template that opens thinking in the prompt, and an answer without thinking), the longest common prefix
is the boundary and the row is counted, for the target would never have been asked so. It ends with the last id that
ends answers; what a template writes behind it (a newline in ChatML) is never generated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from draftmill.audit.tokens import TokenInfo
from draftmill.target.tokenizer import render_full, render_prompt

STOP, CUT = "stop", "length"
IMPORTED = "imported"


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation's ids, the number of them before its answer, and whether the prompt was no true prefix."""

    ids: list[int]
    start: int
    moved: bool


def render(tokenizer: Any, record: Mapping[str, Any], template_args: Mapping[str, Any]) -> Rendered:
    """A canonical record with an answer as ids. Raises UserError if the template refuses it."""
    prompt = render_prompt(tokenizer, record, template_args)
    full = render_full(tokenizer, record, template_args)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, full, strict=False)))
    return Rendered(full, common, common < len(prompt))


def finish_reason(output: Sequence[int], mask: Sequence[bool] | None, tokens: TokenInfo) -> str:
    """Whether an answer ended by itself ("stop": an end token is its last loss token or stands behind it) or "length".

    Data from elsewhere seldom say whether an answer was cut, but one that ended by itself has its end token, with or
    without loss. White space at the end does not count. A `mask` of None is all ones.
    """
    said = (i for i, token in enumerate(output) if (mask is None or mask[i]) and token not in tokens.blank_ids)
    last = max(said, default=0)
    return STOP if any(token in tokens.eos_ids for token in output[last:]) else CUT


def without_tail(output: Sequence[int], tokens: TokenInfo) -> list[int]:
    """An answer without what the template wrote behind its last end token; whole if anything else stands there."""
    ends = [position for position, token in enumerate(output) if token in tokens.eos_ids]
    if not ends or not all(token in tokens.blank_ids | tokens.special_ids for token in output[ends[-1] + 1 :]):
        return list(output)
    return list(output[: ends[-1] + 1])
