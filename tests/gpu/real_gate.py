"""The GPU gate on a real host: holds memory, kills, waits, and writes down what the gate said.

Usage: python tests/gpu/real_gate.py OUT_DIR

Needs a driver, nvidia-ml-py, pydantic, typer, rich and PyYAML; Snakemake for the lanes if it is there. Takes one to
four minutes. Each step runs whatever became of the one before it. Writes OUT_DIR/results.json (steps, figures) and
OUT_DIR/verdicts.jsonl (the verdict records), and those without identifiers as OUT_DIR/fixtures.jsonl; exits with 1
when a step failed.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

from draftmill.gpu import check as by_hand  # noqa: E402
from draftmill.gpu import gate, lease, pause, processes, reclaim  # noqa: E402
from draftmill.gpu.policy import GatePolicy  # noqa: E402
from draftmill.gpu.probe import probe  # noqa: E402
from draftmill.gpu.record import Verdict  # noqa: E402
from tests.gpu.lanes import overlaps, results, run_lanes  # noqa: E402

HOLDER = Path(__file__).with_name("cuda_holder.py")
COMMAND = "import typer; from draftmill.commands import gpu; a = typer.Typer(); gpu.register(a); a()"
JOB: dict[str, Any] = {"run_id": "real-gate", "stage": "test", "shard": "s1"}
_STEP_S = 100
ORPHAN = """
import os, subprocess, sys, time
from draftmill.gpu import gate
from draftmill.gpu.policy import GatePolicy
policy = GatePolicy.model_validate_json(sys.argv[1])
with gate.lease(policy, "cuda", gpus=1, run_id="killed-run", stage="test", shard="s1") as held:
    child = subprocess.Popen([sys.executable, sys.argv[2], "8192"], env={**os.environ, **held.environment()},
                             pass_fds=held.pass_fds, start_new_session=True, stdin=open("/dev/zero"),
                             stdout=subprocess.PIPE, text=True)
    held.started(child.pid)
    child.stdout.readline()
    print(child.pid, *held.uuids, flush=True)
    time.sleep(600)
"""


class Bench:
    """The host under test: its policy, its records, and the steps' results."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.scratch = Path(tempfile.mkdtemp(prefix="real-gate-"))
        self.policy = GatePolicy(lock_dir=str(self.scratch / "leases"), wait_s=30)
        self.config = self.scratch / "config.yaml"
        self.config.write_text(f"gate: {self.policy.model_dump_json()}\n")
        self.verdicts: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self.uuids = tuple(d.uuid for d in probe(30, only_list=True).devices if d.uuid)

    def keep(self, name: str, verdict: Verdict) -> Verdict:
        self.verdicts.append({"case": name, "record": json.loads(verdict.text())})
        return verdict

    def check(self, name: str, **how: Any) -> Verdict:
        return self.keep(name, by_hand.check(self.policy, **how))

    def step(self, name: str, work: Callable[["Bench"], Any]) -> None:
        began = time.monotonic()
        signal.alarm(_STEP_S)
        try:
            detail, ok = work(self), True
        except BaseException as error:
            ok, detail = False, "".join(traceback.format_exception(error))[-2500:]
            if isinstance(error, gate.GateRefused):
                self.keep(f"{name}: refused", error.verdict)
            if isinstance(error, KeyboardInterrupt):
                raise
        finally:
            signal.alarm(0)
        record = {"step": name, "ok": ok, "seconds": round(time.monotonic() - began, 2), "detail": detail}
        self.steps.append(record)
        print(json.dumps(record)[:2000], flush=True)
        self.save()

    def save(self) -> None:
        document = {"gpus": self.uuids, "python": sys.version.split()[0], "steps": self.steps}
        (self.out / "results.json").write_text(json.dumps(document, indent=1) + "\n")
        lines = "".join(json.dumps(verdict) + "\n" for verdict in self.verdicts)
        (self.out / "verdicts.jsonl").write_text(lines)
        (self.out / "fixtures.jsonl").write_text(self._without_names(lines))

    def _without_names(self, text: str) -> str:
        """The records fit for a repository: no identifiers of the host, its devices or its users."""
        for number, uuid in enumerate(self.uuids):
            text = text.replace(uuid, f"GPU-{number:08x}-0000-4000-8000-00000000000{number:x}")
        text = text.replace(str(self.scratch), "/var/tmp/draftmill")
        text = re.sub(r'"host": "[^"]*"', '"host": "gpu-host"', text)
        text = text.replace(processes.boot_id() or "-", "00000000-0000-4000-8000-000000000000")
        text = re.sub(r"(pid \d+) of [^:\"]+: [^\"]*?, (\d+ MiB|unknown memory)", r"\1 of user: holder, \2", text)
        text = re.sub(r"(pid \d+) of [^,\"]+, run", r"\1 of user, run", text)
        text = re.sub(r'"user": "[^"]*"', '"user": "user"', text)
        return re.sub(r'"command": "[^"]*"', '"command": "holder"', text)


