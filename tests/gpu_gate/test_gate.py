"""The gate that jobs stand behind, against a host that changes while it looks."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftmill.errors import UserError
from draftmill.gpu import gate, groups, lease, pause, processes, proof
from draftmill.gpu.check import check
from draftmill.gpu.policy import GatePolicy
from draftmill.gpu.record import Verdict
from tests.waiting import until

from .conftest import GIB, MIB, Host, uuid_of

Spawn = Callable[..., "subprocess.Popen[str]"]
JOB: dict[str, Any] = {"run_id": "run-1", "stage": "extract", "shard": "s1"}


def take(policy: GatePolicy, gpus: int = 1, **more: Any) -> Any:
    return gate.lease(policy, "cuda", gpus=gpus, **{**JOB, **more})


def codes(error: pytest.ExceptionInfo[gate.GateRefused]) -> set[str]:
    return {r.code for r in error.value.verdict.reasons}


def test_the_cpu_needs_no_gpu(policy: GatePolicy) -> None:
    verdict = gate.sentinel(policy, "cpu", gpus=1, **JOB)
    assert (verdict.verdict, verdict.exit_code, verdict.probe.status) == ("not_required", 0, "not_run")
    with gate.lease(policy, "cpu", gpus=1, **JOB) as held:
        assert (held.uuids, held.pass_fds, held.environment(), held.attest()) == ((), (), {}, {})
    assert not Path(policy.lock_dir or "").exists()


def test_a_free_gpu_is_leased_and_given_back(host: Host, policy: GatePolicy) -> None:
    folder = lease.lock_dir(policy.lock_dir)
    with take(policy) as held:
        assert held.uuids == (uuid_of(0),)
        assert held.environment()["CUDA_VISIBLE_DEVICES"] == uuid_of(0)
        assert held.environment()["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        assert len(held.pass_fds) == 1
        assert held.verdict.verdict == "free"
        record = lease.current(folder, uuid_of(0))
        assert record is not None
        assert (record.holder.pid, record.stage, record.shard) == (os.getpid(), "extract", "s1")
    assert lease.current(folder, uuid_of(0)) is None
    assert list(groups.recorded(folder)) == []


def test_one_clean_sample_suffices_when_idle(host: Host, policy: GatePolicy) -> None:
    verdict = gate.sentinel(policy, "cuda", gpus=2, **JOB)
    assert verdict.settle is not None
    assert (verdict.settle.samples, verdict.requested) == (1, host.uuids)
    assert (verdict.second_sensor.status, verdict.second_sensor.agrees) == ("ok", True)


def test_a_level_above_idle_must_settle(host: Host, policy: GatePolicy) -> None:
    host.set(0, used=200 * MIB)
    verdict = gate.sentinel(policy, "cuda", gpus=2, **JOB)
    assert verdict.settle is not None
    assert (verdict.settle.samples, verdict.settle.used_max_mib) == (3, 200)


def test_the_record_is_one_document_that_reads_back(host: Host, policy: GatePolicy, tmp_path: Path) -> None:
    verdict = gate.sentinel(policy, "cuda", gpus=1, **JOB)
    path = tmp_path / "sentinel.json"
    path.write_text(verdict.text())
    assert gate.read_sentinel(path, "run-1") == verdict
    assert json.loads(verdict.text())["schema"] == "gpu-gate/1"
    assert json.loads(verdict.text())["policy"]["max_used_mib"] == 256


def test_a_sentinel_of_another_run_or_boot_proves_nothing(host: Host, policy: GatePolicy, tmp_path: Path) -> None:
    verdict = gate.sentinel(policy, "cuda", gpus=1, **JOB)
    path = tmp_path / "sentinel.json"
    path.write_text(verdict.text())
    with pytest.raises(UserError, match=r"is of run run-1 .* proves nothing for run run-2"):
        gate.read_sentinel(path, "run-2")
    path.write_text(verdict.model_copy(update={"boot_id": "another"}).text())
    with pytest.raises(UserError, match="proves nothing"):
        gate.read_sentinel(path, "run-1")
    path.write_text(verdict.text()[:-20])
    with pytest.raises(UserError, match="is no verdict record"):
        gate.read_sentinel(path, "run-1")


def test_memory_without_a_process_refuses_in_one_sentence(host: Host, policy: GatePolicy) -> None:
    for index in (0, 1):
        host.set(index, used=58 * GIB)
    with pytest.raises(gate.GpuBusy) as error:
        gate.sentinel(policy, "cuda", gpus=1, **JOB)
    assert codes(error) == {"memory_held_no_visible_process"}
    assert str(error.value).startswith("GPU gate: 1 GPU is wanted and busy (")
    assert "59392 MiB used and no process listed (limit 256)" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_busy_gpu_is_passed_over(host: Host, policy: GatePolicy) -> None:
    host.set(0, used=58 * GIB)
    with take(policy) as held:
        assert held.uuids == (uuid_of(1),)


def test_three_of_four_are_not_four(host: Host, policy: GatePolicy) -> None:
    host.show(3)
    with pytest.raises(gate.GateRefused) as error:
        gate.sentinel(policy, "cuda", gpus=4, **JOB)
    assert (codes(error), error.value.verdict.exit_code) == ({"too_few_gpus"}, 2)
    assert gate.sentinel(policy, "cuda", gpus=3, **JOB).verdict == "free"


def test_a_gpu_that_is_lost_between_two_looks_is_not_free(host: Host, policy: GatePolicy) -> None:
    host.show(1)
    host.fault("fail nvmlDeviceGetMemoryInfo_v2 15 0")
    with pytest.raises(gate.GateRefused) as error:
        gate.sentinel(policy, "cuda", gpus=1, **JOB)
    assert [(r.code, r.value) for r in error.value.verdict.reasons] == [("fact_unreadable", 15)]


@pytest.mark.parametrize("code", [9, 12, 18, 999])
def test_a_driver_that_fails_is_refused_without_waiting(host: Host, policy: GatePolicy, code: int) -> None:
    host.fault(f"fail nvmlInitWithFlags {code} -1")
    with pytest.raises(gate.GateRefused) as error:
        gate.sentinel(policy.model_copy(update={"wait_s": 600}), "cuda", gpus=1, **JOB)
    assert [(r.code, r.value) for r in error.value.verdict.reasons] == [("nvml_error", code)]
    assert not isinstance(error.value, gate.GpuBusy)


def test_a_hung_driver_is_unknown(host: Host, policy: GatePolicy) -> None:
    host.fault("hang nvmlDeviceGetMemoryInfo_v2 60 -1")
    with pytest.raises(gate.GateRefused) as error:
        gate.sentinel(policy.model_copy(update={"probe_timeout_s": 2.0}), "cuda", gpus=1, **JOB)
    assert codes(error) == {"probe_hung"}


def test_lingering_memory_is_waited_for_and_said(host: Host, policy: GatePolicy) -> None:
    host.show(1)
    host.set(0, used=58 * GIB)
    host.process(0, os.getpid(), 57 * GIB)
    said: list[str] = []

    def notify(text: str) -> None:
        said.append(text)
        if len(said) == 1:
            host.processes.clear()
            host.set(0, used=20 * GIB)
        else:
            host.set(0, used=0)

    verdict = gate.sentinel(policy.model_copy(update={"wait_s": 120}), "cuda", gpus=1, notify=notify, **JOB)
    assert f"pid {os.getpid()} of" in said[0]
    assert "58368 MiB" in said[0]
    assert "20480 MiB used and no process listed" in said[1]
    assert verdict.settle is not None
    assert (verdict.verdict, verdict.settle.samples) == ("free", 3)
    assert verdict.waited_s > 0


def test_memory_that_still_moves_is_not_free(host: Host, policy: GatePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    host.show(1)
    host.set(0, used=250 * MIB)
    levels = iter([150, 70, 0])
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: host.set(0, used=next(levels) * MIB))
    monkeypatch.setattr(proof, "time", clock)
    with pytest.raises(gate.GpuBusy) as error:
        gate.sentinel(policy, "cuda", gpus=1, **JOB)
    assert codes(error) == {"memory_not_settled"}


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("smi used 0 9000", "sensors_disagree"),
        ("smi cut 30", "second_sensor_garbled"),
        ("smi mix Warning", "second_sensor_garbled"),
        ("smi exit 255", "second_sensor_failed"),
    ],
)
def test_a_second_sensor_that_objects_is_unknown(host: Host, policy: GatePolicy, fault: str, code: str) -> None:
    host.show(1)
    host.fault(fault)
    with pytest.raises(gate.GateRefused) as error:
        gate.sentinel(policy, "cuda", gpus=1, **JOB)
    assert (codes(error), error.value.verdict.verdict) == ({code}, "unknown")


def test_an_outer_cuda_visible_devices_bounds_the_choice(
    host: Host, policy: GatePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with take(policy) as held:
        assert held.uuids == (uuid_of(1),)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-00000001")
    with take(policy) as held:
        assert held.uuids == (uuid_of(1),)
    with pytest.raises(gate.GateRefused) as error:
        gate.sentinel(policy, "cuda", gpus=2, **JOB)
    assert codes(error) == {"too_few_gpus"}


HOLDER = """
import json, subprocess, sys, time
from draftmill.gpu import gate
from draftmill.gpu.policy import GatePolicy
policy = GatePolicy.model_validate_json(sys.argv[1])
with gate.lease(policy, "cuda", gpus=int(sys.argv[2]), run_id=sys.argv[3], stage="train", shard=None) as held:
    print(json.dumps(held.uuids), flush=True)
    sys.stdin.readline()
