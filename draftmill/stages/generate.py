"""The generate stage: the prompts of one shard become completions and typed rejections.

Every finished row goes to the journal by its key; a killed job takes them from there and does only the rest. Rows that
fail a check are tried again with another seed up to the cap, then rejected: prompts in = completions + rejected, or
nothing is published.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill.audit.imported import imported_row
from draftmill.config import Config, GenerateConfig
from draftmill.engines.base import Engine, Failure, Key, Request, Result, row_seed
from draftmill.errors import UserError
from draftmill.progress import Heartbeat
from draftmill.schemas import COMPLETIONS, PROMPTS, REJECTED, Row, read_rows, write_rows
from draftmill.store.journal import Journal
from draftmill.target.tokenizer import render_prompt


@dataclass(frozen=True, slots=True)
class RowRules:
    """What a valid row keeps: the limits of sampling, the ids that end an answer, the size of the vocabulary."""

    sampling: GenerateConfig
    stop_ids: frozenset[int]
    vocabulary: int

    def fault(self, result: Result) -> tuple[str, str] | None:
        """The typed reason and detail for which a row is refused, or None."""
        ids, limit = result.output_ids, self.sampling.max_new_tokens
        if result.finish_reason not in ("stop", "length"):
            return "finish_reason", f"the engine ended the row with {result.finish_reason!r}"
        if not ids:
            return "empty", "no token was generated"
        if len(ids) > limit or (result.finish_reason == "length" and len(ids) != limit):
            return "length", f"{len(ids)} tokens with finish reason {result.finish_reason}, limit {limit}"
        if min(ids) < 0 or max(ids) >= self.vocabulary:
            return "bad_ids", f"an id lies outside the vocabulary of {self.vocabulary}"
        if result.finish_reason == "stop" and ids[-1] not in self.stop_ids:
            return "finish_reason", f"the row stopped at token {ids[-1]}, which ends no answer"
        run = self.sampling.max_token_run
        if len(ids) >= run and len(set(ids[-run:])) == 1:
            return "token_run", f"the last {run} tokens are all {ids[-1]}"
        return None


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt that the engine is to answer: where it came from and its token ids."""

    key: Key
    source: str
    prompt_ids: tuple[int, ...]


class Attempts:
    """The rows of one shard: answers, failures, and the journal that keeps both."""

    def __init__(self, config: GenerateConfig, rules: RowRules, journal: Journal, heartbeat: Heartbeat) -> None:
        self.answers: dict[Key, Result] = {}
        self.failures: dict[tuple[Key, int], Failure] = {}
        self._config, self._rules, self._journal, self._heartbeat = config, rules, journal, heartbeat
        self._unflushed: list[dict[str, Any]] = []
        self._flushed = time.monotonic()

    def resume(self) -> None:
        """Take what an earlier, killed job left in the journal."""
        for row in self._journal.rows():
            self._take(row)
        self._heartbeat.resume(len(self.answers))

    def run(self, engine: Engine, asked: Sequence[Asked]) -> None:
        """Answer all rows, trying a failed one again up to the cap; everything is flushed at the end."""
        left = list(asked)
        for attempt in range(self._config.attempts):
            requests = [Request(a.key, a.prompt_ids, row_seed(self._config.seed, a.key, attempt)) for a in left]
            done = {r.key for r in requests if r.key in self.answers or (r.key, attempt) in self.failures}
            for result in engine.run(requests, done):
                self._note(result, attempt)
            # A row answered at this attempt in a run before the kill still belongs to this attempt's batch.
            left = [a for a in left if (a.key, attempt) in self.failures]
        self._flush()

    def _note(self, result: Result | Failure, attempt: int) -> None:
        fault = (result.reason, result.detail) if isinstance(result, Failure) else self._rules.fault(result)
        row: dict[str, Any] = {"key": list(result.key), "attempt": attempt}
        if fault is not None:
            row |= {"reason": fault[0], "detail": fault[1]}
        elif isinstance(result, Result):
            row |= {"output_ids": list(result.output_ids), "finish_reason": result.finish_reason}
        self._take(row)
        self._unflushed.append(row)
        self._heartbeat.advance(int(fault is None), len(row.get("output_ids", ())), {"failures": len(self.failures)})
        due = time.monotonic() - self._flushed >= self._config.flush_seconds
        if due or len(self._unflushed) >= self._config.flush_rows:
            self._flush()

    def _take(self, row: Mapping[str, Any]) -> None:
        key: Key = (row["key"][0], row["key"][1])
        if "reason" in row:
            self.failures[key, row["attempt"]] = Failure(key, row["reason"], row["detail"])
        else:
            self.answers[key] = Result(key, tuple(row["output_ids"]), row["finish_reason"])

    def _flush(self) -> None:
        self._journal.append(self._unflushed)
        self._unflushed, self._flushed = [], time.monotonic()

    def rejection(self, key: Key) -> Failure:
        """Why a row without an answer failed the last time it was tried. Raises RuntimeError if it was never tried."""
        for attempt in reversed(range(self._config.attempts)):
            if (key, attempt) in self.failures:
                return self.failures[key, attempt]
        raise RuntimeError(f"row {key} was neither answered nor refused")


@dataclass(frozen=True, slots=True)
class Answering:
    """Everything that answers prompts: engine, tokenizer, row rules, and the longest row in tokens."""

    engine: Engine
    tokenizer: Any
    rules: RowRules
    context: int


