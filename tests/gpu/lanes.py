"""Several jobs at once, as Snakemake starts them, each with a lease of its own."""

import importlib.util
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from draftmill.gpu.policy import GatePolicy

JOB = Path(__file__).with_name("lane_job.py")
SNAKEFILE = """
rule all:
    input: {outputs}

rule job:
    output: "{{job}}.json"
    resources: gpu={gpus}
    params: policy={policy!r}
    shell: "{python} {script} {{params.policy:q}} {gpus} {{output}} {mode} {seconds}"
"""


def run_lanes(folder: Path, policy: GatePolicy, jobs: int, limit: int, mode: str, seconds: float, gpus: int = 1) -> str:
    """Run the jobs in `folder`, at most `limit` GPUs at a time; returns by what they were run.

    Without Snakemake the same job script runs from a pool of threads of the same width. Raises CalledProcessError.
    """
    names = [f"job{number}" for number in range(jobs)]
    values = {"gpus": gpus, "policy": policy.model_dump_json(), "python": sys.executable, "script": JOB}
    if importlib.util.find_spec("snakemake") is None:
        command = [sys.executable, str(JOB), policy.model_dump_json(), str(gpus)]
        with ThreadPoolExecutor(limit // gpus) as pool:
            runs = [
                pool.submit(_run, [*command, str(folder / f"{name}.json"), mode, str(seconds)], folder)
                for name in names
            ]
            for run in runs:
                run.result()
        return "threads"
    outputs = ", ".join(f'"{name}.json"' for name in names)
    (folder / "Snakefile").write_text(SNAKEFILE.format(outputs=outputs, mode=mode, seconds=seconds, **values))
    _run([sys.executable, "-m", "snakemake", "--cores", str(limit), "--resources", f"gpu={limit}", "-q", "all"], folder)
    return "snakemake"


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{command[:3]} exited with {done.returncode}: {(done.stderr or done.stdout)[-1500:]}")


def results(folder: Path) -> list[dict[str, Any]]:
    """What the jobs wrote."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("job*.json"))]


def overlaps(jobs: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """GPUs that two jobs had at the same time, with the seconds; empty is right."""
    found = []
    for at, one in enumerate(jobs):
        for other in jobs[at + 1 :]:
            shared = set(one["uuids"]) & set(other["uuids"])
            both = min(one["ended"], other["ended"]) - max(one["began"], other["began"])
            found += [(uuid, both) for uuid in shared if both > 0]
    return found
