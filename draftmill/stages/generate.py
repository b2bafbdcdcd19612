"""The generate stage: the prompts of one shard become completions and typed rejections.

Every finished row goes to the journal by its key; a killed job takes them from there and does only the rest. Rows that
fail a check are tried again with another seed up to the cap, then rejected: prompts in = completions + rejected, or
nothing is published. An engine in this process answers row by row; SGLang servers are asked by a process of their own
(lane.py), and this one waits until the journal is full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill.config import Config, GenerateConfig
from draftmill.engines.base import Engine, Failure, Result
from draftmill.progress import Heartbeat
from draftmill.schemas import COMPLETIONS, MIXED_COMPLETIONS, PROMPTS, REJECTED, Row, read_rows, write_rows
from draftmill.stages.asking import ending_ids, read_target, rejection, row_keys, sort_rows
from draftmill.stages.lane_link import LaneLink
from draftmill.stages.reuse import Forerunners
from draftmill.stages.rows import Asked, Ledger, RowRules
from draftmill.store.journal import Journal

__all__ = ["Answering", "Attempts", "RowRules", "generate_shard", "open_engine", "open_lane"]


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
    """Everything that answers prompts: engine, tokenizer, row rules, and the longest row in tokens.

    The engine is one in this process, or the link to the process that asks SGLang servers.
    """

    engine: Engine | LaneLink
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


def open_lane(config: Config, link: LaneLink) -> Answering:
    """What answers through servers; nothing but the tokenizer is loaded here. Raises UserError like open_engine()."""
    found = read_target(config)
    return Answering(link, found.tokenizer, found.rules, found.context)


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
    good, asked, bad = sort_rows(rows, config, answering)
    with heartbeat(len(asked)) as beat:
        ledger = _answer(config, answering, asked, journal, beat, forerunners)
    mixed = bool(config.generate.mix)
    for item in asked:
        if item.key in ledger.answers:
            good[item.key] = _completion(item, ledger.answers[item.key], answering.tokenizer, mixed)
        else:
            bad[item.key] = rejection(item.key, item.source, ledger.rejection(item.key))
    order = [key for row in rows for key in row_keys(row, config.generate.samples)]
    if len(good) + len(bad) != len(order) or any((key in good) == (key in bad) for key in order):
        raise RuntimeError(f"{prompts}: of {len(order)} rows {len(good)} were completed and {len(bad)} rejected")
    write_rows(rejected, REJECTED, [bad[key] for key in order if key in bad], provenance)
    schema = MIXED_COMPLETIONS if mixed else COMPLETIONS
    write_rows(completions, schema, [good[key] for key in order if key in good], provenance)
    journal.clear()


def _answer(
    config: Config,
    answering: Answering,
    asked: Sequence[Asked],
    journal: Journal,
    beat: Heartbeat,
    forerunners: Forerunners | None,
) -> Ledger:
    """The shard's rows, answered or refused for good, by whatever answers."""
    ledger = Ledger(config.generate, journal)
    if isinstance(answering.engine, LaneLink):
        answering.engine.wait(beat)
        ledger.load()
        return ledger
    ledger.load()
    if forerunners is not None:
        forerunners.hand_over(asked, ledger, answering.rules)
    beat.resume(len(ledger.answers))
    Attempts(config.generate, answering.rules, ledger, beat).run(answering.engine, asked)
    return ledger


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
