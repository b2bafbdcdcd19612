"""What dead runs left is ended; nothing that is not provably ours is touched."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftmill.gpu import gate, groups, lease, processes, reclaim, shm
from draftmill.gpu.policy import GatePolicy
from tests.waiting import until

from .conftest import GIB, Host, uuid_of

Spawn = Callable[..., "subprocess.Popen[str]"]
# A job that starts a child with its lease, a grandchild without it, and waits to be killed.
JOB = """
import os, subprocess, sys, time
from draftmill.gpu import gate
from draftmill.gpu.policy import GatePolicy
policy = GatePolicy.model_validate_json(sys.argv[1])
with gate.lease(policy, "cuda", gpus=1, run_id="dead-run", stage="extract", shard="s1") as held:
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **held.environment()},
                             pass_fds=held.pass_fds, start_new_session=True, stdout=subprocess.PIPE, text=True)
    held.started(child.pid)
    print(child.pid, child.stdout.readline().strip(), flush=True)
    time.sleep(600)
"""


@pytest.fixture
def dead_run(host: Host, policy: GatePolicy, spawn: Spawn) -> Iterator[list[int]]:
    """The pids of a child and a grandchild whose run was killed; the child holds GPU 0."""
    launcher = spawn(JOB, policy.model_dump_json())
    assert launcher.stdout is not None
    pids = [int(word) for word in launcher.stdout.readline().split()]
    host.process(0, pids[0], 58 * GIB)
    host.set(0, used=58 * GIB)
    launcher.kill()
    launcher.wait()
    left = [found for pid in pids if (found := processes.identify(pid)) is not None]
    yield pids
    assert processes.end(left, 0.1) == []


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    for function in (shm.look, shm.used, shm.remove):
        monkeypatch.setattr(shm, function.__name__, at(function, folder))
    return folder


def at(function: Any, folder: Path) -> Any:
    return lambda *args, **kwargs: function(*args, folder=folder, **kwargs)


def test_nothing_to_do(host: Host, policy: GatePolicy, shared: Path) -> None:
    plan = reclaim.find(policy)
    assert (plan.processes, plan.files, plan.untouched, plan.stale) == ({}, [], [], [])
    assert reclaim.carry_out(policy, plan).verdict.verdict == "free"


def test_what_a_dead_run_left_is_ended_and_the_gate_says_free(
    host: Host, policy: GatePolicy, dead_run: list[int], shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(gate.GpuBusy):
        gate.sentinel(
            policy.model_copy(update={"expected_uuids": (uuid_of(0),)}),
            "cuda",
            gpus=1,
            run_id="new",
            stage="x",
            shard="y",
        )
    plan = reclaim.find(policy)
    assert {process.pid for process in plan.processes} == set(dead_run)
    assert all("dead-run" in found.why for found in plan.processes.values())
    real = processes.end

    def end(*args: Any, **kwargs: Any) -> Any:
        left = real(*args, **kwargs)
        host.heal()
        host.set(0, used=0)
        return left

    monkeypatch.setattr(reclaim.processes, "end", end)
    outcome = reclaim.carry_out(policy, plan)
    assert {found.process.pid for found in outcome.ended} == set(dead_run)
    assert (outcome.stuck, outcome.verdict.verdict) == ((), "free")
    assert list(groups.recorded(lease.lock_dir(policy.lock_dir))) == []


def test_a_dry_look_changes_nothing(policy: GatePolicy, dead_run: list[int], shared: Path) -> None:
    reclaim.find(policy)
    assert all(processes.identify(pid) is not None for pid in dead_run)


def test_a_living_run_is_listed_and_left_alone(host: Host, policy: GatePolicy, shared: Path) -> None:
    with gate.lease(policy, "cuda", gpus=1, run_id="alive", stage="train", shard=None) as held:
        child = subprocess.Popen(["sleep", "600"], env={**os.environ, **held.environment()}, pass_fds=held.pass_fds)
        held.started(child.pid)
        plan = reclaim.find(policy)
        assert plan.processes == {}
        assert any("run alive" in text for text in plan.untouched)
        child.kill()
        child.wait()


def test_a_foreign_process_is_listed_and_never_signalled(
    host: Host, policy: GatePolicy, spawn: Spawn, shared: Path
) -> None:
    stranger = spawn("import time; time.sleep(600)")
    host.process(1, stranger.pid, 9 * GIB)
    host.set(1, used=9 * GIB)
    plan = reclaim.find(policy)
    outcome = reclaim.carry_out(policy, plan)
    assert plan.processes == {}
    assert any(f"pid {stranger.pid} of" in text for text in plan.untouched)
    assert stranger.poll() is None
    assert outcome.verdict.verdict == "busy"


def test_memory_of_nobody_is_said(host: Host, policy: GatePolicy, shared: Path) -> None:
    host.set(1, used=9 * GIB)
    assert reclaim.find(policy).untouched == [f"GPU {uuid_of(1)}: memory is used and no process is visible"]


def test_a_reused_pid_is_not_a_leftover(host: Host, policy: GatePolicy, spawn: Spawn, shared: Path) -> None:
    stranger = spawn("import time; time.sleep(600)")
    folder = lease.lock_dir(policy.lock_dir)
    dead = processes.Process(stranger.pid, 1)
    groups.remember(folder, lease.new_record((uuid_of(0),), "dead-run", None, None, dead), dead, "group")
    plan = reclaim.find(policy)
    assert plan.processes == {}
    assert len(plan.stale) == 1
    reclaim.carry_out(policy, plan)
    assert stranger.poll() is None
    assert list(groups.recorded(folder)) == []


def test_files_are_removed_only_when_their_maker_is_dead_and_ours(
    host: Host, policy: GatePolicy, spawn: Spawn, shared: Path
) -> None:
    dead = spawn("pass")
    dead.wait()
    mine, living, nameless, other = (
        f"sgl_shm_pool_{dead.pid}_0123abcd",
        f"multi_tokenizer_args_{os.getpid()}",
        "psm_0a1b2c3d",
        "something_else",
    )
    for name in (mine, living, nameless, other):
        (shared / name).write_bytes(b"x" * 100)
    plan = reclaim.find(policy)
    assert [file.name for file in plan.files] == [mine]
    outcome = reclaim.carry_out(policy, plan)
    assert [file.name for file in outcome.removed] == [mine]
    assert sorted(os.listdir(shared)) == sorted([living, nameless, other])


def test_in_a_container_a_makers_pid_proves_nothing(host: Host, policy: GatePolicy, spawn: Spawn, shared: Path) -> None:
    dead = spawn("pass")
    dead.wait()
    (shared / f"multi_tokenizer_args_{dead.pid}").write_bytes(b"x")
    blind = policy.model_copy(update={"pid_namespace": "foreign"})
    plan = reclaim.find(blind)
    assert plan.files == []
    assert any("not provably dead" in text for text in plan.untouched)


def test_files_of_a_dead_run_go_with_it_unless_somebody_uses_them(
    policy: GatePolicy, dead_run: list[int], shared: Path, spawn: Spawn
) -> None:
    for name in ("psm_0a1b2c3d", "psm_4e5f6a7b", f"sgl_shm_pool_{dead_run[0]}_0123abcd"):
        (shared / name).write_bytes(b"x" * 100)
    user = spawn(
        "import sys, time; f = open(sys.argv[1]); print(1, flush=True); time.sleep(600)", str(shared / "psm_4e5f6a7b")
    )
    assert user.stdout is not None
    user.stdout.readline()
    outcome = reclaim.carry_out(policy, reclaim.find(policy))
    assert sorted(file.name for file in outcome.removed) == ["psm_0a1b2c3d", f"sgl_shm_pool_{dead_run[0]}_0123abcd"]


@pytest.mark.parametrize(
    ("name", "pid"),
    [
        ("sgl_shm_mm_pool_123_0123abcd", 123),
        ("multi_tokenizer_args_77", 77),
        ("torch_55_abc_1", 55),
        ("sem.loky-42-x1y2", 42),
        ("sglang_loads_30000.shm", None),
        ("psm_0a1b2c3d", None),
        ("nccl-AbC123", None),
        ("nccl-shm-recv-1-2", None),
        ("sem.mp-abcd", None),
    ],
)
def test_engine_names_are_known(name: str, pid: int | None) -> None:
    known = shm.recognise(name)
    assert known is not None
    assert known.creator_pid == pid


@pytest.mark.parametrize("name", ["pulse-shm-1", "sgl_shm_", "torch_", "multi_tokenizer_args_", "snap.x", "nccl"])
def test_other_names_are_not(name: str) -> None:
    assert shm.recognise(name) is None


def test_an_orphan_that_dropped_its_marks_is_found_by_its_lease(
    host: Host, policy: GatePolicy, spawn: Spawn, shared: Path
) -> None:
    code = JOB.replace("env={**os.environ, **held.environment()}", "env=dict(os.environ)").replace(
        "    held.started(child.pid)\n", ""
    )
    launcher = spawn(code, policy.model_dump_json())
    assert launcher.stdout is not None
    child, grandchild = (int(word) for word in launcher.stdout.readline().split())
    launcher.kill()
    launcher.wait()
    plan = reclaim.find(policy)
    assert [process.pid for process in plan.processes] == [child]
    assert "holds the lease" in next(iter(plan.processes.values())).why
    reclaim.carry_out(policy, plan)
    until(lambda: processes.identify(child) is None, "the orphan's end")
    assert processes.identify(grandchild) is not None
    os.kill(grandchild, 9)


def test_reclaim_from_the_command_line(host: Host, policy: GatePolicy, dead_run: list[int], tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"gate: {policy.model_dump_json()}\n")
    code = "import typer; from draftmill.commands import gpu; a = typer.Typer(); gpu.register(a); a()"
    run = [sys.executable, "-c", code, "reclaim", "--config", str(config)]
    looked = subprocess.run([*run, "--dry-run"], capture_output=True, text=True, check=True)
    assert f"would be ended: pid {dead_run[0]}" in looked.stdout
    assert processes.identify(dead_run[0]) is not None
    done = subprocess.run([*run, "--no-dry-run"], capture_output=True, text=True, check=False)
    assert "2 ended" in done.stdout
    assert processes.identify(dead_run[0]) is None
