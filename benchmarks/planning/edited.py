"""One prompt of 914,000 edited: what `snakemake -n` and `draftmill plan` then name, and how long they take.

    python -m benchmarks.planning.edited [--prompts 914000] [--shard-rows 456] [--folder DIR]

A whole made build stands in the store, so that nothing is to do before the edit. An edit may by chance move a boundary
between shards; the first that moves none is planned. Ends with 1 if the plan is not one job of each stage of a shard.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import index as prompt_set
from benchmarks.planning import measure, project

_SHARD_STAGES = ("generate", "audit", "extract")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=914_000)
    parser.add_argument("--shard-rows", type=int, default=456)
    parser.add_argument("--folder", type=Path, help="where the prompts are made and kept for the next time")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="draftmill-edited-") as temporary:
        folder = given.folder or Path(temporary)
        sources = folder / "sources"
        prompt_set.make(sources, given.prompts)
        sys.exit(_run(Path(tempfile.mkdtemp(prefix="project-", dir=temporary)), sources, given.shard_rows))


def _run(folder: Path, sources: Path, shard_rows: int) -> int:
    begun = time.perf_counter()
    prompts = {"sources": [{"path": f"{sources}/part-*.jsonl"}], "shard_rows": shard_rows}
    graph = project.publish(folder, prompts)
    project.fill(folder / "build", project.objects(graph))
    print(f"{len(graph.shards):,} shards; index and prompt shards {time.perf_counter() - begun:.0f} s", flush=True)
    _say("whole build", measure.plan(folder, real=True))
    path = sources / "part-1.jsonl"
    place, old = prompt_set.edit(path)
    try:
        _say("one edit", found := measure.plan(folder, real=True))
        told = _told(folder)
    finally:
        prompt_set.write_byte(path, place, old)
    exact = all(found.rules.get(stage) == told.get(stage) == 1 for stage in _SHARD_STAGES)
    print("met: one job of each stage of a shard" if exact else "NOT MET: more than one job of a stage of a shard")
    return 0 if exact else 1


def _say(what: str, plan: measure.Plan) -> None:
    jobs = ", ".join(f"{rule} {count}" for rule, count in plan.rules.items()) or "nothing to do"
    print(
        f"snakemake -n, {what}: {plan.wall_s:.1f} s ({plan.cpu_s:.1f} of the processor); {jobs}; {_load()}", flush=True
    )


def _told(folder: Path) -> Mapping[str, int]:
    """Jobs by stage that `draftmill plan` names."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "draftmill", "plan", "--configfile", "config.yaml", "--json"]
    output = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    stages: list[dict[str, Any]] = json.loads(output)["stages"]
    jobs = {stage["stage"]: int(stage["planned"]) for stage in stages}
    planned = ", ".join(f"{name} {count}" for name, count in jobs.items() if count)
    print(f"draftmill plan, one edit: {time.perf_counter() - begun:.1f} s; {planned}; {_load()}", flush=True)
    return jobs


def _load() -> str:
    return f"load {os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    main()
