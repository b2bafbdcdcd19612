"""Answers that a prompt record brings with it, as completions rows of origin "imported".

They are masked by the template's boundaries (boundary.py) or by the mask they come with, and audited like the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from draftmill.audit.boundary import IMPORTED, finish_reason, render, without_tail
from draftmill.audit.tokens import TokenInfo, token_info

Scalar = bool | int | float | str


def imported_row(
    row: Mapping[str, Any], record: Mapping[str, Any], tokenizer: Any, template_args: Mapping[str, Scalar]
) -> dict[str, Any]:
    """The completions row of a prompt `row` (schemas.PROMPTS) whose `record` has an answer or input_ids.

    prompt_ids is everything before the first loss token, output_ids the rest. A rendered answer ends with its end
    token, since nothing behind it is ever generated. A mask without any loss token gives an empty output, which the
    audit counts as an empty answer. Raises UserError if the chat template refuses the record.
    """
    tokens = _known(tokenizer, tuple(sorted(template_args.items())))
    mask: list[bool] | None = None
    if "input_ids" in record:
        ids, bits = list(record["input_ids"]), [bool(bit) for bit in record["loss_mask"]]
        start = bits.index(True) if True in bits else len(ids)
        output = ids[start:]
        mask = None if all(bits[start:]) else bits[start:]
    else:
        rendered = render(tokenizer, record, template_args)
        ids, start = rendered.ids, rendered.start
        output = without_tail(ids[start:], tokens)
    return {
        "prompt_id": row["prompt_id"],
        "sample": 0,
        "source": row["source"],
        "origin": IMPORTED,
        "prompt_ids": ids[:start],
        "output_ids": output,
        "loss_mask": mask,
        "finish_reason": finish_reason(output, mask, tokens),
        "text": tokenizer.decode(output, skip_special_tokens=False),
    }


@lru_cache(maxsize=4)
def _known(tokenizer: Any, template_args: tuple[tuple[str, Scalar], ...]) -> TokenInfo:
    return token_info(tokenizer, (), dict(template_args))
