"""Servers of ours between jobs, by a stand-in process: used by their own spec, asked to leave by any other."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftmill.errors import UserError
from draftmill.gpu import gate, groups, lease, pause, processes
from draftmill.gpu.policy import GatePolicy
from tests.waiting import until

from .conftest import GIB, Host, uuid_of

JOB: dict[str, Any] = {"run_id": "run-1", "stage": "generate", "shard": "s1"}
SPEC = "sglang qwen3 tp=1"
# Frees its memory in the fake's state when it is told to end, as a server does.
SERVER = """
import os, signal, sys, time
path, stubborn = sys.argv[1], sys.argv[2] == "stubborn"
def leave(*_):
    with open(path + ".left", "w") as f:
        f.write("TERM")
    if not stubborn:
        sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


class Started:
    def __init__(self, process: "subprocess.Popen[str]", uuids: tuple[str, ...]) -> None:
        self.process, self.uuids = process, uuids


@pytest.fixture
def serve(host: Host, policy: GatePolicy, tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Start a stand-in server as a job does, and let the job end."""
    begun: list[subprocess.Popen[str]] = []

    def start(gpus: int = 1, spec: str = SPEC, how: str = "polite") -> Started:
        with gate.lease(policy, "cuda", gpus=gpus, server_spec=spec, **JOB) as held:
            assert held.server is None
            process = subprocess.Popen(
                [sys.executable, "-c", SERVER, str(tmp_path / "server"), how],
                env={**os.environ, **held.environment()},
                pass_fds=held.pass_fds,
                start_new_session=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            begun.append(process)
            assert process.stdout is not None
            process.stdout.readline()
            for index, gpu in enumerate(host.gpus):
                if gpu.uuid in held.uuids:
                    host.process(index, process.pid, 60 * GIB)
                    host.set(index, used=60 * GIB)
            held.hand_over(process.pid, spec)
            return Started(process, held.uuids)

    yield start
    for process in begun:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=10)
        if process.stdout:
            process.stdout.close()


def frees_memory_when_gone(host: Host, server: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver gives the memory back when the process is gone: the next look at the locks finds it so."""
    real = lease.is_held

    def look(path: Path) -> bool:
        held = real(path)
        if not held and host.processes:
            server.process.wait(10)  # its lock goes a moment before it can be waited for
            host.heal()
            for index, gpu in enumerate(host.gpus):
                if gpu.uuid in server.uuids:
                    host.set(index, used=0)
        return held

    from draftmill.gpu import servers

    monkeypatch.setattr(servers, "is_held", look)


def take(policy: GatePolicy, gpus: int = 1, spec: str | None = None, **more: Any) -> Any:
    return gate.lease(policy, "cuda", gpus=gpus, server_spec=spec, **{**JOB, **more})


def test_the_lease_is_the_servers_once_its_job_is_over(policy: GatePolicy, serve: Callable[..., Started]) -> None:
    server = serve()
    folder = lease.lock_dir(policy.lock_dir)
    record = lease.current(folder, uuid_of(0))
    assert record is not None
    assert (record.kind, record.spec, record.holder.pid) == ("server", SPEC, server.process.pid)
    server.process.kill()
    server.process.wait()
    until(lambda: not lease.is_held(lease.device_path(folder, uuid_of(0))), "the lease to end with the server")


def test_a_job_of_the_same_spec_uses_it(policy: GatePolicy, serve: Callable[..., Started]) -> None:
    server = serve()
    with take(policy, spec=SPEC, shard="s2") as held:
        assert held.uuids == server.uuids
        assert held.server is not None
        assert held.server.holder.pid == server.process.pid
        assert held.pass_fds == ()
        assert held.verdict.gpus[0].server is not None
        assert held.attest()[uuid_of(0)]["state"] == "ours"
        with take(policy, spec=SPEC) as second:
            assert second.server is None
            assert second.uuids == (uuid_of(1),)
    assert server.process.poll() is None


def test_another_job_prefers_a_gpu_without_a_server(policy: GatePolicy, serve: Callable[..., Started]) -> None:
    server = serve()
    with take(policy) as held:
        assert held.uuids == (uuid_of(1),)
    assert server.process.poll() is None


def test_any_other_job_asks_it_to_leave(
    host: Host, policy: GatePolicy, serve: Callable[..., Started], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = serve()
    frees_memory_when_gone(host, server, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", uuid_of(0))
    said: list[str] = []
    with take(policy, spec="another", notify=said.append) as held:
        assert held.uuids == (uuid_of(0),)
        assert held.verdict.verdict == "free"
        assert len(held.pass_fds) == 1
    assert (tmp_path / "server.left").read_text() == "TERM"
    assert server.process.wait(timeout=10) == 0
    assert f"asking server generate s1, pid {server.process.pid}" in said[0]


def test_no_server_leaves_for_a_job_that_gets_too_few(
    host: Host, policy: GatePolicy, serve: Callable[..., Started], tmp_path: Path
) -> None:
    server = serve()
    host.set(1, ecc=4)
    with pytest.raises(gate.GpuBusy), take(policy, gpus=2):
        pass
    with take(policy.model_copy(update={"expected_uuids": (uuid_of(1),), "max_ecc_uncorrected": 9})):
        said: list[str] = []

        def notify(text: str) -> None:
            said.append(text)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), take(policy, gpus=2, notify=notify):
            pass
    assert said[0].startswith("waiting for a GPU: " + uuid_of(1))
    assert server.process.poll() is None


def test_a_server_that_ignores_the_request_is_killed(
    host: Host, policy: GatePolicy, serve: Callable[..., Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(how="stubborn")
    frees_memory_when_gone(host, server, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", uuid_of(0))
    with take(policy.model_copy(update={"server_stop_s": 0.2})) as held:
        assert held.uuids == (uuid_of(0),)
    assert server.process.wait(timeout=10) == -signal.SIGKILL


def test_a_server_of_two_gpus_leaves_both(
    host: Host, policy: GatePolicy, serve: Callable[..., Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(gpus=2)
    frees_memory_when_gone(host, server, monkeypatch)
    with take(policy, gpus=2, spec=SPEC) as held:
        assert held.server is not None
        assert held.uuids == server.uuids
    with take(policy) as held:
        assert held.server is None
        with take(policy) as other:
            assert {*held.uuids, *other.uuids} == set(host.uuids)


def test_a_sentinel_proves_without_asking_anybody_to_leave(
    policy: GatePolicy, serve: Callable[..., Started], tmp_path: Path
) -> None:
    serve(gpus=2)
    verdict = gate.sentinel(policy, "cuda", gpus=2, server_spec="another", **JOB)
    assert verdict.verdict == "free"
    assert [gpu.server is not None for gpu in verdict.gpus] == [True, True]
    assert not (tmp_path / "server.left").exists()


def test_a_stranger_on_the_servers_gpu_is_an_obstacle(
    host: Host, policy: GatePolicy, serve: Callable[..., Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", uuid_of(0))
    host.process(0, os.getppid(), GIB)
    with pytest.raises(gate.GpuBusy) as error:
        gate.sentinel(policy, "cuda", gpus=1, server_spec=SPEC, **JOB)
    assert [(r.code, r.value) for r in error.value.verdict.reasons] == [("compute_process", os.getppid())]


def test_a_server_that_was_not_attested_or_is_dead_is_not_believed(
    policy: GatePolicy, serve: Callable[..., Started]
) -> None:
    serve()
    found = lease.occupant(lease.lock_dir(policy.lock_dir), uuid_of(0))
    assert found is not None
    assert found.record is not None
    assert found.server
    from dataclasses import replace

    record = found.record
    for changed in (
        replace(record, attested=False),
        replace(record, kind="job"),
        replace(record, uid=record.uid + 1),
        replace(record, holder=processes.Process(record.holder.pid, record.holder.start + 1)),
    ):
        assert not lease.Occupant(found.uuid, changed).server


def test_a_reused_group_number_is_not_signalled(policy: GatePolicy, serve: Callable[..., Started]) -> None:
    from dataclasses import replace

    from draftmill.gpu import servers

    server = serve()
    record = lease.current(lease.lock_dir(policy.lock_dir), uuid_of(0))
    assert record is not None
    stale = replace(record, holder=processes.Process(record.holder.pid, record.holder.start - 5))
    assert not servers.signal_group(stale, signal.SIGKILL)
    assert server.process.poll() is None


def test_only_a_group_leader_can_be_a_server(host: Host, policy: GatePolicy) -> None:
    with take(policy, spec=SPEC) as held:
        child = subprocess.Popen(["sleep", "600"], pass_fds=held.pass_fds)
        with pytest.raises(UserError, match="start_new_session=True"):
            held.hand_over(child.pid, SPEC)
        child.kill()
        child.wait()
        with pytest.raises(UserError, match="has already ended"):
            held.hand_over(child.pid, SPEC)


def test_a_paused_gpus_server_leaves_with_the_shard(
    host: Host, policy: GatePolicy, serve: Callable[..., Started]
) -> None:
    server = serve()
    folder = lease.lock_dir(policy.lock_dir)
    with take(policy, spec=SPEC):
        pause.pause(folder, uuid_of(0))
        assert server.process.poll() is None
    assert server.process.wait(timeout=20) == 0
    pause.resume(folder, uuid_of(0))


def test_a_server_is_no_leftover_of_its_first_job(policy: GatePolicy, serve: Callable[..., Started]) -> None:
    server = serve()
    written = [record for _, record in groups.recorded(lease.lock_dir(policy.lock_dir))]
    assert [(r.kind, r.leader.pid, r.owner.pid) for r in written] == [
        ("server", server.process.pid, server.process.pid)
    ]
    assert json.dumps(written[0].uuids)