"""


def holder(spawn: Spawn, policy: GatePolicy, gpus: int = 1, run: str = "other") -> "subprocess.Popen[str]":
    return spawn(HOLDER, policy.model_dump_json(), str(gpus), run, stdin=subprocess.PIPE)


def leased(process: "subprocess.Popen[str]") -> list[str]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the holder ended without a lease"
    return list(json.loads(line))


def let_go(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.close()


def test_two_workflows_never_share_a_gpu(host: Host, policy: GatePolicy, spawn: Spawn) -> None:
    host.show(4)
    racers = [holder(spawn, policy, run=f"run-{n % 2}") for n in range(4)]
    got = [uuid for racer in racers for uuid in leased(racer)]
    assert sorted(got) == sorted(host.uuids)


def test_the_fourth_job_waits_for_a_lease_while_one_gpu_is_sick(host: Host, policy: GatePolicy, spawn: Spawn) -> None:
    host.show(4)
    host.set(2, ecc=7)
    others = [holder(spawn, policy) for _ in range(3)]
    first = [leased(other)[0] for other in others]
    assert sorted(first) == [uuid_of(0), uuid_of(1), uuid_of(3)]
    fourth = holder(spawn, policy)
    state = {g.uuid: {r.code for r in g.reasons} for g in check(policy).gpus}
    assert "ecc_errors" in state[uuid_of(2)]
    assert fourth.poll() is None
    let_go(others[1])
    assert leased(fourth) == [first[1]]


def test_waiting_for_a_lease_outlasts_the_wait_limit_and_says_who(host: Host, policy: GatePolicy, spawn: Spawn) -> None:
    host.show(1)
    other = holder(spawn, policy)
    leased(other)
    said: list[str] = []

    def notify(text: str) -> None:
        said.append(text)
        let_go(other)

    assert gate.sentinel(policy, "cuda", gpus=1, notify=notify, **JOB).verdict == "free"
    assert f"pid {other.pid}" in said[0]
    assert "run other" in said[0]


def test_a_job_of_two_gets_two_or_nothing(host: Host, policy: GatePolicy, spawn: Spawn) -> None:
    host.show(3)
    one = holder(spawn, policy)
    assert leased(one) == [uuid_of(0)]
    with take(policy, 2) as held:
        assert held.uuids == (uuid_of(1), uuid_of(2))
        assert len(held.environment()["CUDA_VISIBLE_DEVICES"].split(",")) == 2
        assert len(held.pass_fds) == 2


def test_an_orphan_that_keeps_the_lease_is_busy(host: Host, policy: GatePolicy, spawn: Spawn) -> None:
    host.show(1)
    launcher = spawn(
        HOLDER.replace(
            "    print(json",
            "    subprocess.Popen(['sleep', '600'], pass_fds=held.pass_fds, env=held.environment())\n    print(json",
        ),
        policy.model_dump_json(),
        "1",
        "dead",
        stdin=subprocess.PIPE,
    )
    leased(launcher)
    launcher.kill()
    launcher.wait()
    with pytest.raises(gate.GpuBusy) as error:
        gate.sentinel(policy, "cuda", gpus=1, **JOB)
    assert codes(error) == {"lease_orphaned"}
    assert "draftmill reclaim" in str(error.value)
    (orphan,) = [p for p in lease_holders(policy) if p != os.getpid()]
    os.kill(orphan, 9)
    until(lambda: not lease.is_held(device(policy)), "the orphan's lease")


def device(policy: GatePolicy) -> Path:
    return lease.device_path(lease.lock_dir(policy.lock_dir), uuid_of(0))


def lease_holders(policy: GatePolicy) -> list[int]:
    return [p.pid for p in processes.holders_of(device(policy))]


def test_a_paused_gpu_is_passed_over_and_waited_for(host: Host, policy: GatePolicy) -> None:
    folder = lease.lock_dir(policy.lock_dir)
    pause.pause(folder, uuid_of(0))
    with take(policy) as held:
        assert held.uuids == (uuid_of(1),)
        said: list[str] = []

        def notify(text: str) -> None:
            said.append(text)
            pause.resume(folder, uuid_of(0))

        with take(policy, notify=notify) as second:
            assert second.uuids == (uuid_of(0),)
        assert "paused by" in said[0]


def detached() -> int:
    """The pid of a process that does not descend from this one any more."""
    return int(subprocess.check_output(["sh", "-c", "sleep 600 >/dev/null & echo $!"], start_new_session=True))


def test_attest_knows_its_own_memory(host: Host, policy: GatePolicy, spawn: Spawn) -> None:
    with take(policy) as held:
        assert held.attest()[uuid_of(0)]["state"] == "no_rise"
        child = spawn("import time; time.sleep(600)", env={**os.environ, **held.environment()}, pass_fds=held.pass_fds)
        held.started(child.pid)
        host.process(0, child.pid, 9 * GIB)
        host.set(0, used=9 * GIB + 300 * MIB)
        assert held.attest()[uuid_of(0)] == {"state": "ours", "rose_mib": 9516, "ours_mib": 9216}
        assert held.verdict.attestation is not None


def test_a_foreign_rise_ends_what_we_started_and_says_who(host: Host, policy: GatePolicy, spawn: Spawn) -> None:
    stranger = detached()
    with take(policy) as held:
        child = spawn("import time; time.sleep(600)", env={**os.environ, **held.environment()}, pass_fds=held.pass_fds)
        held.started(child.pid)
        host.process(0, child.pid, 9 * GIB)
        host.process(0, stranger, 5 * GIB)
        host.set(0, used=14 * GIB)
        with pytest.raises(gate.GpuBusy) as error:
            held.attest()
    (why,) = error.value.verdict.reasons
    assert (why.code, why.value) == ("foreign_process_after_launch", stranger)
    assert f"pid {stranger} of" in why.detail
    assert "sleep 600" in why.detail
    assert child.wait(timeout=10) < 0
    assert processes.identify(stranger) is not None
    os.kill(stranger, 9)


def test_memory_that_rises_and_is_nobodys_is_foreign(host: Host, policy: GatePolicy) -> None:
    with take(policy) as held:
        host.set(0, used=58 * GIB)
        with pytest.raises(gate.GpuBusy) as error:
            held.attest()
    assert codes(error) == {"foreign_memory_after_launch"}
    assert [r.value for r in error.value.verdict.reasons] == [59_392]


def test_in_a_container_a_rise_is_not_attributed(host: Host, policy: GatePolicy) -> None:
    blind = policy.model_copy(update={"pid_namespace": "foreign"})
    with take(blind) as held:
        host.process(0, os.getpid(), 9 * GIB)
        host.set(0, used=9 * GIB)
        assert held.attest()[uuid_of(0)]["state"] == "unattributed"


def test_attest_does_not_trust_a_gpu_that_it_cannot_read(host: Host, policy: GatePolicy) -> None:
    with take(policy) as held:
        host.fault("fail nvmlDeviceGetHandleByIndex_v2 15 0")
        with pytest.raises(gate.GateRefused) as error:
            held.attest()
    assert error.value.verdict.verdict == "unknown"


def test_a_retry_takes_another_gpu(host: Host, policy: GatePolicy) -> None:
    with take(policy) as held:
        assert held.uuids == (uuid_of(0),)
        host.set(0, used=58 * GIB)
        with pytest.raises(gate.GpuBusy):
            held.attest()
    with take(policy) as held:
        assert held.uuids == (uuid_of(1),)


def test_a_failed_job_frees_its_lease(host: Host, policy: GatePolicy) -> None:
    with pytest.raises(ZeroDivisionError), take(policy, 2):
        _ = 1 / 0
    assert check(policy).verdict == "free"


def test_threads_of_one_process_get_different_gpus(host: Host, policy: GatePolicy) -> None:
    both = threading.Barrier(2)
    got: list[str] = []

    def job() -> None:
        with take(policy) as held:
            got.extend(held.uuids)
            both.wait(timeout=60)

    jobs = [threading.Thread(target=job) for _ in range(2)]
    for one in jobs:
        one.start()
    for one in jobs:
        one.join(timeout=60)
    assert sorted(got) == sorted(host.uuids)


def test_nothing_heavy_is_imported() -> None:
    heavy = ["torch", "transformers", "snakemake", "pyarrow", "boto3", "yaml", "rich", "psutil"]
    code = (
        "import sys, draftmill.gpu.gate, draftmill.gpu.check, draftmill.gpu.reclaim\n"
        f"print([m for m in {heavy} if m in sys.modules])\n"
        "print(sorted(m for m in sys.modules if m.startswith('draftmill.') and not m.startswith('draftmill.gpu')))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "[]\n['draftmill.errors']\n"


FAULTS = st.sampled_from(
    [
        "fail nvmlDeviceGetMemoryInfo_v2 15 0",
        "fail nvmlDeviceGetMemoryInfo_v2 13 0",
        "fail nvmlDeviceGetComputeRunningProcesses_v3 4 0",
        "fail nvmlDeviceGetMigMode 3 0",
        "fail nvmlDeviceGetTotalEccErrors 999 0",
        "fail nvmlDeviceGetUUID 16 0",
        "fail nvmlInitWithFlags 18 -1",
        "smi exit 3",
        "smi used 0 70000",
    ]
)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    used=st.sampled_from([0, 0, 64, 256, 257, 59_392]),
    bad=st.sampled_from([{}, {}, {"ecc": 1}, {"mode": 3}, {"mig": 1}, {"recovery": 1}, {"pending": 1}, {"failed": 1}]),
    process=st.booleans(),
    faults=st.lists(FAULTS, max_size=1),
)
def test_whatever_the_driver_says_free_is_proven(
    host: Host, policy: GatePolicy, used: int, bad: dict[str, int], process: bool, faults: list[str]
) -> None:
    host.show(1)
    host.set(0, used=used * MIB, **bad)
    if process:
        host.process(0, 99, MIB)
    for fault in faults:
        host.fault(fault)
    harmless = not faults or faults == ["fail nvmlDeviceGetMigMode 3 0"]
    old_memory = faults == ["fail nvmlDeviceGetMemoryInfo_v2 13 0"]
    proven = used <= 256 and not process and harmless and not (bad and bad != {"mig": 1})
    proven = proven and not ("mig" in bad and not faults)
    verdict: Verdict = check(policy)
    assert (verdict.verdict == "free") == (proven and not old_memory)
    assert verdict.exit_code == {"free": 0, "busy": 1, "unknown": 2}[verdict.verdict]
