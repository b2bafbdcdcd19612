"""Steps of a visit that kill: job, server, keeper and Snakemake at random moments, and Snakemake for good."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from typing import Any

from benchmarks.generate import run as benchmark
from benchmarks.generate.project import GpuProject
from draftmill.gpu import check as by_hand
from draftmill.gpu import processes
from tests.gpu.generate_steps import pretend
from tests.gpu.visit import Visit


class Kills:
    """A build that is killed at random moments and taken up again."""

    def __init__(self, visit: Visit, project: GpuProject) -> None:
        self.visit, self.project, self.rng = visit, project, random.Random(visit.args.seed)
        graph = project.graph()
        self.shards = [name for name in graph.shards if graph.wanted("generate", name)]
        self.targets = [f"build/{graph.completions(name)}" for name in self.shards]
        self.log = visit.out / "kills.log"
        self.builder: subprocess.Popen[bytes] | None = None
        self.done: list[dict[str, Any]] = []

    def start(self) -> None:
        if self.builder is None or self.builder.poll() is not None:
            self.builder = self.project.start(self.targets, self.log)

    def over(self) -> bool:
        return all((self.project.folder / target).exists() for target in self.targets)

    def rows(self) -> int:
        """Rows that heartbeats and finished shards account for."""
        found = 0
        for path in (self.project.folder / "build/progress/generate").glob("*.json"):
            try:
                found += int(json.loads(path.read_text()).get("done") or 0)
            except (OSError, ValueError):
                continue
        return found

    def flowing(self, limit_s: float) -> bool:
        """Wait until rows come; False when the build is over before."""
        before, end = self.rows(), time.monotonic() + limit_s
        while time.monotonic() < end:
            if self.over():
                return False
            if self.builder is not None and (status := self.builder.poll()) is not None:
                raise RuntimeError(
                    f"snakemake ended with {status}\n{self.log.read_text()[-2000:]}\n{self.project.logs()}"
                )
            if self.rows() > before:
                return True
            time.sleep(0.05)
        raise RuntimeError(f"no rows within {limit_s} s\n{self.project.logs()}")

    def jobs(self) -> list[int]:
        own = str(self.project.folder)
        found = []
        for seen in processes.all_processes():
            line = processes.command(seen.pid, 4000) or ""
            if "generate.py" in line and ".snakemake/scripts" in line and own in line:
                found.append(seen.pid)
        return found

    def kill(self, kind: str) -> dict[str, Any]:
        self.start()
        if not self.flowing(150):
            return {"kind": kind, "skipped": "the build was over"}
        time.sleep(self.rng.uniform(0.2, 4))
        pid = self.victim(kind)
        if pid is None:
            return {"kind": kind, "skipped": "nothing to kill at that moment"}
        began, rows = time.monotonic(), self.rows()
        os.kill(pid, signal.SIGKILL)
        if kind == "snakemake" and self.builder is not None:
            self.builder.wait()
            processes.wait_until(lambda: not self.jobs(), 20)
        self.start()
        resumed = self.flowing(200) if not self.over() else True
        return {"kind": kind, "rows": rows, "resumed": resumed, "seconds": round(time.monotonic() - began, 1)}

    def victim(self, kind: str) -> int | None:
        if kind == "snakemake":
            return self.builder.pid if self.builder is not None and self.builder.poll() is None else None
        if kind == "job":
            return next(iter(self.jobs()), None)
        records = self.visit.records()
        if not records:
            return None
        if kind == "keeper":
            return records[-1].keeper.pid
        return records[-1].server.pid if records[-1].server is not None else None


def kills(visit: Visit) -> None:
    """SIGKILL of job, server and Snakemake, then the reckoning: every prompt once, few rows twice, no memory left."""
    args = visit.args
    project = visit.project(
        "kills", args.kill_prompts, args.kill_samples, shard_rows=max(args.kill_prompts // 8, 4), retries=20,
        flush_rows=256, in_flight=min(args.in_flight, 128), sglang={"ahead_rows": 1024},
        server={"idle_seconds": 90, "max_restarts": 20},
    )  # fmt: skip
    pretend(visit, project)
    if not args.pretend_pilot:
        visit.step("kills_pilot", lambda: benchmark.pilot(project, visit.out), 240)
    run = Kills(visit, project)
    kinds = ["job", "server", "snakemake"] * args.kills
    run.rng.shuffle(kinds)
    kinds[kinds.index("server")] = "keeper"

    def disturb() -> Any:
        for kind in kinds:
            run.done.append(run.kill(kind))
            visit.figures["kills"] = run.done
            visit.save()
        return run.done

    def finish() -> Any:
        run.start()
        assert run.builder is not None
        status = run.builder.wait()
        if status or not run.over():
            run.start()
            status = run.builder.wait()
        found = project.accounted(project.graph(), run.shards, args.kill_samples)
        posts = visit.server_logs(project).count('"POST /generate HTTP/1.1" 200')
        found |= {"snakemake": status, "answered_by_servers": posts, "flush_rows": 256, "kills": len(run.done)}
        if status or found["missing"] or found["twice"] or found["strange"]:
            raise RuntimeError(json.dumps(found))
        return found

    try:
        visit.step("kills", disturb, 400)
        visit.step("kills_reckoning", finish, 150)
    finally:
        if run.builder is not None and run.builder.poll() is None:
            run.builder.kill()
            run.builder.wait()
    visit.step("kills_memory", lambda: freed(visit), 60)


def freed(visit: Visit) -> Any:
    """After the run's end: no server, and the GPU free."""
    gone = processes.wait_until(lambda: not visit.records(), 40)
    verdict = by_hand.check(visit.policy, wait_s=15)
    found = {
        "servers_gone": gone,
        "verdict": verdict.verdict,
        "used_mib": [g.mem.used >> 20 for g in verdict.gpus if g.mem],
    }
    if not gone or verdict.verdict != "free":
        raise RuntimeError(json.dumps(found))
    return found


def idle(visit: Visit) -> None:
    """Snakemake is killed and nobody comes back: jobs end at once, the server when it was idle for its time."""
    args = visit.args
    project = visit.project(
        "kills", args.kill_prompts, args.kill_samples, shard_rows=max(args.kill_prompts // 8, 4), seed=1, retries=1,
        in_flight=min(args.in_flight, 128),         server={"idle_seconds": 10},
    )  # fmt: skip
    pretend(visit, project)

    def work() -> Any:
        graph = project.graph()
        run = Kills(visit, project)
        run.targets = [f"build/{graph.completions(graph.pilot_shard)}"]
        run.start()
        assert run.builder is not None
        try:
            run.flowing(170)
        finally:
            run.builder.kill()
            run.builder.wait()
        began = time.monotonic()
        if not processes.wait_until(lambda: not run.jobs(), 20):
            raise RuntimeError("jobs live on without their Snakemake")
        jobs_s = time.monotonic() - began
        return {"jobs_gone_s": round(jobs_s, 1), **freed(visit), "server_gone_s": round(time.monotonic() - began, 1)}

    visit.step("idle", work, 260)
