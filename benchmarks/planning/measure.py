"""One plan in a process of its own: seconds on the clock, seconds of the processor, jobs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).parents[2]
_REAL = ["--snakefile", str(ROOT / "Snakefile"), "--configfile", "config.yaml"]
_COUNT = re.compile(r"^([a-z_]+) +(\d+)$", re.M)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a plan took. On a busy machine the processor's seconds say more than the clock's."""

    wall_s: float
    cpu_s: float
    rules: Mapping[str, int]
    """Jobs by rule; the target rule counts, as in Snakemake's own table."""

    @property
    def jobs(self) -> int:
        """All jobs."""
        return sum(self.rules.values())


def plan(folder: Path, *, real: bool, environment: Mapping[str, str] = MappingProxyType({})) -> Plan:
    """Run `snakemake -n` in a folder, with the repository's Snakefile or with the folder's own."""
    command = [sys.executable, "-m", "snakemake", *_arguments(real)]
    started = time.perf_counter()
    with (folder / "plan.log").open("w+") as log:
        process = subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, env=_environment(environment)
        )
        _, status, usage = os.wait4(process.pid, 0)
        took = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        log.seek(0)
        text = log.read()
    if process.returncode != 0:
        raise RuntimeError(f"snakemake -n in {folder} ended with {process.returncode}:\n{text[-2000:]}")
    counts = {rule: int(count) for rule, count in _COUNT.findall(text)}
    return Plan(took, usage.ru_utime + usage.ru_stime, {rule: n for rule, n in counts.items() if rule != "total"})


def sample(folder: Path, environment: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """The same plan of the repository's Snakefile under the sampler; see sampled.py."""
    out = folder / "samples.json"
    command = [sys.executable, "-m", "benchmarks.planning.sampled", str(out), *_arguments(True)]
    variables = {**_environment(environment), "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=folder, env=variables, capture_output=True, check=True)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def _arguments(real: bool) -> list[str]:
    profile = ["--workflow-profile", str(ROOT / "profiles/default")]
    return ["-n", "--quiet", "rules", "--cores", "2", *profile, *(_REAL if real else [])]


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("DRAFTMILL_")}
    return {**kept, "OMP_NUM_THREADS": "1", **more}
