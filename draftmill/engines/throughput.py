"""Output tokens a second of one server at a load, and what a whole set of rows will take, each with an interval.

Rows are sent once each, so many in flight at a time. A row's tokens are spread evenly over the time from its sending to
its answer, and only the time is counted in which the server was full: from when the last place was taken to when the
last row was sent. So neither the ramp nor the tail (which a build overlaps with the next shard) is in the rate.

Intervals are bootstrap percentiles (Efron 1979): of the rate over blocks of time, of the tokens a row over rows.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftmill.engines import sglang_api
from draftmill.engines.base import Failure, Request
from draftmill.engines.sglang_wire import Wire
from draftmill.errors import UserError

BLOCKS, RESAMPLES, LOW, HIGH = 20, 2000, 0.025, 0.975


@dataclass(frozen=True, slots=True)
class Row:
    """One answered or failed row: sent and done in seconds, its output tokens (0 for a failure), and why it failed."""

    sent: float
    done: float
    tokens: int
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95 % interval: the 2.5th and the 97.5th bootstrap percentile."""

    value: float
    low: float
    high: float

    def over(self, other: Interval) -> Interval:
        """The quotient of two independent estimates, bounds taken at their worst."""
        return Interval(self.value / other.value, self.low / other.high, self.high / other.low)

    def times(self, factor: float) -> Interval:
        """The estimate multiplied by a constant."""
        return Interval(self.value * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True, slots=True)
class Measured:
    """What one load gave: rows in flight, rows, failures, tokens a second while full, tokens a row, seconds in all."""

    in_flight: int
    rows: int
    failures: int
    rate: Interval
    tokens_a_row: Interval
    seconds: float


async def drive(
    url: str, requests: Sequence[Request], stop_ids: Sequence[int], in_flight: int, row_s: float
) -> list[Row]:
    """Send every request once, at most `in_flight` at a time, and time each answer."""
    wire, left, rows = Wire(url), iter(requests), list[Row]()

    async def work() -> None:
        for request in left:
            began = time.monotonic()
            body = sglang_api.body(request, stop_ids, secrets.token_hex(16))
            found = await wire.generate(request.key, body, row_s)
            failed = found.reason if isinstance(found, Failure) else ""
            tokens = 0 if isinstance(found, Failure) else len(found.output_ids)
            rows.append(Row(began, time.monotonic(), tokens, failed))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(in_flight, len(requests))):
                group.create_task(work())
    finally:
        await wire.close()
    return rows


def window(rows: Sequence[Row], in_flight: int) -> tuple[float, float]:
    """The time in which the server was full: from the filling row's sending to the last row's."""
    sent = sorted(row.sent for row in rows)
    return sent[min(in_flight, len(sent)) - 1], sent[-1]


def produced(rows: Sequence[Row], begin: float, end: float) -> float:
    """Tokens that fell into a span of time."""
    found = 0.0
    for row in rows:
        inside = min(row.done, end) - max(row.sent, begin)
        if inside > 0:
            found += row.tokens * inside / (row.done - row.sent)
    return found


def judge(rows: Sequence[Row], in_flight: int, seed: int = 0) -> Measured:
    """What the rows of one load say. Raises UserError if the server was never full or nothing was answered."""
    good = [row for row in rows if not row.failure]
    begin, end = window(rows, in_flight)
    if not good or end <= begin:
        raise UserError(
            f"{len(rows)} prompts are too few to measure {in_flight} in flight ({len(rows) - len(good)} failed): give more "
            "--prompts."
        )
    rng = random.Random(seed)
    step = (end - begin) / BLOCKS
    rates = [produced(good, begin + k * step, begin + (k + 1) * step) / step for k in range(BLOCKS)]
    return Measured(
        in_flight=in_flight,
        rows=len(rows),
        failures=len(rows) - len(good),
        rate=bootstrap(rates, rng),
        tokens_a_row=bootstrap([float(row.tokens) for row in good], rng),
        seconds=max(row.done for row in rows) - min(row.sent for row in rows),
    )


def bootstrap(values: Sequence[float], rng: random.Random) -> Interval:
    """The mean of values with its percentile interval."""
    means = sorted(sum(rng.choices(values, k=len(values))) / len(values) for _ in range(RESAMPLES))
    mean = sum(values) / len(values)
    return Interval(mean, means[int(LOW * RESAMPLES)], means[int(HIGH * RESAMPLES) - 1])


def best(measured: Sequence[Measured], within: float = 0.97) -> Measured:
    """The smallest load that reaches `within` of the best rate: more in flight only makes rows wait longer."""
    top = max(one.rate.value for one in measured)
    return min((one for one in measured if one.rate.value >= within * top), key=lambda one: one.in_flight)


def measure(
    url: str,
    requests: Sequence[Request],
    stop_ids: Sequence[int],
    loads: Sequence[int],
    row_s: float,
    say: Callable[[str], None],
) -> list[Measured]:
    """Measure each load in turn on the server at `url`, with a few rows before that nobody counts."""
    asyncio.run(drive(url, requests[: min(32, len(requests))], stop_ids, 32, row_s))
    found = []
    for load in sorted(loads):
        one = judge(asyncio.run(drive(url, requests, stop_ids, load, row_s)), load)
        say(
            f"{load:5d} in flight: {one.rate.value:8.0f} tokens/s [{one.rate.low:.0f}, {one.rate.high:.0f}] a server, "
            f"{one.tokens_a_row.value:.0f} tokens a row, {one.failures} of {one.rows} rows failed, {one.seconds:.0f} s"
        )
        found.append(one)
    return found
