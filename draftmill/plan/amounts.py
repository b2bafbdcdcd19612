"""What the planned jobs of each stage take: rows, tokens, GPU-hours and bytes, as the rates say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from draftmill.graph import Graph
from draftmill.plan.jobs import Job
from draftmill.plan.rates import Rates
from draftmill.plan.types import Estimate, Need, Rate, States
from draftmill.preflight import most_rows

_HOUR_S = 3600.0
_BFLOAT16 = 2


def needs_of(graph: Graph, jobs: Sequence[Job], rates: Rates, taken_over: int) -> Mapping[str, Need]:
    """What each stage's planned jobs take. `taken_over` are rows that need not be generated."""
    rows = {shard.name: shard.rows * graph.config.generate.samples for shard in graph.index.shards}

    def rows_of(stage: str) -> int:
        return sum(rows[name] for planned, name in jobs if planned == stage)

    windows = [int(name) for stage, name in jobs if stage == "train"]
    found = {
        "generate": _generate(graph, rows_of("generate"), taken_over, rates),
        "audit": Need(rows=rows_of("audit")),
        "extract": _extract(graph, rows_of("extract"), rates),
        "train": _train(graph, sum(rows[shard] for window in windows for shard in graph.windows[window]), rates),
    }
    if any(stage == "evaluate" for stage, _ in jobs):
        found["evaluate"] = _evaluate(graph, rates)
    return found


def bytes_a_token(graph: Graph) -> int:
    """Bytes of one token's hidden states."""
    shape = graph.specs.spec["train"]["drafter"]
    return len(shape["taps"]) * int(shape["hidden_size"]) * _BFLOAT16


def states_of(graph: Graph, need: Need, rates: Rates, again: Sequence[str]) -> States:
    """The hidden states to come. `need` is that of extraction, `again` the shards that were extracted before."""
    samples = graph.config.generate.samples
    most = min(most_rows(graph.config, graph.index) * samples, need.rows)
    rows = sum(shard.rows for shard in graph.index.shards if shard.name in set(again)) * samples
    second = _extract(graph, rows, rates)
    return States(
        need.bytes,
        rates.row_tokens.estimate.times(most * bytes_a_token(graph)),
        graph.config.hidden.budget_gib * 2**30,
        len(again),
        second.bytes,
        second.gpu_hours,
    )


def _hours(tokens: Estimate, seconds: Rate, gpus: int) -> Estimate:
    return tokens.product(seconds.estimate).times(gpus / _HOUR_S)


def _generate(graph: Graph, rows: int, taken_over: int, rates: Rates) -> Need:
    tokens = rates.answer_tokens.estimate.times(rows - taken_over)
    seconds = rates.seconds["generate"]
    return Need(
        rows,
        taken_over,
        tokens,
        _hours(tokens, seconds, graph.gpus("generate")),
        rates.completion_bytes.estimate.times(rows),
        {"answer": rates.answer_tokens, "speed": seconds, "bytes": rates.completion_bytes},
    )


def _extract(graph: Graph, rows: int, rates: Rates) -> Need:
    tokens, seconds = rates.row_tokens.estimate.times(rows), rates.seconds["extract"]
    return Need(
        rows,
        0,
        tokens,
        _hours(tokens, seconds, graph.gpus("extract")),
        tokens.times(bytes_a_token(graph)),
        {"row": rates.row_tokens, "speed": seconds},
    )


def _train(graph: Graph, rows: int, rates: Rates) -> Need:
    config, seconds = graph.config.train, rates.seconds["train"]
    passes = rows * config.epochs
    kept = rates.row_tokens.estimate.at_most(config.max_length)
    hours = seconds.estimate.times(passes * graph.gpus("train") / _HOUR_S)
    return Need(rows, 0, kept.times(passes), hours, rates={"row": rates.row_tokens, "speed": seconds})


def _evaluate(graph: Graph, rates: Rates) -> Need:
    config, seconds = graph.config.evaluate, rates.seconds["evaluate"]
    rows = min(config.max_prompts, sum(shard.rows for shard in graph.index.held_out))
    tokens = rates.answer_tokens.estimate.at_most(config.max_new_tokens).times(rows)
    hours = _hours(tokens, seconds, graph.gpus("evaluate"))
    return Need(rows, 0, tokens, hours, rates={"answer": rates.answer_tokens, "speed": seconds})
