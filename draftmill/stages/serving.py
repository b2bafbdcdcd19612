"""The generate job where SGLang servers answer: which servers it brings, and its link to the lane."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftmill.engines.server import leave, open_server
from draftmill.engines.server_checks import check_urls
from draftmill.engines.server_command import wanted
from draftmill.engines.sglang_api import FixedServer
from draftmill.job import RUN_VARIABLE, Job
from draftmill.stages.generate import Answering, open_lane
from draftmill.stages.lane_link import LaneLink, LaneOrder, lane_place

LANE_LOG = Path("logs/generate/lane.log")


@contextmanager
def answering(job: Job) -> Iterator[Answering]:
    """What answers the job's shard, as long as its servers are held.

    Raises UserError when a server cannot be had, or is not what the configuration says.
    """
    with _servers(job) as servers:
        yield open_lane(job.config, _link(job, servers))


@contextmanager
def _servers(job: Job) -> Iterator[Sequence[Mapping[str, Any]]]:
    urls = job.config.generate.sglang.urls
    if urls:
        check_urls(job.config)
        yield [FixedServer(url).reference() for url in urls]
        return
    identity = str(job.provenance["spec"]["target"]["model"])
    with job.gpus(wanted(job.config, identity).spec) as lease:
        handle = open_server(job.config, lease, identity)
        try:
            yield [handle.reference()]
        finally:
            # Where a cluster runs the job, all that it started ends with it, and the next job may be on another host.
            if job.config.gate.sentinel == "in_job":
                leave(job.config.gate, handle.token)


def _link(job: Job, servers: Sequence[Mapping[str, Any]]) -> LaneLink:
    shard, _, fingerprint = job.name.partition("-")
    place = lane_place(job.config, fingerprint, os.environ.get(RUN_VARIABLE, ""), LANE_LOG)
    return LaneLink(LaneOrder(job.config, fingerprint, shard, list(job.param("ahead")), servers), place)
