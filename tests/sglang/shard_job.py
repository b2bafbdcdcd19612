"""A generate job without Snakemake: `python -m tests.sglang.shard_job CONFIG SHARD AHEAD...` in the store's folder."""

import json
import os
import sys
from pathlib import Path

from draftmill import layout
from draftmill.config import parse
from draftmill.engines.sglang_api import FixedServer
from draftmill.job import RUN_VARIABLE, follow_builder
from draftmill.progress import Heartbeat
from draftmill.stages.lane_link import LaneLink, LaneOrder, lane_place
from draftmill.stages.serving import wait_for_shard
from draftmill.store.journal import Journal
from draftmill.store.open import open_store

GENERATE = "f" * 12


def main() -> None:
    follow_builder()
    config = parse(json.loads(Path(sys.argv[1]).read_text()))
    shard, *ahead = sys.argv[2:]
    name = f"{shard}-{GENERATE}"
    store = open_store(config.store)
    place = lane_place(config, GENERATE, os.environ[RUN_VARIABLE], Path("lane.log"))
    servers = [FixedServer(url).reference() for url in config.generate.sglang.urls]
    outputs = {
        "completions": str(store.path(layout.completions(shard, GENERATE)).absolute()),
        "rejected": str(store.path(layout.rejected(shard, GENERATE)).absolute()),
        "provenance": {},
    }
    link = LaneLink(LaneOrder(config, GENERATE, shard, ahead, outputs), place)
    journal = Journal(store, layout.journal("generate", name))
    with Heartbeat(store, layout.progress("generate", name), stage="generate", name=name, total=0) as beat:
        wait_for_shard(link, servers, journal, beat)


if __name__ == "__main__":
    main()
