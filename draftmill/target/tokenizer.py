"""The tokenizer and the chat template: the only place where text becomes token ids.

Prompts are rendered here and travel as ids; what the engine returns is stored as it came. Nothing is ever tokenised a
second time, because templates trim and rewrite answers (facts in docs/architecture.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftmill.config import TargetConfig
from draftmill.errors import UserError, reason
from draftmill.target.files import check, is_folder

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


def load_tokenizer(target: TargetConfig) -> Any:
    """The target's tokenizer. Raises UserError if there is none or it carries no chat template."""
    from transformers import AutoTokenizer

    check(target)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            target.model,
            revision=None if is_folder(target) else target.revision,
            trust_remote_code=target.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        raise UserError(f"target.model: no tokenizer could be loaded from {target.model}: {reason(error)}.") from None
    if not tokenizer.chat_template:
        raise UserError(f"target.model: the tokenizer of {target.model} has no chat template, which prompts need.")
    return tokenizer


def render_prompt(tokenizer: Any, record: Mapping[str, Any], template_args: Mapping[str, Any]) -> list[int]:
    """Ids of a record's prompt up to where the target starts to answer. Raises UserError if the template refuses."""
    return _render(tokenizer, record["messages"], record.get("tools"), template_args, add_generation_prompt=True)


def render_full(tokenizer: Any, record: Mapping[str, Any], template_args: Mapping[str, Any]) -> list[int]:
    """Ids of a record's prompt and its answer as the template renders them. Raises UserError if the template refuses."""
    messages = [*record["messages"], record["answer"]]
    return _render(tokenizer, messages, record.get("tools"), template_args, add_generation_prompt=False)


def _render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    template_args: Mapping[str, Any],
    *,
    add_generation_prompt: bool,
) -> list[int]:
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **template_args,
        )
    except (TemplateError, TypeError, KeyError) as error:
        raise UserError(f"The chat template refused a prompt: {reason(error)}") from None
    # The template writes its own special tokens, so the tokenizer must not add another set.
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def generation_config(target: TargetConfig) -> Any | None:
    """The target's generation config, which may name further ids that end an answer; None if it has none."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(target.model, revision=None if is_folder(target) else target.revision)
    except (OSError, ValueError):
        return None


def stop_ids(tokenizer: Any, generation_config: Any) -> list[int]:
    """Ids that end an answer: those of the generation config and the tokenizer's end-of-text, sorted."""
    configured = getattr(generation_config, "eos_token_id", None)
    found = configured if isinstance(configured, list) else [configured]
    return sorted({int(i) for i in [*found, tokenizer.eos_token_id] if i is not None})


def special_ids(tokenizer: Any) -> list[int]:
    """Every id that the tokenizer treats as special, sorted.

    Added tokens that are not special are left out: templates write some of them, such as marks around a tool's answer.
    """
    added = tokenizer.added_tokens_decoder
    return sorted({*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)})


def think_ids(tokenizer: Any) -> tuple[int | None, int | None]:
    """The ids that open and close thinking, or None where the vocabulary has no such token."""
    vocabulary = tokenizer.get_vocab()
    return vocabulary.get(THINK_OPEN), vocabulary.get(THINK_CLOSE)


def template_ids(tokenizer: Any, template_args: Mapping[str, Any]) -> set[int]:
    """Ids that the chat template writes around a plain conversation, among them its marks for turns."""
    ask = {"messages": [{"role": "user", "content": "a"}]}
    full = {"messages": ask["messages"], "answer": {"role": "assistant", "content": "b"}}
    return {*render_prompt(tokenizer, ask, template_args), *render_full(tokenizer, full, template_args)}
