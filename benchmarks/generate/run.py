"""A shard build through Snakemake against the best bare client, on the same managed SGLang servers and prompts.

Usage: python benchmarks/generate/run.py OUT --model DIR --prompts FILE.json [--help]

Needs a GPU and SGLang; `--gpus` takes several, with a server each. The pilot shard is built first, and is no part of what is
measured: nothing may run beside it, and it evicts its server, which is timed. Then the servers are started again and left up,
then all other shards (four at least) are generated through the real Snakefile, and at last the bare client asks the same
servers for the same rows. Server start is in neither rate and is shown apart. Both clocks begin with the first
rows at the server; the build's ends with its last published shard, so that gaps between jobs, tails and publishing count.
A second rate of the build begins with its first job. Prints both rates and their ratio, which must be at least 0.95; exits
with 1 when it is not.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from benchmarks.generate.project import GpuProject  # noqa: E402

WANTED = 0.95
BARE = Path(__file__).with_name("bare.py")


def pilot(project: GpuProject, out: Path) -> dict[str, Any]:
    """Build the pilot shard: a start, its rows, its audit, and an extraction that asks the server to leave."""
    graph = project.graph()
    seconds = project.build([f"build/{graph.pilot()}"], out / "pilot.log")
    logs = "".join(path.read_text(errors="replace") for path in server_logs(project))
    return {
        "seconds": round(seconds, 1),
        "starts": logs.count("[keeper] epoch "),
        "left": [line for line in logs.splitlines() if line.startswith("[keeper] leaving")],
        "memory_free": logs.count("its memory is free"),
        "ready": told(project, "ready after"),
    }


def pilot_rows(project: GpuProject, out: Path) -> dict[str, Any]:
    """Generate the pilot shard alone, where its record is only pretended."""
    graph = project.graph()
    seconds = project.build([f"build/{graph.completions(graph.pilot_shard)}"], out / "pilot.log", marked=True)
    return {"seconds": round(seconds, 1)}


def warm(project: GpuProject, limit_s: float) -> list[str]:
    """Start a server on each GPU, or find it, and leave it up; returns what was said."""
    few = ("bench", "generate", "--configfile", "config.yaml", "--prompts", "64", "--in-flight", "8", "--keep")
    # At once, so that each takes a GPU of its own.
    said = project.cli(*few, timeout=limit_s, marked=True, times=project.gpus)
    project.server_urls()
    return said


def build(project: GpuProject, out: Path, samples: int, at_least: int = 4) -> dict[str, Any]:
    """Generate all shards but the pilot, which must be there, through Snakemake; the rate over them all.

    One that was broken off is begun anew. Raises RuntimeError for too few shards, or when the pilot is among them.
    """
    begun = project.folder / "measured.json"
    if begun.exists():
        forget(project, json.loads(begun.read_text()))
    graph = project.graph()
    shards = [name for name in graph.shards if graph.wanted("generate", name)]
    if graph.pilot_shard in shards:
        raise RuntimeError("the pilot shard is not generated yet, and nothing may run beside it")
    if len(shards) < at_least:
        raise RuntimeError(f"only {len(shards)} shards are left to generate: make shard_rows smaller")
    begun.write_text(json.dumps(shards))
    logs = [project.folder / f"logs/generate/{name}.log" for name in shards]
    targets = [f"build/{graph.completions(name)}" for name in shards]
    # Rows that an earlier build had begun ahead are not this one's work.
    before = project.journalled(graph, shards)
    with First(project, logs) as first:
        try:
            wall = project.build(targets, out / "build.log", marked=True)
        finally:
            keep_logs(project, out)
    begun.unlink()
    ended = max((project.folder / "build" / graph.completions(name)).stat().st_mtime for name in shards)
    published = sum(len(row["output_ids"]) for row in project.rows([graph.completions(name) for name in shards]))
    tokens = published - before
    seconds, from_job = ended - (first.row or first.job), ended - first.job
    return {
        "shards": shards,
        "rows": project.accounted(graph, shards, samples),
        "tokens": tokens,
        "tokens_begun_before": before,
        "seconds": round(seconds, 2),
        "seconds_from_first_job": round(from_job, 2),
        "wall_seconds": round(wall, 2),
        "tokens_per_second": round(tokens / seconds, 1),
        "tokens_per_second_from_first_job": round(tokens / from_job, 1),
        "starts": sum(path.read_text(errors="replace").count("[keeper] epoch ") for path in server_logs(project)),
        "ready": told(project, "ready after"),
        "job_seconds": told(project, "seconds: "),
        "lane": told(project, " in flight"),
    }


def forget(project: GpuProject, shards: Sequence[str]) -> None:
    """Remove what was generated of shards, and their jobs' logs, the first of which shows when a build has begun."""
    project.forget(shards)
    for name in shards:
        (project.folder / f"logs/generate/{name}.log").unlink(missing_ok=True)


