"""`draftmill bench generate`: a sample of the build's own prompts on its own server, and what the whole set will take."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftmill import layout
from draftmill.config import Config
from draftmill.engines import server, throughput
from draftmill.engines.base import Request
from draftmill.engines.open_files import check_files, files_needed, raise_file_limit
from draftmill.engines.server_checks import check_urls
from draftmill.engines.server_command import wanted
from draftmill.engines.throughput import Interval, Measured
from draftmill.errors import UserError
from draftmill.gpu import gate
from draftmill.prompts.index import Index
from draftmill.schemas import PROMPTS, read_rows
from draftmill.stages.asking import read_target, sort_rows
from draftmill.store.base import Store

_SEED, _HOUR_S, _DAY_H = 20, 3600.0, 24.0


@dataclass(frozen=True, slots=True)
class Sample:
    """Rows to measure with, the ids that end an answer, and about how many rows of the whole set are to be asked."""

    requests: tuple[Request, ...]
    stop_ids: tuple[int, ...]
    rows: int


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the whole set takes at the recommended load: tokens, GPU-hours, days on `gpus` GPUs."""

    in_flight: int
    tokens: Interval
    gpu_hours: Interval
    days: Interval
    gpus: int


def draw(config: Config, index: Index, store: Store, count: int, folder: Path) -> Sample:
    """`count` rows of the set, drawn from shards at random with a fixed seed; shards are read into `folder`."""
    rng, target = random.Random(_SEED), read_target(config)
    shards, requests, seen, answerable = list(index.shards), list[Request](), 0, 0
    rng.shuffle(shards)
    for shard in shards:
        path = folder / f"{shard.name}.parquet"
        store.fetch(layout.prompts(shard.name), path)
        _, asked, _ = sort_rows(read_rows(path, PROMPTS), config, target)
        seen, answerable = seen + shard.rows, answerable + len(asked)
        rng.shuffle(asked)
        # A few of each shard, so that one source's habits do not stand for all.
        share = max(1, -(-count // min(len(shards), 16)))
        requests += [one.request(config.generate.seed, 0) for one in asked[:share]]
        if len(requests) >= count:
            break
    if not requests:
        raise UserError("prompts.sources: no prompt is left to be answered, so there is nothing to measure.")
    # Prompts that bring their answer, or are refused, are never asked: of all as many as of those that were read.
    rows = round(sum(shard.rows for shard in index.shards) * answerable / seen)
    return Sample(tuple(requests[:count]), tuple(sorted(target.rules.stop_ids)), rows)


@contextmanager
def a_server(config: Config, identity: str, url: str | None, keep: bool, say: Callable[[str], None]) -> Iterator[str]:
    """The address of a server to measure: `url`, the first of the configured ones that answers, or one of our own.

    One of our own that was started here ends with the block unless `keep`; then it ends when idle, or serves a build.
    """
    if url or config.generate.sglang.urls:
        yield check_urls(config, [url] if url else config.generate.sglang.urls, patience_s=0, say=say)[0]
        return
    need = wanted(config, identity)
    how: dict[str, Any] = {"gpus": need.gpus, "run_id": None, "stage": "bench", "shard": None, "server_spec": need.spec}
    with gate.lease(config.gate, config.gate_device("generate"), notify=say, **how) as lease:
        found = lease.server is not None
        handle = server.open_server(config, lease, identity, say)
        try:
            yield handle.url
        finally:
            if not keep and not found:
                server.leave(config.gate, handle.token)


def outlook(measured: Measured, rows: int, config: Config, gpus: int) -> Outlook:
    """The price of the whole set: tokens a row over tokens a second, on all GPUs at once for the days."""
    each = config.generate.sglang.server.gpus
    hours = measured.tokens_a_row.over(measured.rate).times(rows * each / _HOUR_S)
    return Outlook(
        in_flight=measured.in_flight,
        tokens=measured.tokens_a_row.times(rows),
        gpu_hours=hours,
        days=hours.times(1 / max(gpus, 1) / _DAY_H),
        gpus=gpus,
    )


def loads_of(config: Config) -> list[int]:
    """The loads that are tried unless others are named: the configured one, its half and its quarter."""
    most = config.generate.sglang.in_flight
    return sorted({max(1, most // 4), max(1, most // 2), most})


def sentences(found: Sequence[Measured], chosen: Outlook, configured: int, rows: int) -> list[str]:
    """The outcome in words."""
    t, h, d = chosen.tokens, chosen.gpu_hours, chosen.days
    lines = [
        f"The whole set, {rows} rows: {t.value:.3g} output tokens [{t.low:.3g}, {t.high:.3g}].",
        f"At {chosen.in_flight} in flight: {h.value:.3g} GPU-hours [{h.low:.3g}, {h.high:.3g}], "
        f"{d.value:.2g} days [{d.low:.2g}, {d.high:.2g}] on {chosen.gpus} GPUs.",
    ]
    if chosen.in_flight != configured:
        lines.append(f"Set generate.sglang.in_flight: {chosen.in_flight} (it is {configured}).")
    elif configured == max(one.in_flight for one in found):
        lines.append(
            f"The largest load was the best: try a larger generate.sglang.in_flight than {configured} (CUDA graphs follow it)."
        )
    return lines


def record(found: Sequence[Measured], chosen: Outlook, rows: int) -> str:
    """The outcome as JSON."""
    return json.dumps({"rows": rows, "measured": [asdict(m) for m in found], "outlook": asdict(chosen)}, indent=1)


def run(
    config: Config,
    index: Index,
    store: Store,
    identity: str,
    *,
    prompts: int,
    loads: Sequence[int],
    gpus: int,
    url: str | None,
    keep: bool,
    folder: Path,
    say: Callable[[str], None],
) -> tuple[list[Measured], Outlook, int]:
    """Measure and reckon; returns what each load gave, the outlook at the best, and the rows of the whole set."""
    check_files(files_needed(1, max(loads)))
    raise_file_limit()
    sample = draw(config, index, store, prompts, folder)
    sglang = config.generate.sglang
    deadline = sglang.row_seconds + sglang.token_seconds * config.generate.longest_answer
    with a_server(config, identity, url, keep, say) as address:
        found = throughput.measure(address, sample.requests, sample.stop_ids, loads, deadline, say)
    return found, outlook(throughput.best(found), sample.rows, config, gpus), sample.rows
