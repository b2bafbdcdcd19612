"""The evaluate stage: how many target forwards the drafter saves on held-out prompts, and proof that the text is equal.

Each prompt is decoded three times: by the target alone, in blocks with the drafter, and by prompt lookup. All three must
give the same tokens; where they part, the target's two best logits must be so close that rounding decides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill.config import EvaluateConfig
from draftmill.drafter.acceptance import Answer, summarize
from draftmill.drafter.checkpoint import write_json
from draftmill.drafter.decode import Decoded, DrafterProposer, Greedy, LookupProposer, decode, greedy
from draftmill.drafter.model import Drafter
from draftmill.errors import UserError

NEAR_TIE = 1e-3

# Prompts done, prompts in all, tokens decoded for the last one.
Progress = Callable[[int, int, int], None]


@dataclass(frozen=True, slots=True)
class HeldOutPrompt:
    """A prompt that was not trained on, as ids with the chat template applied."""

    prompt_id: str
    source: str
    prompt_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Row:
    prompt: HeldOutPrompt
    alone: Greedy
    drafter: Decoded
    lookup: Decoded


def evaluate_drafter(
    *,
    prompts: Sequence[HeldOutPrompt],
    drafter: Drafter,
    target: Any,
    stop: Collection[int],
    config: EvaluateConfig,
    context_length: int,
    exact: bool,
    output: Path,
    provenance: Mapping[str, Any],
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure acceptance on the first `config.max_prompts` prompts and publish it as JSON in the file `output`.

    `target` is a causal language model on its device and the drafter is on the same one; `stop` are the ids that end an
    answer; `exact` says that the target computes in float32, where decoders may part only at a near tie. Raises
    UserError if no prompt leaves room for an answer, RuntimeError if decoders part although they may not.
    """
    fitting = [prompt for prompt in prompts if 0 < len(prompt.prompt_ids) < context_length]
    if not fitting:
        raise UserError(
            f"None of the {len(prompts)} held-out prompts is shorter than the context of {context_length} tokens: "
            "raise target.context_length or give shorter prompts."
        )
    chosen = fitting[: config.max_prompts]
    rows = []
    for prompt in chosen:
        limit = min(config.max_new_tokens, context_length - len(prompt.prompt_ids))
        rows.append(_decode(prompt, drafter, target, limit, stop, config.prompt_lookup_tokens))
        if progress is not None:
            progress(len(rows), len(chosen), len(rows[-1].alone.tokens))
    result = {
        **_result(rows, drafter.shape.block_size - 1, config),
        "too_long": len(prompts) - len(fitting),
        "provenance": dict(provenance),
    }
    _refuse_unexplained(result["divergences"], exact)
    write_json(output, result)
    return result


def _decode(
    prompt: HeldOutPrompt, drafter: Drafter, target: Any, limit: int, stop: Collection[int], lookup: int
) -> _Row:
    ids = prompt.prompt_ids
    return _Row(
        prompt,
        greedy(target, ids, limit, stop),
        decode(target, DrafterProposer(drafter, target), ids, limit, stop),
        decode(target, LookupProposer(lookup, stop), ids, limit, stop),
    )


def _result(rows: Sequence[_Row], proposals: int, config: EvaluateConfig) -> dict[str, Any]:
    divergences = [found for row in rows for found in _divergences(row)]
    drafted = [_answer(row.prompt.source, row.drafter) for row in rows]
    looked_up = [_answer(row.prompt.source, row.lookup) for row in rows]
    return {
        "prompts": len(rows),
        "identical": len(rows) - len({found["prompt_id"] for found in divergences if found["decoder"] == "drafter"}),
        "divergences": divergences,
        "target": {"tokens": sum(len(row.alone.tokens) for row in rows)},
        "drafter": summarize(drafted, proposals, config.bootstrap),
        "prompt_lookup": summarize(looked_up, config.prompt_lookup_tokens, config.bootstrap),
        "rows": [_row_values(row) for row in rows],
    }


def _answer(source: str, decoded: Decoded) -> Answer:
    return Answer(source, len(decoded.tokens), decoded.accepted)


def _divergences(row: _Row) -> list[dict[str, Any]]:
    found = []
    for name, decoded in (("drafter", row.drafter), ("prompt_lookup", row.lookup)):
        position = first_difference(row.alone.tokens, decoded.tokens)
        if position is not None:
            gap = row.alone.gaps[min(position, len(row.alone.gaps) - 1)]
            found.append({"decoder": name, "prompt_id": row.prompt.prompt_id, "position": position, "gap": gap})
    return found


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position where two answers differ, a missing token counting as different; None if they are equal."""
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return position
    return None if len(one) == len(other) else min(len(one), len(other))


def _refuse_unexplained(divergences: Sequence[Mapping[str, Any]], exact: bool) -> None:
    wrong = [found for found in divergences if found["gap"] >= NEAR_TIE]
    if exact and wrong:
        worst = max(wrong, key=lambda found: float(found["gap"]))
        raise RuntimeError(
            f"{worst['decoder']} decoding left the target's text at token {worst['position']} of prompt "
            f"{worst['prompt_id']}, where the two best logits are {worst['gap']:.4g} apart"
        )


def _row_values(row: _Row) -> dict[str, Any]:
    return {
        "prompt_id": row.prompt.prompt_id,
        "source": row.prompt.source,
        "prompt_tokens": len(row.prompt.prompt_ids),
        "output_ids": list(row.alone.tokens),
        "drafter_accepted": list(row.drafter.accepted),
        "prompt_lookup_accepted": list(row.lookup.accepted),
    }
