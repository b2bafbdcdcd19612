"""What a broken limit says to a person: the numbers, and what is most likely wrong."""

from __future__ import annotations

from collections.abc import Sequence

from draftmill.audit.counts import Counts
from draftmill.audit.limits import Check
from draftmill.audit.text import visible

EMPTY_TURN_CAUSE = (
    "thinking used up max_new_tokens, or a reasoning parser kept only `content`, and the chat template rendered an "
    "empty think block"
)
UNKNOWN = "unknown"
"""The finish reason of an answer from elsewhere where no tokenizer tells how answers end."""
_CAUSES = {
    "spike": "the answers are one fixed text, or were cut at one length by whatever made them",
    "empty": EMPTY_TURN_CAUSE,
    "short": "the prompts ask for one word, or the answers were lost and only their frame is left",
    "unclosed_thinking": "max_new_tokens is too small for this target's thinking",
    "repetitive": "the target loops: the temperature is too low, or the chat template is not the target's own",
    "duplicates": "the answers do not depend on the prompts: look at how the prompts are rendered",
    "cut": "max_new_tokens is too small for these prompts",
    "boundary_moved": "the answers were made with other chat template arguments, such as enable_thinking, than these",
    "mean_loss_tokens": "most answers are empty or nearly so",
}
_NOUNS = {
    "empty": "have no text beside special tokens and thinking marks",
    "unclosed_thinking": "open their thinking and never close it",
    "repetitive": "mostly repeat their own 4-grams",
    "duplicates": "are equal to another prompt's answer",
    "cut": "are cut off by length",
    "boundary_moved": "do not begin where the prompt's rendering ends",
    "rejected": "have no answer because they failed",
}


def percent(share: float) -> str:
    """A measured share with one decimal."""
    return f"{100 * share:.1f}%"


def bound(limit: float) -> str:
    """A limit as it was configured, without trailing zeros."""
    return f"{100 * limit:g}%"


def finding(one: Check, short_tokens: int) -> str:
    """The numbers of a check as a clause."""
    if one.code == "mean_loss_tokens":
        return f"the {one.rows} answers have {one.measured:.1f} loss tokens on average (limit {one.limit:g} at least)"
    if one.code == "spike":
        what = f"have exactly {one.value} loss tokens"
    elif one.code == "short":
        what = f"have fewer than {short_tokens} loss tokens"
    else:
        what = _NOUNS[one.code]
    things = "rows" if one.code == "rejected" else "answers"
    return f"{percent(one.measured)} of {one.rows} {things} {what} (limit {bound(one.limit)})"


def cause(one: Check, counts: Counts, short_tokens: int) -> str:
    """What is most likely wrong, as a clause without subject's article."""
    if one.code == "spike" and one.value is not None and (2 * counts.empty > one.count or one.value < short_tokens):
        return EMPTY_TURN_CAUSE
    if one.code == "spike" and counts.finish.get(UNKNOWN) and one.value == max(counts.histogram):
        return "the answers were cut at this length (give a tokenizer, and cut answers are told from ended ones)"
    if one.code == "rejected":
        reason, rows = max(counts.rejected.items(), key=lambda item: (item[1], item[0]))
        return f"what their most common reason says, which is {visible(reason)} ({rows} rows)"
    if one.code in ("short", "duplicates", "mean_loss_tokens") and 2 * counts.empty > one.count:
        return EMPTY_TURN_CAUSE
    return _CAUSES[one.code]


def failure(name: str, over: Sequence[Check], counts: Counts, short_tokens: int, page: str) -> str:
    """The one sentence of a failed audit: the worst finding, its likely cause and where to look."""
    more = f" ({len(over) - 1} more limits are broken)" if len(over) > 2 else ""
    more = " (1 more limit is broken)" if len(over) == 2 else more
    return (
        f"{name} fails its audit: {finding(over[0], short_tokens)}; most likely "
        f"{cause(over[0], counts, short_tokens)}; numbers and examples are in {page}{more}."
    )
