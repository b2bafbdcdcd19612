"""The generate stage: the prompts of one shard become completions and typed rejections.

Every finished row goes to the journal by its key; a killed job takes them from there and does only the rest. Rows that
fail a check are tried again with another seed up to the cap, then rejected: prompts in = completions + rejected, or
nothing is published. Here an engine in this process answers row by row; SGLang servers are asked by a process of their
own (lane.py), and the job waits until its shard is there (serving.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill.config import Config, GenerateConfig
from draftmill.engines.base import Engine, Failure, Key, Result
from draftmill.progress import Heartbeat
from draftmill.schemas import COMPLETIONS, MIXED_COMPLETIONS, PROMPTS, REJECTED, Row, read_rows, write_rows
from draftmill.stages.asking import ending_ids, rejection, row_keys, sort_rows
from draftmill.stages.reuse import Forerunners
from draftmill.stages.rows import Asked, Ledger, RowRules
from draftmill.store.journal import Journal

__all__ = ["Answering", "Attempts", "Outputs", "RowRules", "generate_shard", "open_engine", "write_shard"]


class Attempts:
    """The rows of one shard as an engine in this process answers them."""

    def __init__(self, config: GenerateConfig, rules: RowRules, ledger: Ledger, heartbeat: Heartbeat) -> None:
        self._config, self._rules, self._ledger, self._heartbeat = config, rules, ledger, heartbeat
        self._rejected = 0

    def run(self, engine: Engine, asked: Sequence[Asked]) -> None:
        """Answer all rows, trying a failed one again up to the cap; everything is flushed at the end."""
        ledger, left = self._ledger, list(asked)
        for attempt in range(self._config.attempts):
            requests = {a.key: a.request(self._config.seed, attempt) for a in left}
            done = {key for key in requests if key in ledger.answers or (key, attempt) in ledger.failures}
            for result in engine.run(list(requests.values()), done):
                self._note(self._rules.check(requests[result.key], result), attempt)
            # A row answered at this attempt in a run before the kill still belongs to this attempt's batch.
            left = [a for a in left if (a.key, attempt) in ledger.failures]
        ledger.flush()

    def _note(self, result: Result | Failure, attempt: int) -> None:
        ledger = self._ledger
        ledger.note(result, attempt)
        good, tokens = (1, len(result.output_ids)) if isinstance(result, Result) else (0, 0)
        refused = int(not good and ledger.next_attempt(result.key) is None)
        self._rejected += refused
        facts = {"useful": len(ledger.answers), "rejected": self._rejected, "failures": len(ledger.failures)}
        self._heartbeat.advance(good + refused, tokens, facts)
        if self._ledger.due():
            self._ledger.flush()


@dataclass(frozen=True, slots=True)
class Answering:
    """Everything that answers prompts in this process: engine, tokenizer, row rules, and the longest row in tokens."""

    engine: Engine
    tokenizer: Any
    rules: RowRules
    context: int


def open_engine(config: Config) -> Answering:
    """Load what the configuration names, to answer in this process. Raises UserError if the target cannot be had."""
    from draftmill.engines.transformers import TransformersEngine
    from draftmill.target.files import context_length
    from draftmill.target.model import load_model
    from draftmill.target.tokenizer import load_tokenizer

    tokenizer, model = load_tokenizer(config.target), load_model(config)
    stop = ending_ids(config, tokenizer, model.generation_config)
    rules = RowRules(config.generate, frozenset(stop), int(model.get_input_embeddings().weight.shape[0]))
    engine = TransformersEngine(model, stop, config.generate)
    return Answering(engine, tokenizer, rules, context_length(config.target))


@dataclass(frozen=True, slots=True)
class Outputs:
    """The files that a shard becomes."""

    completions: Path
    rejected: Path


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
    forerunners: Forerunners | None = None,
) -> None:
    """Answer the shard at `prompts` and publish `completions` and `rejected`.

    `heartbeat` makes the progress of a given number of rows; rows that `forerunners` have are taken over (reuse.py).
    Raises RuntimeError if rows are not conserved.
    """
    rows = read_rows(prompts, PROMPTS)
    found = sort_rows(rows, config, answering)
    asked, ledger = found[1], Ledger(config.generate, journal)
    with heartbeat(len(asked)) as beat:
        ledger.load()
        if forerunners is not None:
            forerunners.hand_over(asked, ledger, answering.rules)
        beat.resume(len(ledger.answers))
        Attempts(config.generate, answering.rules, ledger, beat).run(answering.engine, asked)
        write_shard(config, answering.tokenizer, rows, found, ledger, Outputs(completions, rejected), provenance)
        journal.clear()


def write_shard(
    config: Config,
    tokenizer: Any,
    rows: Sequence[Row],
    found: tuple[dict[Key, Row], list[Asked], dict[Key, Row]],
    ledger: Ledger,
    outputs: Outputs,
    provenance: Mapping[str, Any],
) -> None:
    """Publish a shard's prompts `rows`, `found` by sort_rows(), with what the ledger has for those that were asked.

    Raises RuntimeError if rows are not conserved.
    """
    good, asked, bad = found
    mixed = bool(config.generate.mix)
    for item in asked:
        if item.key in ledger.answers:
            good[item.key] = _completion(item, ledger.answers[item.key], tokenizer, mixed)
        else:
            bad[item.key] = rejection(item.key, item.source, ledger.rejection(item.key))
    order = [key for row in rows for key in row_keys(row, config.generate.samples)]
    if len(good) + len(bad) != len(order) or any((key in good) == (key in bad) for key in order):
        raise RuntimeError(
            f"{outputs.completions}: of {len(order)} rows {len(good)} were completed and {len(bad)} rejected"
        )
    write_rows(outputs.rejected, REJECTED, [bad[key] for key in order if key in bad], provenance)
    schema = MIXED_COMPLETIONS if mixed else COMPLETIONS
    write_rows(outputs.completions, schema, [good[key] for key in order if key in good], provenance)


def _completion(asked: Asked, result: Result, tokenizer: Any, mixed: bool) -> Row:
    row = {
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
    return {**row, "setting": asked.setting.name} if mixed else row