class First:
    """Watches a build begin: `job` is when its first log was there, `row` when the server had its first rows.

    Both in seconds since 1970, 0 if not seen. The first rows are the first line of any server's log that tells of a prefill of
    several at once; a job's look at the server is of one.
    """

    def __init__(self, project: GpuProject, jobs: Sequence[Path]) -> None:
        self._jobs, self._over, self.job, self.row = jobs, threading.Event(), 0.0, 0.0
        self._read = {path: path.stat().st_size for path in server_logs(project)}
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> First:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.02) and not (self.job and self.row):
            if not self.job and any(path.exists() for path in self._jobs):
                self.job = time.time()
            if not self.row and any(self._several(path) for path in self._read):
                self.row = time.time()

    def _several(self, path: Path) -> bool:
        with path.open("rb") as log:
            log.seek(self._read[path])
            text = log.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read[path] += len(whole)
        return any(int(count) > 1 for count in re.findall(rb"#new-seq: (\d+)", whole))


def keep_logs(project: GpuProject, out: Path) -> None:
    """Keep what the lane and the jobs said, which tells where the time went."""
    for log in sorted((project.folder / "logs/generate").glob("*.log")):
        (out / f"generate-{log.name}").write_bytes(log.read_bytes())


def server_logs(project: GpuProject) -> list[Path]:
    """The logs of all servers of the build."""
    return sorted((project.folder / "logs/servers").glob("*.log"))


def told(project: GpuProject, words: str) -> list[str]:
    """Lines of the generate jobs' logs that hold these words."""
    logs = sorted((project.folder / "logs/generate").glob("*.log"))
    return [line for log in logs for line in log.read_text(errors="replace").splitlines() if words in line]


def bare(project: GpuProject, out: Path, shards: list[str], in_flight: int, limit_s: float) -> dict[str, Any]:
    """The bare client on the same servers with the same rows."""
    bodies = out / "bodies.jsonl"
    bodies.write_bytes(b"\n".join(project.requests(shards)))
    try:
        done = subprocess.run(
            [sys.executable, str(BARE), ",".join(project.server_urls()), str(bodies), str(in_flight)],
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    finally:
        bodies.unlink()
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return dict(json.loads(done.stdout))


def compare(built: dict[str, Any], alone: dict[str, Any]) -> dict[str, Any]:
    """Both rates and the ratio."""
    ratio = built["tokens_per_second"] / alone["tokens_per_second"]
    return {
        "build_tokens_per_second": built["tokens_per_second"],
        "bare_tokens_per_second": alone["tokens_per_second"],
        "ratio": round(ratio, 4),
        "ratio_from_first_job": round(built["tokens_per_second_from_first_job"] / alone["tokens_per_second"], 4),
        "wanted": WANTED,
        "reached": ratio >= WANTED,
    }


def whole(
    project: GpuProject, out: Path, samples: int, in_flight: int, step: Callable[..., Any], pretended: bool
) -> dict[str, Any]:
    """All steps in order through `step(name, work, limit_s)`; `pretended`: the pilot's record is there and its rows are not."""
    if not pretended:
        step("pilot", lambda: pilot(project, out), 330)
    step("server_start", lambda: warm(project, 200), 210)
    if pretended:
        step("pilot_rows", lambda: pilot_rows(project, out), 240)
    built = step("build", lambda: build(project, out, samples), 330)
    alone = step("bare", lambda: bare(project, out, built["shards"], in_flight, 240), 260)
    found: dict[str, Any] = step("ratio", lambda: compare(built, alone), 5)
    return found


def main() -> int:
    """The benchmark by hand; tests/gpu/real_generate.py runs it as a step of a visit."""
    from tests.gpu import real_generate

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    real_generate.add_arguments(parser)
    parser.set_defaults(steps="bench")
    return real_generate.visit(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
