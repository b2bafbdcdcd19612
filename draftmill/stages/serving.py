"""The generate job where SGLang servers answer: it holds the servers and waits; the lane asks and writes.

A job of a fast server takes seconds, so whatever it does by itself is time in which no shard is published. It imports no
tokenizer and reads no row: it takes its lease, hands its shard over, and checks what came. Its log says where its time went.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from draftmill import layout
from draftmill.catalog import parts
from draftmill.engines.server import leave, open_server
from draftmill.engines.server_checks import check_urls
from draftmill.engines.server_command import wanted
from draftmill.engines.sglang_api import FixedServer
from draftmill.gpu import processes
from draftmill.job import RUN_VARIABLE, Job
from draftmill.progress import Heartbeat, rows_left
from draftmill.stages.lane_link import LaneLink, LaneOrder, lane_place
from draftmill.store.journal import Journal
from draftmill.store.workplace import without_waiting

LANE_LOG = Path("logs/generate/lane.log")


def generate_on_servers(job: Job) -> None:
    """Have the job's shard answered and written.

    Raises UserError when a server cannot be had, is not what the configuration says, or is lost.
    """
    laps = Laps()
    link = _link(job)
    link.begin()
    with _servers(job) as (servers, beat):
        laps.lap("lease and server")
        wait_for_shard(link, servers, job.journal(), beat)
        laps.lap("rows and writing")
    print(f"seconds: {laps}", flush=True)


def wait_for_shard(link: LaneLink, servers: Sequence[Mapping[str, Any]], journal: Journal, beat: Heartbeat) -> None:
    """Wait until the lane has written the shard, and forget its journal then."""
    link.wait(servers, beat)
    journal.clear()


class Laps:
    """Where a job's time goes, from the start of its process."""

    def __init__(self) -> None:
        self._at, self._laps = time.monotonic(), list[str]()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - processes.myself().start / os.sysconf("SC_CLK_TCK")
        self._laps.append(f"start {age:.1f}")

    def lap(self, name: str) -> None:
        """End a part of the work."""
        now = time.monotonic()
        self._laps.append(f"{name} {now - self._at:.1f}")
        self._at = now

    def __str__(self) -> str:
        """All parts with their seconds."""
        return ", ".join(self._laps)


@contextmanager
def _servers(job: Job) -> Iterator[tuple[Sequence[Mapping[str, Any]], Heartbeat]]:
    """The servers that the job may use, and its heartbeat."""
    sglang = job.config.generate.sglang
    if sglang.urls:
        found = check_urls(job.config, sglang.urls, patience_s=sglang.patience_seconds)
        with _heartbeat(job) as beat:
            yield [FixedServer(url).reference() for url in found], beat
        return
    identity = str(job.provenance["spec"]["target"]["model"])
    with job.gpus(wanted(job.config, identity).spec) as lease, _heartbeat(job) as beat:
        # A server may load for many minutes, in which only its start_seconds tell that it hangs.
        with beat.waiting():
            handle = open_server(job.config, lease, identity)
        try:
            yield [handle.reference()], beat
        finally:
            # Where a cluster runs the job, all that it started ends with it, and the next job may be on another host.
            if job.config.gate.sentinel == "in_job":
                leave(job.config.gate, handle.token)


def _heartbeat(job: Job) -> Heartbeat:
    """The job's heartbeat, which tells of the rows of an earlier try until the lane has counted them."""
    beat = job.heartbeat(0)
    with suppress(Exception):  # there is none, or the store is away: the work is worth more
        beat.recall(rows_left(without_waiting(job.store).get(layout.progress(job.stage, job.name))))
    return beat


def _link(job: Job) -> LaneLink:
    shard, fingerprint = parts(job.stage, job.name)
    place = lane_place(job.config, fingerprint, os.environ.get(RUN_VARIABLE, ""), LANE_LOG)
    outputs = {
        "completions": str(job.output("completions").absolute()),
        "rejected": str(job.output("rejected").absolute()),
        "provenance": job.provenance,
    }
    # A cluster may run the next jobs on other hosts, whose lanes would ask the same rows.
    ahead = [] if job.config.gate.sentinel == "in_job" else list(job.param("ahead"))
    return LaneLink(LaneOrder(job.config, fingerprint, shard, ahead, outputs), place)