def open_engine(config: Config) -> Answering:
    """Load what the configuration names. Raises UserError if the target cannot be had."""
    from draftmill.engines.transformers import TransformersEngine
    from draftmill.target.files import context_length
    from draftmill.target.model import load_model
    from draftmill.target.tokenizer import load_tokenizer, stop_ids

    tokenizer, model = load_tokenizer(config.target), load_model(config)
    stop = stop_ids(tokenizer, model.generation_config)
    if not stop:
        raise UserError(
            f"target.model: neither the tokenizer nor generation_config.json of {config.target.model} names a token that "
            "ends an answer: add eos_token_id to its generation_config.json."
        )
    rules = RowRules(config.generate, frozenset(stop), int(model.get_input_embeddings().weight.shape[0]))
    engine = TransformersEngine(model, stop, config.generate)
    return Answering(engine, tokenizer, rules, context_length(config.target))


def generate_shard(
    config: Config,
    answering: Answering,
    *,
    prompts: Path,
    completions: Path,
    rejected: Path,
    journal: Journal,
    heartbeat: Callable[[int], Heartbeat],
    provenance: Mapping[str, Any],
) -> None:
    """Answer the shard at `prompts` and publish `completions` and `rejected`.

    `heartbeat` makes the progress of a given number of rows. Raises RuntimeError if rows are not conserved.
    """
    rows = read_rows(prompts, PROMPTS)
    good, asked, bad = _sort(rows, config, answering)
    with heartbeat(len(asked)) as beat:
        attempts = Attempts(config.generate, answering.rules, journal, beat)
        attempts.resume()
        attempts.run(answering.engine, asked)
    for item in asked:
        if item.key in attempts.answers:
            good[item.key] = _completion(item, attempts.answers[item.key], answering.tokenizer)
        else:
            bad[item.key] = _rejection(item.key, item.source, attempts.rejection(item.key))
    order = [key for row in rows for key in _keys(row, json.loads(row["record"]), config.generate.samples)]
    if len(good) + len(bad) != len(order) or any((key in good) == (key in bad) for key in order):
        raise RuntimeError(f"{prompts}: of {len(order)} rows {len(good)} were completed and {len(bad)} rejected")
    write_rows(rejected, REJECTED, [bad[key] for key in order if key in bad], provenance)
    write_rows(completions, COMPLETIONS, [good[key] for key in order if key in good], provenance)
    journal.clear()


class _Refused(Exception):
    """A row that is not even tried: its typed reason and a detail for people."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def _keys(row: Row, record: Mapping[str, Any], samples: int) -> list[Key]:
    return [(row["prompt_id"], sample) for sample in range(1 if _has_answer(record) else samples)]


def _has_answer(record: Mapping[str, Any]) -> bool:
    return "answer" in record or "input_ids" in record


def _sort(
    rows: Sequence[Row], config: Config, answering: Answering
) -> tuple[dict[Key, Row], list[Asked], dict[Key, Row]]:
    """Rows that bring their answer, rows to ask, and rows refused before they are asked."""
    good: dict[Key, Row] = {}
    asked: list[Asked] = []
    bad: dict[Key, Row] = {}
    for row in rows:
        record = json.loads(row["record"])
        keys = _keys(row, record, config.generate.samples)
        try:
            if _has_answer(record):
                good[keys[0]] = _imported(row, record, config, answering)
            else:
                ids = _prompt_ids(record, config, answering)
                asked += [Asked(key, row["source"], ids) for key in keys]
        except _Refused as refused:
            failures = [Failure(key, refused.reason, refused.detail) for key in keys]
            bad |= {failure.key: _rejection(failure.key, row["source"], failure) for failure in failures}
    return good, asked, bad


def _prompt_ids(record: Mapping[str, Any], config: Config, answering: Answering) -> tuple[int, ...]:
    try:
        ids = render_prompt(answering.tokenizer, record, config.target.chat_template_args)
    except UserError as error:
        raise _Refused("template", str(error)) from None
    room = answering.context - config.generate.max_new_tokens
    if len(ids) > room:
        raise _Refused("too_long", f"{len(ids)} prompt tokens, {room} fit")
    return tuple(ids)


def _imported(row: Row, record: Mapping[str, Any], config: Config, answering: Answering) -> Row:
    try:
        found = imported_row(row, record, answering.tokenizer, config.target.chat_template_args)
    except UserError as error:
        raise _Refused("template", str(error)) from None
    ids = [*found["prompt_ids"], *found["output_ids"]]
    if len(ids) > answering.context:
        raise _Refused("too_long", f"{len(ids)} tokens with the answer, {answering.context} fit")
    if max(ids) >= answering.rules.vocabulary:
        raise _Refused("bad_ids", f"an id lies outside the vocabulary of {answering.rules.vocabulary}")
    return found


def _completion(asked: Asked, result: Result, tokenizer: Any) -> Row:
    return {
        "prompt_id": asked.key[0],
        "sample": asked.key[1],
        "source": asked.source,
        "origin": "generated",
        "prompt_ids": list(asked.prompt_ids),
        "output_ids": list(result.output_ids),
        "loss_mask": None,
        "finish_reason": result.finish_reason,
        "text": tokenizer.decode(result.output_ids, skip_special_tokens=False),
    }


def _rejection(key: Key, source: str, failure: Failure) -> Row:
    return {
        "prompt_id": key[0],
        "sample": key[1],
        "source": source,
        "reason": failure.reason,
        "detail": failure.detail,
    }
