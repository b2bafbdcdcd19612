"""Steps of a visit that kill: job, server, keeper and Snakemake at random moments, and Snakemake for good."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from typing import Any

from benchmarks.generate.project import GpuProject
from draftmill.engines import server
from draftmill.gpu import check as by_hand
from draftmill.gpu import processes
from tests.gpu.generate_steps import pretend
from tests.gpu.visit import NotFinal, StepFailed, Unfinished, Visit

_TRIES, _STALE_S = 5, 3.0
# What a kill with its recovery takes on one H200 at most: a server's start.
_A_KILL_S = 120.0
_ANSWERED = '"POST /generate HTTP/1.1" 200'


class Kills:
    """A build that is killed at random moments and taken up again."""

    def __init__(self, visit: Visit, project: GpuProject, shards: list[str]) -> None:
        self.visit, self.project, self.shards = visit, project, shards
        self.rng = random.Random(f"{visit.args.seed} {time.time()}")
        graph = project.graph()
        self.targets = [f"build/{graph.completions(name)}" for name in shards]
        self.log = visit.out / "kills.log"
        self.builder: subprocess.Popen[bytes] | None = None
        # Tries of rows that were asked again, as each job's heartbeat told them last.
        self.tries: dict[str, int] = {}

    def start(self) -> None:
        if self.builder is None or self.builder.poll() is not None:
            self.builder = self.project.start(self.targets, self.log)

    def end(self) -> None:
        """End the build as SIGKILL does, and wait for its jobs."""
        if self.builder is not None:
            self.builder.kill()
            self.builder.wait()
        if not processes.wait_until(lambda: not self.jobs(), 20):
            raise RuntimeError("jobs live on without their Snakemake")

    def over(self) -> bool:
        return all((self.project.folder / target).exists() for target in self.targets)

    def rows(self) -> int:
        """Rows that heartbeats and finished shards account for."""
        found = 0
        for path in (self.project.folder / "build/progress/generate").glob("*.json"):
            try:
                beat = json.loads(path.read_text())
                found += int(beat.get("done") or 0)
                tries = int(beat.get("failures") or 0) + int(beat.get("retries") or 0)
            except (OSError, ValueError):
                continue
            self.tries[path.name] = max(tries, self.tries.get(path.name, 0))
        return found

    def flowing(self, limit_s: float) -> bool:
        """Wait until rows come; False when the build is over before. Raises RuntimeError if none come, or it failed."""
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
        """One kill, made again until it met somebody, and that the build goes on after it. Raises RuntimeError if not."""
        for _ in range(_TRIES):
            self.start()
            if not self.flowing(150):
                raise NotFinal("the build was over before all kills were made: give more --kill-prompts")
            time.sleep(self.rng.uniform(0.2, 4))
            began, rows = time.monotonic(), self.rows()
            if self._kill(kind):
                break
        else:
            raise RuntimeError(f"no {kind} was there to be killed, {_TRIES} times")
        if kind == "snakemake":
            self.end()
        # Heartbeats on their way may tell of rows from before the kill.
        time.sleep(_STALE_S)
        self.start()
        resumed = self.flowing(200) or self.over()
        return {"kind": kind, "rows": rows, "resumed": resumed, "seconds": round(time.monotonic() - began, 1)}

    def _kill(self, kind: str) -> bool:
        pid = self.victim(kind)
        if pid is None:
            return False
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def victim(self, kind: str) -> int | None:
        if kind == "snakemake":
            return self.builder.pid if self.builder is not None and self.builder.poll() is None else None
        if kind == "job":
            jobs = self.jobs()
            return self.rng.choice(jobs) if jobs else None
        records = self.visit.records()
        if not records:
            return None
        record = self.rng.choice(records)
        if kind == "keeper":
            return record.keeper.pid
        return record.server.pid if record.server is not None else None


class Diary:
    """The kills of a visit on disk, so that another call makes those that are left."""

    def __init__(self, visit: Visit) -> None:
        self._path, args = visit.work / "kills.json", visit.args
        self.new = not self._path.exists()
        if not self.new:
            found = json.loads(self._path.read_text())
        else:
            kinds = ["job", "server", "snakemake"] * args.kills + ["keeper"] * args.keeper_kills
            random.Random(args.seed).shuffle(kinds)
            found = {"kinds": kinds, "done": [], "tries": {}, "stops": 0}
        self.kinds: list[str] = found["kinds"]
        self.done: list[dict[str, Any]] = found["done"]
        self.tries: dict[str, int] = found["tries"]
        self.stops: int = found["stops"]

    @property
    def left(self) -> list[str]:
        return self.kinds[len(self.done) :]

    def save(self) -> None:
        found = {"kinds": self.kinds, "done": self.done, "tries": self.tries, "stops": self.stops}
        self._path.write_text(json.dumps(found))

    def forget(self) -> None:
        """Have the next call begin anew."""
        self._path.unlink(missing_ok=True)


def bound(diary: Diary, shards: int, flush_rows: int, in_flight: int) -> dict[str, int]:
    """How many rows the kills may have cost, by what each kind loses at most.

    A killed job loses nothing, as the lane goes on. What a killed server had answered and nobody had read is in flight. With
    Snakemake the lane ends: one flush interval, and what is in flight; the end of a call is the same. Rows that were tried
    again, and canaries (a few at each start of a server or a lane, one behind each shard), are no loss.
    """
    counts = {kind: diary.kinds.count(kind) for kind in ("job", "server", "keeper", "snakemake")}
    lanes = counts["snakemake"] + diary.stops
    servers = counts["server"] + counts["keeper"]
    return {
        "lost": lanes * (flush_rows + in_flight) + servers * in_flight,
        "tried_again": sum(diary.tries.values()),
        "canaries": 4 * (1 + lanes + servers) + 2 * (shards + counts["job"]),
    }


def judge(found: dict[str, Any], diary: Diary, allowed: dict[str, int]) -> None:
    """Raise RuntimeError unless every kill was made and survived, and the reckoning is right."""
    wrong = [kill for kill in diary.done if not kill["resumed"]]
    if diary.left or wrong:
        raise RuntimeError(f"kills that are left: {diary.left}, after which nothing went on: {wrong}")
    if found["missing"] or found["twice"] or found["strange"]:
        raise RuntimeError(json.dumps(found))
    answered, stored = found["answered_by_servers"], found["completed"]
    if answered < stored:
        raise RuntimeError(
            f"the servers' logs tell of {answered} answers and {stored} rows are stored: no bound is known"
        )
    if answered - stored > sum(allowed.values()):
        raise RuntimeError(
            f"{answered} rows were answered for {stored}, more than {allowed} explain: {json.dumps(found)}"
        )


def kills(visit: Visit) -> None:
    """SIGKILL of job, server and Snakemake, then the reckoning: every prompt once, few rows twice, no memory left."""
    args = visit.args
    in_flight = min(args.in_flight, 128)
    # A server of an earlier step would have its log, and the rows it answers, in that step's folder.
    server.end_servers(visit.policy)
    diary = Diary(visit)
    if diary.new:
        shutil.rmtree(visit.work / "kills", ignore_errors=True)
    project = visit.project(
        "kills", args.kill_prompts, args.kill_samples, shard_rows=max(args.kill_prompts // 8, 4), retries=20,
        flush_rows=args.flush_rows, in_flight=in_flight, sglang={"ahead_rows": 8 * in_flight},
        server={"idle_seconds": 90, "max_restarts": 20},
    )  # fmt: skip
    pretend(project)
    run = Kills(visit, project, list(project.graph().shards))
    run.tries = diary.tries

    def disturb() -> Any:
        for kind in diary.left:
            if args.resume and visit.left() < args.least * _A_KILL_S:
                raise Unfinished("kills")
            diary.done.append(run.kill(kind))
            diary.save()
            visit.figures["kills"] = diary.done
            visit.save()
        return diary.done

    def finish() -> Any:
        run.start()
        assert run.builder is not None
        while (status := run.builder.poll()) is None:
            run.rows()
            time.sleep(0.5)
        if status or not run.over():
            raise RuntimeError(f"snakemake ended with {status}\n{run.log.read_text()[-2000:]}\n{project.logs()}")
        found = project.accounted(project.graph(), run.shards, args.kill_samples)
        allowed = bound(diary, len(run.shards), args.flush_rows, in_flight)
        answered = visit.server_logs(project).count(_ANSWERED)
        found |= {"answered_by_servers": answered, "allowed": allowed, "kills": len(diary.done), "stops": diary.stops}
        judge(found, diary, allowed)
        return found

    keep = True
    try:
        visit.step("kills", disturb, 540)
        visit.step("kills_reckoning", finish, 240)
    except StepFailed as step:
        keep = step.final
        raise
    finally:
        if run.builder is not None and run.builder.poll() is None:
            diary.stops += 1
            run.end()
        diary.save() if keep else diary.forget()
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
        in_flight=min(args.in_flight, 128), server={"idle_seconds": 10},
    )  # fmt: skip
    pretend(project)

    def work() -> Any:
        # A server of an earlier step would stay idle as long as that one said.
        server.end_servers(visit.policy)
        run = Kills(visit, project, [project.graph().pilot_shard])
        run.start()
        try:
            if not run.flowing(170):
                raise RuntimeError("the shard was done before Snakemake could be killed: give more --kill-prompts")
        finally:
            began = time.monotonic()
            run.end()
        jobs_s = time.monotonic() - began
        return {"jobs_gone_s": round(jobs_s, 1), **freed(visit), "server_gone_s": round(time.monotonic() - began, 1)}

    visit.step("idle", work, 260)
