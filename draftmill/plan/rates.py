"""The numbers a plan multiplies by: tokens a row, and GPU-seconds a token or row, each with its source.

Several finished jobs of the same settings come first, then the pilot, then finished jobs of other settings, then the
guesses of the configuration. Two jobs or more give an interval: that of a ratio of sums, by Student's t over the jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from draftmill.config import Config
from draftmill.graph import Graph
from draftmill.plan.types import Estimate, Rate

Pairs = Sequence[tuple[float, float]]

# 97.5% quantiles of Student's t for 1 to 10 degrees of freedom; above, 1.96 + 2.6 / freedom is within 0.5%.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
# English text has about four bytes a token in large vocabularies.
_BYTES_A_TOKEN = 4
# Parquet of ids and text, compressed, takes about so many bytes a token.
_COMPLETION_BYTES = 8


@dataclass(frozen=True, slots=True)
class Done:
    """What a finished job did in its last run: rows (steps in training), tokens, seconds times the GPUs it held."""

    stage: str
    fingerprint: str
    rows: int
    tokens: int
    gpu_seconds: float


@dataclass(frozen=True, slots=True)
class Pilot:
    """The pilot's record of the present settings, by row: tokens, those of the answer alone, bytes of completions."""

    tokens: float
    output_tokens: float
    completions_bytes: float


@dataclass(frozen=True, slots=True)
class Size:
    """The bytes and rows of completions in the store."""

    fingerprint: str
    bytes: int
    rows: int


@dataclass(frozen=True, slots=True)
class Measured:
    """All that was read for the sake of rates."""

    done: tuple[Done, ...] = ()
    pilot: Pilot | None = None
    completions: tuple[Size, ...] = ()


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of one plan.

    `seconds` are GPU-seconds by stage: of a generated, extracted or evaluated token, and of one row trained on once.
    """

    answer_tokens: Rate
    row_tokens: Rate
    completion_bytes: Rate
    seconds: Mapping[str, Rate]


def ratio(pairs: Pairs) -> Estimate | None:
    """Sum of the firsts over sum of the seconds; the interval needs two pairs, and without any there is no ratio."""
    pairs = [(a, b) for a, b in pairs if b > 0]
    count, below = len(pairs), sum(b for _, b in pairs)
    if not count:
        return None
    value = sum(a for a, _ in pairs) / below
    if count < 2:
        return Estimate(value)
    spread = sum((a - value * b) ** 2 for a, b in pairs) * count / (count - 1)
    quantile = _T[count - 2] if count - 2 < len(_T) else 1.96 + 2.6 / (count - 1)
    error = quantile * spread**0.5 / below
    return Estimate(value, max(value - error, 0.0), value + error)


def rates_of(graph: Graph, measured: Measured) -> Rates:
    """The rates for one configuration."""
    config, pilot, choose = graph.config, measured.pilot, _Chooser(graph, measured)
    answer = choose(
        "generate",
        "tokens a row",
        lambda one: (one.tokens, one.rows),
        pilot.output_tokens if pilot else None,
        config.plan.answer_tokens or config.generate.longest_answer / 2,
    )
    row = choose(
        "extract",
        "tokens a row",
        lambda one: (one.tokens, one.rows),
        pilot.tokens if pilot else None,
        answer.estimate.value + _prompt_tokens(graph),
    )
    size = choose.best(
        "bytes a row",
        [(one.bytes, one.rows) for one in measured.completions if one.fingerprint == graph.specs.fp["generate"]],
        [(one.bytes, one.rows) for one in measured.completions],
        pilot.completions_bytes if pilot else None,
        row.estimate.value * _COMPLETION_BYTES,
    )
    return Rates(answer, row, size, _seconds(config, choose))


def _prompt_tokens(graph: Graph) -> float:
    shards = graph.index.shards
    return sum(shard.bytes for shard in shards) / max(sum(shard.rows for shard in shards), 1) / _BYTES_A_TOKEN


def _seconds(config: Config, choose: _Chooser) -> dict[str, Rate]:
    guesses, batch = config.plan, config.train.batch_rows
    a_token: Callable[[Done], tuple[float, float]] = lambda one: (one.gpu_seconds, one.tokens)  # noqa: E731
    return {
        "generate": choose("generate", "GPU-seconds a token", a_token, None, 1 / guesses.generate_tokens_per_second),
        "extract": choose("extract", "GPU-seconds a token", a_token, None, 1 / guesses.extract_tokens_per_second),
        "evaluate": choose("evaluate", "GPU-seconds a token", a_token, None, 1 / guesses.evaluate_tokens_per_second),
        "train": choose(
            "train",
            "GPU-seconds a row",
            lambda one: (one.gpu_seconds, one.rows * batch),
            None,
            1 / guesses.train_rows_per_second,
        ),
    }


@dataclass(frozen=True)
class _Chooser:
    """Takes the best source that there is for one rate."""

    graph: Graph
    measured: Measured

    def __call__(
        self,
        stage: str,
        unit: str,
        pair: Callable[[Done], tuple[float, float]],
        pilot: float | None,
        default: float,
    ) -> Rate:
        done = [one for one in self.measured.done if one.stage == stage]
        same = [one for one in done if one.fingerprint == self.graph.specs.fp[stage]]
        return self.best(unit, [pair(one) for one in same], [pair(one) for one in done], pilot, default)

    @staticmethod
    def best(unit: str, same: Pairs, done: Pairs, pilot: float | None, default: float) -> Rate:
        """The rate of the best source: `same` are jobs of the present settings, `done` all jobs."""
        measured = ratio(same)
        if measured is not None and (len(same) > 1 or not pilot):
            return Rate(measured, unit, "history", len(same))
        if pilot:
            return Rate(Estimate(pilot), unit, "pilot", 1)
        older = ratio(done)
        return Rate(older, unit, "older history", len(done)) if older else Rate(Estimate(default), unit, "default")
