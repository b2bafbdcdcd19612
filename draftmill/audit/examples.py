"""Example rows for people: which ones, and their tokens as text with the loss mask shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from draftmill.audit.columns import Bools, loss_mask, ragged
from draftmill.audit.limits import Check
from draftmill.audit.measure import RowFacts
from draftmill.audit.text import visible
from draftmill.audit.tokens import TokenInfo
from draftmill.config import AuditConfig

PROMPT_TOKENS, ANSWER_TOKENS, TEXT_CHARACTERS = 80, 320, 1600
_TYPICAL, _UNBROKEN, _RUNS = 3, 1, 12


class Segment(BaseModel):
    """A piece of an example: the prompt's tail, tokens that are trained on, or tokens that are not."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["prompt", "answer", "masked", "left_out"]
    text: str


class Example(BaseModel):
    """One row shown; `codes` are the checks it is an example of, `typical` among them."""

    model_config = ConfigDict(frozen=True)

    row: str
    source: str
    finish_reason: str
    loss_tokens: int
    codes: list[str]
    segments: list[Segment]


def choose(facts: RowFacts, checks: Sequence[Check], limits: AuditConfig) -> dict[int, list[str]]:
    """Row numbers to show and the codes each stands for: the first rows over each limit, and some typical ones."""
    chosen: dict[int, list[str]] = {}
    for one in checks:
        take = limits.examples if one.over else min(_UNBROKEN, limits.examples)
        for row in _flagged(facts, one, limits)[:take].tolist():
            chosen.setdefault(row, []).append(one.code)
    for row in _typical(facts, min(_TYPICAL, limits.examples)):
        chosen.setdefault(row, []).append("typical")
    return dict(sorted(chosen.items()))


def _flagged(facts: RowFacts, one: Check, limits: AuditConfig) -> npt.NDArray[np.int64]:
    whole = ~facts.cut
    flags: dict[str, Bools] = {
        "spike": whole & (facts.loss_tokens == one.value) if one.over else np.zeros(len(whole), np.bool_),
        "empty": facts.empty,
        "short": whole & (facts.loss_tokens < limits.short_tokens),
        "unclosed_thinking": facts.unclosed,
        "repetitive": facts.repetitive,
        "duplicates": facts.duplicate,
        "cut": facts.cut,
        "boundary_moved": facts.boundary_moved,
    }
    return np.flatnonzero(flags[one.code]) if one.code in flags else np.zeros(0, np.int64)


def _typical(facts: RowFacts, count: int) -> Iterable[int]:
    """Rows of evenly spread rank in loss tokens."""
    order = np.argsort(facts.loss_tokens, kind="stable")
    if not len(order):
        return []
    return [int(order[(2 * k + 1) * len(order) // (2 * count)]) for k in range(count)]


def build(table: pa.Table, chosen: dict[int, list[str]], facts: RowFacts, tokens: TokenInfo) -> list[Example]:
    """The chosen rows of a completions table as examples; a column `place`, if there is one, names the rows."""
    return [_example(table.slice(row, 1), codes, int(facts.loss_tokens[row]), tokens) for row, codes in chosen.items()]


def _example(row: pa.Table, codes: list[str], loss_tokens: int, tokens: TokenInfo) -> Example:
    outputs = ragged(row["output_ids"], np.int32)
    mask = loss_mask(row["loss_mask"], outputs)
    values: dict[str, Any] = row.drop_columns(["prompt_ids", "output_ids", "loss_mask"]).to_pylist()[0]
    prompt = ragged(row["prompt_ids"], np.int32).flat[-PROMPT_TOKENS:].tolist()
    segments = [Segment(kind="prompt", text=_text(prompt, tokens))] if prompt else []
    if tokens.decode is None and values["text"]:
        segments += _shortened(str(values["text"]))
    else:
        segments += _runs(outputs.flat.tolist(), mask.tolist(), tokens)
    return Example(
        row=visible(values.get("place") or f"{values['prompt_id']}/{values['sample']}"),
        source=visible(values["source"]),
        finish_reason=visible(values["finish_reason"]),
        loss_tokens=loss_tokens,
        codes=codes,
        segments=segments,
    )


def _runs(ids: list[int], mask: list[bool], tokens: TokenInfo) -> list[Segment]:
    """Runs of equal mask as text; the middle of a long output is left out."""
    starts = [i for i in range(len(ids)) if i == 0 or mask[i] != mask[i - 1]]
    segments: list[Segment] = []
    for start, end in zip(starts[:_RUNS], [*starts[1:], len(ids)], strict=False):
        kind: Literal["answer", "masked"] = "answer" if mask[start] else "masked"
        if end - start <= ANSWER_TOKENS:
            segments.append(Segment(kind=kind, text=_text(ids[start:end], tokens)))
            continue
        half = ANSWER_TOKENS // 2
        segments.append(Segment(kind=kind, text=_text(ids[start : start + half], tokens)))
        segments.append(Segment(kind="left_out", text=f"{end - start - 2 * half} tokens"))
        segments.append(Segment(kind=kind, text=_text(ids[end - half : end], tokens)))
    if len(starts) > _RUNS:
        segments.append(Segment(kind="left_out", text=f"{len(ids) - starts[_RUNS]} tokens"))
    return segments


def _shortened(text: str) -> list[Segment]:
    if len(text) <= TEXT_CHARACTERS:
        return [Segment(kind="answer", text=visible(text))]
    half = TEXT_CHARACTERS // 2
    return [
        Segment(kind="answer", text=visible(text[:half])),
        Segment(kind="left_out", text=f"{len(text) - 2 * half} characters"),
        Segment(kind="answer", text=visible(text[-half:])),
    ]


def _text(ids: Sequence[int], tokens: TokenInfo) -> str:
    """The ids as text, or as numbers where there is no tokenizer or it does not know them."""
    if tokens.decode is not None:
        try:
            return visible(tokens.decode(ids))
        except (OverflowError, TypeError, ValueError, IndexError):
            pass
    return " ".join(map(str, ids))


def pool(groups: Iterable[Sequence[Example]], limit: int) -> list[Example]:
    """Examples of a set from those of its shards: the first `limit` of each code."""
    taken: dict[str, int] = {}
    chosen = []
    for example in (e for group in groups for e in group):
        wanted = [code for code in example.codes if taken.get(code, 0) < limit]
        for code in wanted:
            taken[code] = taken.get(code, 0) + 1
        if wanted:
            chosen.append(example)
    return chosen
