"""What a shard's prompts ask: rows rendered to token ids, rows that bring their answer, rows refused beforehand.

A function of the prompts, the configuration and the tokenizer alone, so that the job which publishes a shard and the
process which has it answered see the same rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from draftmill.audit.imported import imported_row
from draftmill.config import Config
from draftmill.engines.base import Failure, Key
from draftmill.engines.sampling import Mix, Setting
from draftmill.engines.sglang_api import RESERVED_TOKENS
from draftmill.errors import UserError
from draftmill.schemas import Row
from draftmill.stages.rows import Asked, RowRules
from draftmill.target.tokenizer import render_prompt


class Reader(Protocol):
    """What is needed of the target to read prompts."""

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer."""
        ...

    @property
    def rules(self) -> RowRules:
        """What a valid row keeps."""
        ...

    @property
    def context(self) -> int:
        """Longest row in tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """What is known of the target without its weights."""

    tokenizer: Any
    rules: RowRules
    context: int


def read_target(config: Config) -> Target:
    """The target without its weights. Raises UserError if it cannot be had or does not say enough."""
    from draftmill.target.files import context_length, read_config, text_config
    from draftmill.target.tokenizer import generation_config, load_tokenizer

    tokenizer = load_tokenizer(config.target)
    stop = ending_ids(config, tokenizer, generation_config(config.target))
    vocabulary = int(text_config(read_config(config.target)).get("vocab_size") or len(tokenizer))
    return Target(tokenizer, RowRules(config.generate, frozenset(stop), vocabulary), context_length(config.target))


def ending_ids(config: Config, tokenizer: Any, generation_config: Any) -> list[int]:
    """Ids that end an answer, sorted. Raises UserError if nothing names one."""
    from draftmill.target.tokenizer import stop_ids

    stop = stop_ids(tokenizer, generation_config)
    if not stop:
        raise UserError(
            f"target.model: neither the tokenizer nor generation_config.json of {config.target.model} names a token that "
            "ends an answer: add eos_token_id to its generation_config.json."
        )
    return stop


class _Refused(Exception):
    """A row that is not even tried: its typed reason and a detail for people."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def row_keys(row: Row, samples: int) -> list[Key]:
    """The keys of all rows of a prompt; one alone for a prompt that brings its answer."""
    return _keys(row, json.loads(row["record"]), samples)


def _keys(row: Row, record: Mapping[str, Any], samples: int) -> list[Key]:
    return [(row["prompt_id"], sample) for sample in range(1 if _has_answer(record) else samples)]


def _has_answer(record: Mapping[str, Any]) -> bool:
    return "answer" in record or "input_ids" in record


def sort_rows(
    rows: Sequence[Row], config: Config, reader: Reader
) -> tuple[dict[Key, Row], list[Asked], dict[Key, Row]]:
    """Rows that bring their answer, rows to ask, and rows refused before they are asked."""
    good: dict[Key, Row] = {}
    asked: list[Asked] = []
    bad: dict[Key, Row] = {}
    mix = Mix(config.generate)
    for row in rows:
        record = json.loads(row["record"])
        keys = _keys(row, record, config.generate.samples)
        if _has_answer(record):
            try:
                good[keys[0]] = _imported(row, record, config, reader)
            except _Refused as refused:
                bad[keys[0]] = _rejection(keys[0], row, refused)
            continue
        rendered: dict[str, tuple[int, ...]] = {}
        for key in keys:
            setting = mix.setting(key, row["source"])
            try:
                if setting.name not in rendered:
                    rendered[setting.name] = _prompt_ids(record, config, reader, setting)
                asked.append(Asked(key, row["source"], rendered[setting.name], setting))
            except _Refused as refused:
                bad[key] = _rejection(key, row, refused)
    return good, asked, bad


def _prompt_ids(record: Mapping[str, Any], config: Config, reader: Reader, setting: Setting) -> tuple[int, ...]:
    try:
        ids = render_prompt(reader.tokenizer, record, {**config.target.chat_template_args, **setting.template_args})
    except UserError as error:
        raise _Refused("template", str(error)) from None
    kept = RESERVED_TOKENS if config.generate.engine == "sglang" else 0
    room = reader.context - setting.sampling.max_new_tokens - kept
    if len(ids) > room:
        raise _Refused("too_long", f"{len(ids)} prompt tokens, {room} fit")
    # SGLang 0.5.17 does not refuse such an id: its process dies of it, with all rows in flight.
    if max(ids, default=0) >= reader.rules.vocabulary:
        raise _Refused("bad_ids", f"an id lies outside the vocabulary of {reader.rules.vocabulary}")
    return tuple(ids)


def _imported(row: Row, record: Mapping[str, Any], config: Config, reader: Reader) -> Row:
    try:
        found = imported_row(row, record, reader.tokenizer, config.target.chat_template_args)
    except UserError as error:
        raise _Refused("template", str(error)) from None
    ids = [*found["prompt_ids"], *found["output_ids"]]
    if len(ids) > reader.context:
        raise _Refused("too_long", f"{len(ids)} tokens with the answer, {reader.context} fit")
    if max(ids) >= reader.rules.vocabulary:
        raise _Refused("bad_ids", f"an id lies outside the vocabulary of {reader.rules.vocabulary}")
    return {**found, "setting": ""} if config.generate.mix else found


def _rejection(key: Key, row: Row, refused: _Refused) -> Row:
    return rejection(key, row["source"], Failure(key, refused.reason, refused.detail))


def rejection(key: Key, source: str, failure: Failure) -> Row:
    """A row of the rejected file."""
    return {
        "prompt_id": key[0],
        "sample": key[1],
        "source": source,
        "reason": failure.reason,
        "detail": failure.detail,
    }
