"""Locks, records and identities: a lease lives as long as what uses the GPU, and a reused pid is never the old one."""

import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from draftmill.errors import UserError
from draftmill.gpu import groups, lease, pause, processes
from draftmill.gpu.processes import Process
from tests.waiting import until

UUID = "GPU-1"
SLEEP = "import time; time.sleep(600)"
HOLD = """
import os, subprocess, sys, time
from pathlib import Path
from draftmill.gpu import lease
handle = lease.try_lock(lease.device_path(Path(sys.argv[1]), "GPU-1"))
lease.write_record(handle, lease.for_gpu(lease.new_record(("GPU-1",), "run", "extract", "s1", None), "GPU-1"))
inherit = (handle,) if sys.argv[2] == "inherit" else ()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=inherit)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return lease.lock_dir(str(tmp_path / "leases"))


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_one_lock_one_holder(folder: Path) -> None:
    path = lease.device_path(folder, UUID)
    handle = lease.try_lock(path)
    assert handle is not None
    assert lease.try_lock(path) is None
    assert lease.is_held(path)
    os.close(handle)
    assert not lease.is_held(path)


def test_a_lease_outlives_its_launcher_and_dies_with_its_user(
    folder: Path, spawn: Callable[..., "subprocess.Popen[str]"]
) -> None:
    launcher = spawn(HOLD, str(folder), "inherit")
    assert launcher.stdout is not None
    child = int(launcher.stdout.readline())
    path = lease.device_path(folder, UUID)
    try:
        found = lease.occupant(folder, UUID)
        assert found is not None
        assert not found.orphaned
        launcher.kill()
        launcher.wait()
        orphan = lease.occupant(folder, UUID)
        assert orphan is not None
        assert orphan.orphaned
        assert lease.try_lock(path) is None
        assert [p.pid for p in processes.holders_of(path)] == [child]
    finally:
        end(child)
    until(lambda: not lease.is_held(path), "the lease to end with the child")


def test_without_inheritance_the_lock_would_be_free_under_a_living_child(
    folder: Path, spawn: Callable[..., "subprocess.Popen[str]"]
) -> None:
    launcher = spawn(HOLD, str(folder), "alone")
    assert launcher.stdout is not None
    child = int(launcher.stdout.readline())
    try:
        launcher.kill()
        launcher.wait()
        assert processes.identify(child) is not None
        assert not lease.is_held(lease.device_path(folder, UUID))
    finally:
        end(child)


def test_a_removed_lock_file_excludes_nobody_and_is_not_taken(folder: Path) -> None:
    path = lease.device_path(folder, UUID)
    first = lease.try_lock(path)
    assert first is not None
    path.unlink()
    second = lease.try_lock(path)
    assert second is not None
    assert os.path.samestat(os.fstat(second), path.stat())
    os.close(first)
    os.close(second)


def test_the_record_comes_back_whole(folder: Path) -> None:
    record = lease.for_gpu(lease.new_record((UUID,), "run", "extract", "s1", None), UUID)
    handle = lease.try_lock(lease.device_path(folder, UUID))
    assert handle is not None
    lease.write_record(handle, replace(record, shard="s" * 500))
    lease.write_record(handle, record)
    assert lease.read_record(lease.device_path(folder, UUID)) == record
    os.close(handle)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"schema": "gpu-lease/1"}', '{"schema": "other"}', "\0" * 100]
)
def test_a_broken_record_names_nobody(folder: Path, text: str) -> None:
    path = lease.device_path(folder, UUID)
    path.write_text(text)
    assert lease.read_record(path) is None


def test_a_reused_pid_is_not_the_holder(folder: Path) -> None:
    record = lease.new_record((UUID,), "run", None, None, None)
    assert record.holder_alive()
    other = replace(record, holder=Process(record.holder.pid, record.holder.start - 1))
    assert not other.holder_alive()
    assert lease.Occupant(UUID, other).orphaned


def test_a_holder_of_another_namespace_is_believed(folder: Path) -> None:
    record = replace(lease.new_record((UUID,), "run", None, None, None), holder=Process(999_999, 1), pid_ns="pid:[1]")
    assert record.holder_alive()


def test_a_zombie_is_dead(spawn: Callable[..., "subprocess.Popen[str]"]) -> None:
    child = spawn("pass")
    until(lambda: (s := processes.stat(child.pid)) is not None and s.state == "Z", "a zombie")
    assert processes.identify(child.pid) is None


def test_a_signal_never_hits_a_reused_pid(spawn: Callable[..., "subprocess.Popen[str]"]) -> None:
    child = spawn(SLEEP)
    real = processes.identify(child.pid)
    assert real is not None
    assert not processes.signal_process(Process(real.pid, real.start + 1), signal.SIGKILL)
    assert processes.alive(real)
    assert processes.end([real], 10) == []
    assert not processes.alive(real)


def test_a_process_that_ignores_term_is_killed(spawn: Callable[..., "subprocess.Popen[str]"]) -> None:
    child = spawn("import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)")
    assert child.stdout is not None
    child.stdout.readline()
    real = processes.identify(child.pid)
    assert real is not None
    assert processes.end([real], 0.1) == []


def test_a_name_with_any_character_does_not_confuse_the_reading(tmp_path: Path) -> None:
    program = tmp_path / ") R 1 (x"
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([str(program), "600"])
    try:
        until(lambda: (s := processes.stat(child.pid)) is not None and s.comm == program.name, "the new name")
        status = processes.stat(child.pid)
        assert status is not None
        assert (status.parent, status.group) == (os.getpid(), os.getpgrp())
    finally:
        child.kill()
        child.wait()


def test_a_folder_where_locks_do_not_bind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_filesystem", lambda folder: "nfs4")
    with pytest.raises(UserError, match=r"is on nfs4, where locks do not bind; set gate\.lock_dir"):
        lease.lock_dir(str(tmp_path))


def test_the_file_system_is_found(tmp_path: Path) -> None:
    assert lease._filesystem(Path("/proc/self")) == "proc"
    assert lease._filesystem(tmp_path) not in ("", "proc")


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be made .* set gate\.lock_dir"):
        lease.lock_dir(str(tmp_path / "file" / "leases"))


def test_pause_and_resume(folder: Path) -> None:
    assert pause.pause(folder, UUID)
    assert not pause.pause(folder, UUID)
    assert pause.paused(folder) == (UUID,)
    assert (pause.who(folder, UUID) or {})["by"] == processes.user_name(os.getuid())
    assert pause.resume(folder, UUID)
    assert not pause.resume(folder, UUID)
    assert not pause.is_paused(folder, UUID)


def test_group_records_of_others_are_not_believed(folder: Path) -> None:
    made = groups.private_folder(folder)
    made.chmod(0o777)
    with pytest.raises(UserError, match="cannot be trusted"):
        groups.private_folder(folder)


def test_survivors_are_known_by_the_token_once_the_leader_is_dead(
    folder: Path, spawn: Callable[..., "subprocess.Popen[str]"]
) -> None:
    record = lease.new_record((UUID,), "run", "extract", "s1", None)
    marked = {**os.environ, groups.MARKER: record.token}
    parent = spawn(
        "import subprocess, sys, time\n"
        "c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(c.pid, flush=True); time.sleep(600)",
        env=marked,
    )
    stranger = spawn(SLEEP)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    leader = processes.identify(parent.pid)
    assert leader is not None
    groups.remember(folder, record, leader, "group")
    (_, written), *_ = groups.recorded(folder)
    assert {p.pid for p in groups.survivors(written)} == {parent.pid, child}
    parent.kill()
    parent.wait()
    assert {p.pid for p in groups.survivors(written)} == {child}
    # The group's number given to somebody else: no token, so not ours.
    reused = replace(written, token="0" * 16, leader=Process(stranger.pid, 1))
    assert groups.survivors(reused) == []
    end(child)
