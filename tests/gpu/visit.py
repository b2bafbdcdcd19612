"""A visit to a GPU host: arguments, folders, limits of time, results as they come, and nothing left behind."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.generate.project import GpuProject, Host
from draftmill.engines import server, server_record
from draftmill.gpu import check as by_hand
from draftmill.gpu import lease, reclaim
from draftmill.gpu.policy import GatePolicy

DEFAULT = "measure,exchanges,greedy,bench,kills,idle"
# Seconds that a step takes on one H200 at least; with less left it is kept for the next call (--resume).
LEAST = {
    "measure": 200, "exchanges": 120, "greedy": 150, "pilot": 240, "server_start": 330, "build": 200, "bare": 110,
    "kills": 200, "kills_reckoning": 100, "idle": 190, "big_model": 300,
}  # fmt: skip
# What holds a server up is done again in the next call; what was found is not.
AGAIN = frozenset({"server_start"})
# Python backends of SGLang, for a host where its compiled ones are absent; memory is left for a look beside the server.
PLAIN = {
    "attention-backend": "triton",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "mem-fraction-static": 0.6,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True, help="the target's folder")
    parser.add_argument("--prompts", type=Path, required=True, help="a JSON list of prompts")
    parser.add_argument("--server-python", default=sys.executable, help="interpreter of SGLang")
    parser.add_argument("--server-site", help="folder that SGLang is unpacked in (its PYTHONPATH)")
    parser.add_argument("--server-command", help="a stand-in's command line, with {port} and {model}")
    parser.add_argument("--flags", default=json.dumps(PLAIN), help="further flags of the server, as JSON")
    parser.add_argument("--gate", default="{}", help="keys of the gate: section, as JSON")
    parser.add_argument("--work", type=Path, help="folder of the builds (default: a new one)")
    parser.add_argument("--steps", default=DEFAULT)
    parser.add_argument("--minutes", type=float, default=9.0, help="limit of all steps together")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from OUT and --work of an earlier call; exits with 3 while steps are left: give the same command again",
    )
    parser.add_argument("--least", type=float, default=1.0, help="factor on the seconds that a step must have left")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of the builds, with a server each")
    parser.add_argument("--in-flight", type=int, default=512)
    parser.add_argument("--loads", default="128,256,512")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--shard-rows", type=int, default=640, help="prompts a shard of the benchmark")
    parser.add_argument("--samples", type=int, default=4, help="answers a prompt of the benchmark")
    parser.add_argument("--kill-prompts", type=int, default=2800)
    parser.add_argument("--kill-samples", type=int, default=6)
    parser.add_argument("--kills", type=int, default=3, help="kills of job, server and Snakemake each")
    parser.add_argument("--keeper-kills", type=int, default=1)
    parser.add_argument("--flush-rows", type=int, default=256, help="rows of a segment of a journal, beside the kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pretend-pilot", action="store_true", help="put down a pilot's record instead of extracting")


class Visit:
    """The host under test, its folders, and the results so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        if args.resume and args.work is None:
            raise SystemExit("--resume goes on from a --work of its own: name it")
        self.args, self.out = args, args.out.resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.work = (args.work or Path(tempfile.mkdtemp(prefix="real-generate-"))).resolve()
        self.work.mkdir(parents=True, exist_ok=True)
        self.gate = {"lock_dir": str(self.work / "leases"), "wait_s": 60, **json.loads(args.gate)}
        self.policy = GatePolicy(**self.gate)
        self.end = time.monotonic() + args.minutes * 60
        self.steps: list[dict[str, Any]] = []
        self.figures: dict[str, Any] = {}
        # Chosen steps that are over, and whether they were well.
        self.over: dict[str, bool] = {}
        if args.resume and (self.out / "generate.json").exists():
            earlier = json.loads((self.out / "generate.json").read_text())
            self.steps, self.figures, self.over = earlier["steps"], earlier["figures"], earlier["over"]
        self.prompts: list[str] = json.loads(args.prompts.read_text())
        self.host = self._host()

    def _host(self) -> Host:
        args = self.args
        environment = {"HF_HUB_OFFLINE": "1"}
        if args.server_site:
            environment |= {"PYTHONPATH": args.server_site, "SGLANG_IS_FLASHINFER_AVAILABLE": "false"}
        flags = json.loads(args.flags)
        look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('prometheus_client') is None)"
        lacks = subprocess.run(
            [args.server_python, "-c", look], env={**os.environ, **environment}, check=False
        ).returncode
        if lacks:
            flags["enable-metrics"] = False
        self.figures["server_flags"] = flags
        command = tuple(args.server_command.split()) if args.server_command else None
        return Host(args.server_python, environment, flags, command, self.gate)

    def project(self, name: str, prompts: int, samples: int, **more: Any) -> GpuProject:
        args = self.args
        made = GpuProject(
            self.work / name, self.host, args.model, self.prompts[:prompts], context=args.context, gpus=args.gpus
        )
        settings = {"shard_rows": args.shard_rows, "in_flight": args.in_flight, "max_new_tokens": args.max_new_tokens}
        made.configure(**{**settings, "samples": samples, **more})
        return made

    def left(self) -> float:
        """Seconds of this call."""
        return self.end - time.monotonic()

    def short_of(self, name: str) -> bool:
        """Whether too little of a call is left for a step, so that the next one is to make it."""
        return self.args.resume and self.left() < self.args.least * LEAST.get(name, 20)

    def step(self, name: str, work: Callable[[], Any], limit_s: float) -> Any:
        """One step under its limit and the visit's; its result or failure is written down at once.

        With `resume`, what an earlier call found is given back, and Unfinished is raised when this call's time is over.
        """
        if self.args.resume and name not in AGAIN:
            for earlier in self.steps:
                if earlier["step"] == name and earlier["ok"]:
                    return earlier["detail"]
        if self.short_of(name):
            raise Unfinished(name)
        left, began, final = self.left(), time.monotonic(), True
        detail: Any
        ok: bool | None
        if left < 5:
            detail, ok = "not begun: the visit's time is over", False
        else:
            signal.setitimer(signal.ITIMER_REAL, min(limit_s, left))
            try:
                detail, ok = work(), True
            except KeyboardInterrupt:
                raise
            except Unfinished:
                detail, ok = "the rest is left to the next call", None
            except BaseException as error:
                over, final = self.args.resume and self.left() < 1, not isinstance(error, NotFinal)
                detail, ok = "".join(traceback.format_exception(error))[-6000:], None if over else False
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        record = {"step": name, "ok": ok, "seconds": round(time.monotonic() - began, 2), "detail": detail}
        self.steps.append(record)
        print(json.dumps(record)[:3000], flush=True)
        self.save()
        if ok is None:
            raise Unfinished(name)
        if not ok:
            raise StepFailed(name, final=final)
        return detail

    def save(self) -> None:
        document = {
            "figures": self.figures, "versions": self._versions(), "over": self.over, "steps": self.steps
        }  # fmt: skip
        (self.out / "generate.json").write_text(json.dumps(document, indent=1) + "\n")

    def _versions(self) -> dict[str, str]:
        from importlib.metadata import PackageNotFoundError, version

        found = {"python": sys.version.split()[0]}
        for name in ("torch", "transformers", "snakemake", "aiohttp"):
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                found[name] = "absent"
        return found

    # Servers ----------------------------------------------------------------------------------------------------------

    def records(self) -> list[server_record.ServerRecord]:
        return list(server_record.records(server_record.folder(lease.lock_dir(self.policy.lock_dir))))

    def server_logs(self, project: GpuProject) -> str:
        return "".join(path.read_text(errors="replace") for path in (project.folder / "logs/servers").glob("*.log"))

    def clear(self) -> dict[str, Any]:
        """End every server and leftover of this visit, and prove the GPU free."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        server.end_servers(self.policy)
        plan = reclaim.find(self.policy, idle_servers=True)
        outcome = reclaim.carry_out(self.policy, plan)
        verdict = by_hand.check(self.policy, wait_s=30)
        return {
            "leftovers": [found.why for found in plan.processes.values()],
            "stuck": [found.command for found in outcome.stuck],
            "verdict": verdict.verdict,
            "used_mib": [gpu.mem.used >> 20 for gpu in verdict.gpus if gpu.mem],
            "reasons": sorted({reason.code for reason in verdict.reasons}),
        }


class StepFailed(Exception):
    """A step failed; those that build on it are left out. If it is not final, another call may make it."""

    def __init__(self, name: str, *, final: bool = True) -> None:
        super().__init__(name)
        self.final = final


class NotFinal(RuntimeError):
    """What was asked of a step did not suffice; that says nothing of what is tested."""


class Unfinished(Exception):
    """A step is for the next call, as this one's time is over."""
