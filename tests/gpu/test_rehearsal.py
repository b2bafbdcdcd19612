"""The script for GPU hosts (tests/gpu/real_generate.py) from end to end on a fake driver and small servers.

It is the same script, the real Snakefile, real jobs, lane, keeper and gate; only the model is small and the pilot's
extraction, which needs CUDA, is put down as done.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftmill.gpu.policy import GatePolicy
from tests.gpu_gate.conftest import Host, fake_driver, host, policy
from tests.sglang.fake_gpus import Driver, living
from tests.tiny import make_target, prompt_texts
from tests.waiting import until

__all__ = ["fake_driver", "host", "policy"]
ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.chaos]


class Rehearsal:
    def __init__(self, folder: Path, policy: GatePolicy) -> None:
        self.folder, self.out, self.work = folder, folder / "out", folder / "work"
        make_target(folder / "target")
        (folder / "prompts.json").write_text(json.dumps(prompt_texts(160)))
        self.program = folder / "small_server.py"
        self.program.write_text((ROOT / "tests/sglang/small_server.py").read_text())
        gate = policy.model_dump(mode="json", exclude={"lock_dir", "expected_uuids", "ports"})
        self.gate = json.dumps({**gate, "wait_s": 20})

    def run(self, steps: str, *options: str, token_seconds: float = 0.001) -> dict[str, Any]:
        serve = [sys.executable, str(self.program), "--port", "{port}", "--model", "{model}"]
        serve += ["--token-seconds", str(token_seconds), "--record", str(self.folder / "record.jsonl"), "--access-log"]
        command = [sys.executable, str(ROOT / "tests/gpu/real_generate.py"), str(self.out)]
        command += ["--model", str(self.folder / "target"), "--prompts", str(self.folder / "prompts.json")]
        command += ["--server-command", " ".join(serve), "--gate", self.gate, "--work", str(self.work)]
        command += [
            "--context",
            "512",
            "--max-new-tokens",
            "24",
            "--in-flight",
            "16",
            "--loads",
            "4,16",
            "--samples",
            "2",
        ]
        command += ["--shard-rows", "18", "--kill-prompts", "120", "--kill-samples", "4", "--kills", "1"]
        command += ["--flush-rows", "8", "--pretend-pilot", "--minutes", "8", "--steps", steps, *options]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("DRAFTMILL_")} | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=self.folder)
        found: dict[str, Any] = json.loads((self.out / "generate.json").read_text())
        found["said"], found["status"] = done.stdout + done.stderr, done.returncode
        return found


@pytest.fixture
def rehearsal(host: Host, policy: GatePolicy, tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    host.show(getattr(request, "param", 1))
    made = Rehearsal(tmp_path, policy)
    with Driver(host, str(made.program)):
        yield made
    until(lambda: not living(str(made.program)), "the end of all servers")


def steps_of(found: dict[str, Any]) -> dict[str, Any]:
    failed = [step for step in found["steps"] if step["ok"] is False]
    assert not failed, "\n".join(f"{step['step']}: {step['detail']}" for step in failed) + found["said"][-2000:]
    assert found["figures"]["at_the_end"]["verdict"] == "free"
    return {step["step"]: step["detail"] for step in found["steps"]}


def test_figures_and_exchanges(rehearsal: Rehearsal) -> None:
    found = rehearsal.run("measure,exchanges,bench")
    steps = steps_of({**found, "steps": [step for step in found["steps"] if step["step"] != "ratio"]})
    assert len([line for line in steps["measure"]["said"] if "in flight" in line]) == 3
    assert steps["build"]["rows"]["missing"] == steps["build"]["rows"]["twice"] == 0
    assert len(steps["build"]["shards"]) >= 4
    assert steps["pilot_rows"]["seconds"] > 0, "the pilot shard, beside which nothing runs, is not among them"
    assert steps["bare"]["failures"] == 0
    assert found["figures"]["ratio"]["ratio"] > 0
    assert json.loads((rehearsal.out / "bench_generate.json").read_text())["outlook"]["gpu_hours"]["value"] > 0
    logs = "".join(path.read_text() for path in (rehearsal.work / "bench/logs/servers").glob("*.log"))
    assert logs.count("[keeper] epoch ") == 1, "one start serves the measuring, the exchanges and every shard"


@pytest.mark.parametrize("rehearsal", [2], indirect=True)
def test_one_lane_over_two_servers(rehearsal: Rehearsal) -> None:
    found = rehearsal.run("bench", "--gpus", "2")
    steps = steps_of({**found, "steps": [step for step in found["steps"] if step["step"] != "ratio"]})
    assert len(steps["server_start"]) == steps["build"]["starts"] == 2
    assert steps["build"]["rows"]["missing"] == steps["build"]["rows"]["twice"] == 0
    logs = [path.read_text() for path in (rehearsal.work / "bench/logs/servers").glob("*.log")]
    assert all("POST /generate" in log for log in logs), "each of both servers answered rows"
    assert steps["bare"]["failures"] == 0


def test_kills_and_the_idle_end(rehearsal: Rehearsal) -> None:
    # Slow enough that the build is not over before all kills.
    kills_are_right(steps_of(rehearsal.run("kills,idle", token_seconds=0.15)))


def kills_are_right(steps: dict[str, Any]) -> None:
    assert sorted(kill["kind"] for kill in steps["kills"]) == ["job", "keeper", "server", "snakemake"]
    assert all(kill["resumed"] for kill in steps["kills"])
    found = steps["kills_reckoning"]
    assert found["missing"] == found["twice"] == 0
    assert found["completed"] <= found["answered_by_servers"] <= found["completed"] + sum(found["allowed"].values())
    assert steps["kills_memory"]["used_mib"] == [0]
    assert steps["idle"]["used_mib"] == [0]


@pytest.mark.timeout(1800)
def test_a_visit_in_short_calls(rehearsal: Rehearsal) -> None:
    """The same command again and again, each call too short for everything."""
    calls = 0
    while True:
        found = rehearsal.run("kills,idle", "--resume", "--minutes", "1.5", "--least", "0.2", token_seconds=0.15)
        calls += 1
        assert found["figures"]["at_the_end"]["verdict"] == "free"
        if found["status"] != 3:
            break
        assert calls < 12, found["said"]
    assert calls > 1
    kills_are_right(steps_of(found))
