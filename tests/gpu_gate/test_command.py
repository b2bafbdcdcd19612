"""The commands by hand: exit statuses, the record, the table, and one sentence for a mistake."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftmill.gpu import gate, lease, pause
from draftmill.gpu.policy import GatePolicy
from draftmill.gpu.record import Verdict

from .conftest import GIB, Host, uuid_of

MAIN = """
import sys, typer
from draftmill.commands import gpu
from draftmill.errors import UserError
app = typer.Typer()
gpu.register(app)
try:
    app()
except UserError as error:
    print(error, file=sys.stderr)
    raise SystemExit(3)
"""


@pytest.fixture
def config(policy: GatePolicy, tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(f"target: {{}}\ngate: {policy.model_dump_json()}\n")
    return path


def run(config: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", MAIN, *arguments, "--config", str(config)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.slow
def test_exit_statuses(host: Host, config: Path) -> None:
    assert run(config, "gate").returncode == 0
    host.set(1, used=58 * GIB)
    busy = run(config, "gate")
    assert busy.returncode == 1
    assert "memory_held_no_visible_process: 59392 MiB used" in busy.stdout
    assert run(config, "gate", "--gpus", "1").returncode == 0
    assert run(config, "gate", "--gpus", uuid_of(0)).returncode == 0
    assert run(config, "gate", "--gpus", uuid_of(1)[:12]).returncode == 1
    host.fault("fail nvmlInitWithFlags 18 -1")
    unknown = run(config, "gate")
    assert unknown.returncode == 2
    assert "NVML error 18" in unknown.stdout


def test_the_record_is_printed_whole(host: Host, config: Path) -> None:
    out = run(config, "gate", "--json", "--gpus", f"{uuid_of(0)},{uuid_of(1)}")
    verdict = Verdict.model_validate_json(out.stdout)
    assert out.stdout.count("\n") == 1
    assert (verdict.requested, verdict.verdict) == (host.uuids, "free")


def test_a_gpu_that_is_not_there_is_unknown(host: Host, config: Path) -> None:
    out = run(config, "gate", "--json", "--gpus", uuid_of(7))
    assert out.returncode == 2
    assert [r["code"] for r in json.loads(out.stdout)["reasons"]] == ["gpu_missing"]
    assert run(config, "gate", "--gpus", "3").returncode == 2


def test_waiting_by_hand(host: Host, config: Path) -> None:
    host.set(0, used=58 * GIB)
    assert run(config, "gate", "--wait", "0.5").returncode == 1
    command = [sys.executable, "-c", MAIN, "gate", "--wait", "120", "--config", str(config)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr is not None
        assert waiting.stderr.readline().startswith("waiting: ")
        host.set(0, used=0)
        assert waiting.wait(110) == 0


def test_a_leased_gpu_is_busy_by_hand(host: Host, config: Path, policy: GatePolicy) -> None:
    with gate.lease(policy, "cuda", gpus=1, run_id="run-7", stage="train", shard="s9"):
        out = run(config, "gate")
        table = run(config, "gpus")
    assert out.returncode == 1
    assert "run run-7" in out.stdout
    row = next(line for line in table.stdout.splitlines() if uuid_of(0) in line)
    assert all(word in row for word in (f"job {os.getpid()}", "run-7", "train", "s9", "busy (leased)"))
    other = next(line for line in table.stdout.splitlines() if uuid_of(1) in line)
    assert other.split()[-1] == "free"


def test_pause_and_resume_by_hand(host: Host, config: Path, policy: GatePolicy) -> None:
    folder = lease.lock_dir(policy.lock_dir)
    assert "is paused" in run(config, "gpus", "pause", "GPU-00000001").stdout
    assert pause.paused(folder) == (uuid_of(1),)
    assert "busy (paused)" in run(config, "gpus").stdout
    host.fault("fail nvmlInitWithFlags 9 -1")
    assert "is back" in run(config, "gpus", "resume", "GPU-00000001").stdout
    assert pause.paused(folder) == ()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("gate", "--gpus", "two"), "--gpus two is neither a count nor a UUID such as GPU-1a2b; see draftmill gpus."),
        (("gpus", "pause", "GPU-f"), "GPU-f fits 0 GPUs of this host; `draftmill gpus` lists their UUIDs."),
        (("gpus", "pause", "GPU-"), "GPU- fits 2 GPUs of this host; `draftmill gpus` lists their UUIDs."),
    ],
)
def test_a_mistake_is_one_sentence(host: Host, config: Path, arguments: tuple[str, ...], sentence: str) -> None:
    out = run(config, *arguments)
    assert (out.returncode, out.stderr.strip()) == (3, sentence)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("gate: {max_used: 3}", "gate.max_used: Extra inputs are not permitted"),
        ("gate: {poll_s: 0}", "gate.poll_s: Input should be greater than 0"),
        ("- 1", "holds no mapping of keys"),
        ("gate: [", "is not valid YAML"),
        ("gate: {lock_dir: é}", "is not UTF-8 text"),
    ],
)
def test_a_wrong_config_is_one_sentence(host: Host, tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_bytes(text.encode("latin-1"))
    out = run(path, "gate")
    assert out.returncode == 3
    assert sentence in out.stderr
    assert "Traceback" not in out.stderr


def test_the_command_imports_nothing_heavy(host: Host, config: Path) -> None:
    code = MAIN.replace("    app()", "    app(standalone_mode=False)").replace("raise SystemExit(3)", "pass") + (
        "\nheavy = 'torch transformers snakemake pyarrow boto3 numpy'.split()\n"
        "print([m for m in heavy if m in sys.modules], file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", code, "gate", "--json", "--config", str(config)]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert out.stderr == "[]\n"