@contextlib.contextmanager
def holder(mib: int, environment: dict[str, str] | None = None, **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """A process that holds memory on every device that `environment` shows it."""
    process = subprocess.Popen(
        [sys.executable, str(HOLDER), str(mib)],
        env={**os.environ, **(environment or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"the holder ended with {process.wait(timeout=10)}"
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=30)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def only(uuid: str) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": uuid}


def codes(verdict: Verdict) -> list[str]:
    return sorted({r.code for r in verdict.reasons})


def command(bench: Bench, *arguments: str) -> tuple[int, str, float]:
    """The command line as a person gives it: exit status, output, seconds."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments, "--config", str(bench.config)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr, round(time.monotonic() - began, 3)


def idle(bench: Bench) -> Any:
    costs = []
    for _ in range(5):
        status, out, seconds = command(bench, "gate", "--json")
        assert status == 0, out
        costs.append(seconds)
    verdict = bench.keep("idle", Verdict.model_validate_json(out.strip().splitlines()[-1]))
    inside = {"probe_s": verdict.probe.elapsed_s, "nvidia_smi_s": verdict.second_sensor.elapsed_s}
    shown = [
        {"used_mib": g.mem.used >> 20, "reserved_mib": (g.mem.reserved or 0) >> 20, "absent": sorted(g.absent)}
        for g in verdict.gpus
        if g.mem
    ]
    return {"cli_seconds": costs, **inside, "gpus": shown, "second": verdict.second_sensor.status}


def names(bench: Bench) -> Any:
    """The pids that the driver names are those of this host's table, or a container's."""
    with holder(0, only(bench.uuids[0])) as child:
        verdict = bench.check("bare context", uuids=[bench.uuids[0]])
        (gpu,) = verdict.gpus
        listed = [(p.kind, p.pid == child.pid, p.visible, p.bytes) for p in gpu.processes]
    assert verdict.verdict == "busy", codes(verdict)
    assert gpu.mem is not None
    return {
        "context_mib": gpu.mem.used >> 20,
        "listed": listed,
        "initial_namespace": processes.in_initial_namespace(),
        "codes": codes(verdict),
    }


def held(bench: Bench) -> Any:
    """58 GiB held: busy; during the death of the holder: a wait that ends free; after it: free."""
    with holder(58 * 1024, only(bench.uuids[0])) as child:
        full = bench.check("58 GiB held", uuids=[bench.uuids[0]])
        assert full.verdict == "busy", codes(full)
        status, _, _ = command(bench, "gate", "--gpus", bench.uuids[0])
        assert status == 1
        os.kill(child.pid, signal.SIGKILL)
        dying = time.monotonic()
        during = bench.check("at the holder's death", uuids=[bench.uuids[0]])
        free = bench.check("waiting at the holder's death", uuids=[bench.uuids[0]], wait_s=30)
        assert free.verdict == "free", codes(free)
        took = round(time.monotonic() - dying, 2)
    after = bench.check("after the holder", uuids=[bench.uuids[0]])
    assert after.verdict == "free", codes(after)
    return {"held": codes(full), "first_look": during.verdict, "first_codes": codes(during), "free_after_s": took}


def attested(bench: Bench) -> Any:
    """Our own memory is ours; the lease names it, and another run is refused meanwhile."""
    with gate.lease(bench.policy, "cuda", gpus=1, **JOB) as mine:
        with holder(4096, mine.environment(), pass_fds=mine.pass_fds) as child:
            mine.started(child.pid)
            states = mine.attest()
            bench.keep("attested", mine.verdict)
            seen = bench.check("leased", uuids=list(mine.uuids))
        assert "leased" in codes(seen)
    (state,) = states.values()
    assert state["state"] in ("ours", "unattributed"), state
    return state


def foreign(bench: Bench) -> Any:
    """Somebody else starts while we do: our process ends, theirs does not."""
    script = f"{sys.executable} {HOLDER} 6144 45 </dev/zero >/dev/null 2>&1 & echo $!"
    with gate.lease(bench.policy, "cuda", gpus=1, **JOB) as mine:
        stranger = int(subprocess.check_output(["sh", "-c", script], env={**os.environ, **only(mine.uuids[0])}))
        try:
            with holder(2048, mine.environment(), pass_fds=mine.pass_fds) as child:
                mine.started(child.pid)
                deadline = time.monotonic() + 20
                state: Any = {}
                try:
                    while time.monotonic() < deadline:
                        state = mine.attest()
                        time.sleep(0.2)
                except gate.GpuBusy as refused:
                    bench.keep("foreign rise", refused.verdict)
                    ended = child.wait(timeout=15)
                    alive = processes.identify(stranger) is not None
                    assert alive, "the stranger was hit"
                    return {"sentence": str(refused), "our_child": ended, "stranger_lives": alive}
            (one,) = state.values()
            assert one["state"] == "unattributed", one
            return {"state": one, "note": "pids cannot be joined here, so nothing was attributed"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stranger, signal.SIGKILL)
            processes.wait_until(lambda: processes.identify(stranger) is None, 10)


def orphan(bench: Bench) -> Any:
    """A launcher killed by SIGKILL whose child keeps its GPU: busy, reclaimed, free."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, bench.policy.model_dump_json(), str(HOLDER)], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    pid, uuid = launcher.stdout.readline().split()
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    busy = bench.check("orphan", uuids=[uuid])
    assert "lease_orphaned" in codes(busy), codes(busy)
    status, dry, _ = command(bench, "reclaim", "--dry-run")
    assert processes.identify(int(pid)) is not None
    began = time.monotonic()
    plan = reclaim.find(bench.policy)
    outcome = reclaim.carry_out(bench.policy, plan)
    bench.keep("after reclaim", outcome.verdict)
    assert processes.identify(int(pid)) is None
    assert outcome.verdict.verdict == "free", codes(outcome.verdict)
    return {
        "orphan": codes(busy),
        "dry_run": [status, dry[:600]],
        "ended": [found.why for found in outcome.ended],
        "untouched": plan.untouched,
        "seconds": round(time.monotonic() - began, 2),
    }


def lanes(bench: Bench) -> Any:
    """Twice as many jobs as GPUs: each on its own UUID, as CUDA sees it, and never two on one."""
    folder, count = bench.scratch / "lanes", len(bench.uuids)
    folder.mkdir()
    ran_by = run_lanes(folder, bench.policy, jobs=2 * count, limit=count, mode="cuda", seconds=3)
    jobs = results(folder)
    for job in jobs:
        bench.verdicts.append({"case": "lane", "record": job["verdict"]})
    assert overlaps(jobs) == [], overlaps(jobs)
    assert all(sorted(job["cuda_uuids"]) == sorted(job["uuids"]) for job in jobs), jobs
    assert {uuid for job in jobs for uuid in job["uuids"]} == set(bench.uuids)
    states = sorted({one["state"] for job in jobs for one in job["attested"].values()})
    spans = [round(job["ended"] - job["began"], 2) for job in jobs]
    return {"ran_by": ran_by, "jobs": len(jobs), "attested": states, "seconds": spans}


def passed_over(bench: Bench) -> Any:
    """With several GPUs: a held one is passed over, and a job of two gets two."""
    if len(bench.uuids) < 2:
        return "one GPU: not applicable"
    with (
        holder(4096, only(bench.uuids[0])),
        gate.lease(bench.policy, "cuda", gpus=1, **JOB) as one,
    ):
        bench.keep("held one passed over", one.verdict)
        assert one.uuids[0] != bench.uuids[0]
        got = one.uuids
    with (
        gate.lease(bench.policy, "cuda", gpus=2, **JOB) as two,
        holder(1024, two.environment(), pass_fds=two.pass_fds) as child,
    ):
        two.started(child.pid)
        states = two.attest()
        bench.keep("two", two.verdict)
    return {"instead": got, "two": states}


def served(bench: Bench) -> Any:
    """A stand-in server: used by its own spec, asked to leave by another."""
    with contextlib.ExitStack() as stack:
        with gate.lease(bench.policy, "cuda", gpus=1, server_spec="spec-a", **JOB) as first:
            child = stack.enter_context(holder(20 * 1024, first.environment(), pass_fds=first.pass_fds))
            first.hand_over(child.pid, "spec-a")
            uuid = first.uuids[0]
        narrow = bench.policy.model_copy(update={"expected_uuids": (uuid,)})
        bench.keep("sentinel over a server", gate.sentinel(narrow, "cuda", gpus=1, server_spec="spec-b", **JOB))
        with gate.lease(narrow, "cuda", gpus=1, server_spec="spec-a", **JOB) as second:
            assert second.server is not None
            bench.keep("attached", second.verdict)
        began = time.monotonic()
        with gate.lease(narrow, "cuda", gpus=1, server_spec="spec-b", **JOB) as third:
            took = round(time.monotonic() - began, 2)
            assert third.server is None
            bench.keep("after the server left", third.verdict)
        return {"evicted_and_proven_s": took, "server_exit": child.wait(timeout=10)}


def paused(bench: Bench) -> Any:
    folder = lease.lock_dir(bench.policy.lock_dir)
    status, out, _ = command(bench, "gpus", "pause", bench.uuids[0])
    assert status == 0, out
    seen = bench.check("paused", uuids=[bench.uuids[0]])
    assert codes(seen) == ["paused"], codes(seen)
    status, table, _ = command(bench, "gpus")
    status, out, _ = command(bench, "gpus", "resume", bench.uuids[0])
    assert not pause.is_paused(folder, bench.uuids[0]), out
    return {"table": table}


def at_the_end(bench: Bench) -> Any:
    verdict = bench.check("at the end")
    assert verdict.verdict == "free", codes(verdict)
    return {"used_mib": [g.mem.used >> 20 for g in verdict.gpus if g.mem]}


STEPS: tuple[Callable[[Bench], Any], ...] = (
    idle,
    names,
    held,
    attested,
    foreign,
    orphan,
    served,
    paused,
    lanes,
    passed_over,
    at_the_end,
)


def _too_long(*_: object) -> None:
    raise TimeoutError(f"a step took longer than {_STEP_S} s")


def run(out: Path) -> list[dict[str, Any]]:
    """All steps; returns their records."""
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGALRM, _too_long)
    bench = Bench(out)
    if not bench.uuids:
        raise SystemExit(f"no GPU can be read here: {probe(30, only_list=True).record}")
    for work in STEPS:
        bench.step(work.__name__, work)
    return bench.steps


if __name__ == "__main__":
    sys.exit(any(not step["ok"] for step in run(Path(sys.argv[1]))))
