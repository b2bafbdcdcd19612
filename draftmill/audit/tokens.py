"""What the audit must know of a tokenizer: which ids carry no text, which end an answer, which mark thinking.

A small value of plain ids, so that measuring needs no tokenizer and no torch; `token_info` takes it from a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftmill.errors import UserError
from draftmill.target.tokenizer import THINK_CLOSE, THINK_OPEN, render_full, special_ids, think_ids

THINK_MARKS = (THINK_OPEN, THINK_CLOSE)
_BLANK_CHARACTERS = set("ĠĊĉč▁ \n\t\r")  # white space, and how byte-level and SentencePiece vocabularies spell it
_BLANK_BYTES = {"<0x09>", "<0x0A>", "<0x0D>", "<0x20>"}


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """Ids and marks of one tokenizer. Without a tokenizer everything is empty and only counts and texts speak."""

    special_ids: frozenset[int] = frozenset()
    eos_ids: frozenset[int] = frozenset()
    think_open: int | None = None
    think_close: int | None = None
    blank_ids: frozenset[int] = frozenset()
    """Ids that decode to white space only."""
    empty_turn: tuple[int, ...] = ()
    """An assistant turn with no content as the chat template renders it, its header included."""
    marks: tuple[str, ...] = THINK_MARKS
    """Texts of special tokens and thinking marks, which are no answer."""
    vocabulary: int | None = None
    """How many ids there are; None if not known."""
    decode: Callable[[Sequence[int]], str] | None = field(default=None, compare=False)
    """Ids to text with special tokens shown; only examples on pages use it."""

    @property
    def think_ids(self) -> tuple[int, ...]:
        """The ids that open and close thinking, as far as there are any."""
        return tuple(i for i in (self.think_open, self.think_close) if i is not None)

    @property
    def silent_ids(self) -> frozenset[int]:
        """Every id that says nothing: special, end of answer, thinking mark, white space."""
        return self.special_ids | self.eos_ids | self.blank_ids | frozenset(self.think_ids)


def token_info(
    tokenizer: Any, eos_ids: Sequence[int] = (), template_args: Mapping[str, Any] | None = None
) -> TokenInfo:
    """What a transformers tokenizer tells. `eos_ids` are further ids that end an answer, as the model has them.

    The last special token of the template's own empty turn ends an answer too: some tokenizers name another one.
    """
    special = set(special_ids(tokenizer))
    turn = _empty_turn(tokenizer, template_args or {})
    ends = {int(i) for i in (*eos_ids, tokenizer.eos_token_id) if i is not None}
    ends.update([i for i in turn if i in special][-1:])
    opened, closed = think_ids(tokenizer)
    return TokenInfo(
        special_ids=frozenset(special),
        eos_ids=frozenset(ends),
        think_open=opened,
        think_close=closed,
        blank_ids=_blank_ids(tokenizer),
        empty_turn=turn,
        marks=tuple(sorted({*THINK_MARKS, *(str(tokenizer.convert_ids_to_tokens(i)) for i in special)})),
        vocabulary=max([len(tokenizer), *(i + 1 for i in special)]),
        decode=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)),
    )


def _empty_turn(tokenizer: Any, template_args: Mapping[str, Any]) -> tuple[int, ...]:
    """What the template adds for an answer without content; nothing if there is no template or it refuses."""
    question = {"role": "user", "content": "?"}
    if not tokenizer.chat_template:
        return ()
    try:
        before = render_full(tokenizer, {"messages": [], "answer": question}, template_args)
        full = render_full(
            tokenizer, {"messages": [question], "answer": {"role": "assistant", "content": ""}}, template_args
        )
    except UserError:
        return ()
    return tuple(full[len(before) :]) if full[: len(before)] == before else ()


def _blank_ids(tokenizer: Any) -> frozenset[int]:
    spelled = (
        i
        for token, i in tokenizer.get_vocab().items()
        if token and (token in _BLANK_BYTES or _BLANK_CHARACTERS.issuperset(token))
    )
    return frozenset(i for i in spelled if not tokenizer.decode([i]).strip())
