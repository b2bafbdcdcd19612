"""The two sensors: whatever the driver does, the reading ends in time and says what it is worth."""

import os
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.gpu import child, smi
from draftmill.gpu.child import Answer, ask
from draftmill.gpu.probe import PendingProbe, probe, read_answer

from .conftest import GIB, MIB, Host, uuid_of

CALLS = (
    "nvmlInitWithFlags",
    "nvmlSystemGetDriverVersion",
    "nvmlDeviceGetCount_v2",
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetPciInfo_v3",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetComputeMode",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetPersistenceMode",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetRetiredPagesPendingStatus",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetCurrentClocksEventReasons",
)


def test_reads_every_fact(host: Host) -> None:
    host.set(1, used=58 * GIB, utilization=7, ecc=3, mode=3, mig=1, pending=1, retire=1, recovery=2)
    host.process(1, os.getpid(), 57 * GIB)
    host.process(1, 77, -1, "g")
    read = probe(20)
    assert read.record.status == "ok"
    assert (read.record.devices_reported, read.record.driver) == (2, "999.0")
    first, second = read.devices
    assert first.uuid == uuid_of(0)
    assert not first.errors
    assert second.mem is not None
    assert (second.mem.version, second.mem.used, second.mem.reserved) == (2, 58 * GIB, 615 * MIB)
    assert [(p.pid, p.bytes) for p in second.compute or ()] == [(os.getpid(), 57 * GIB)]
    assert [(p.pid, p.bytes) for p in second.graphics or ()] == [(77, None)]
    assert (second.utilization, second.ecc_uncorrected, second.compute_mode, second.mig) == (7, 3, 3, True)
    assert (second.remapped, second.retire_pending, second.recovery_action) == ((True, False), True, 2)


def test_memory_of_an_old_driver_counts_the_reserve(host: Host) -> None:
    host.fault("fail nvmlDeviceGetMemoryInfo_v2 13 -1")
    memory = probe(20).devices[0].mem
    assert memory is not None
    assert (memory.version, memory.reserved, memory.used) == (1, None, 615 * MIB)


@pytest.mark.slow
def test_a_hang_in_any_call_ends_at_the_deadline(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pending = {}
    for call in CALLS:
        state = tmp_path / f"{call}.txt"
        state.write_text(host.path.read_text() + f"hang {call} 60 -1\n")
        monkeypatch.setenv("FAKE_NVML_STATE", str(state))
        pending[call] = PendingProbe(4.0)
    began = time.monotonic()
    assert {call: read.result().record.status for call, read in pending.items()} == dict.fromkeys(CALLS, "hung")
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("code", [3, 4, 9, 12, 13, 15, 16, 18, 999])
def test_an_error_at_the_start_keeps_its_code(host: Host, code: int) -> None:
    host.fault(f"fail nvmlInitWithFlags {code} -1")
    record = probe(20).record
    assert (record.status, record.error_code) == ("error", code)


def test_no_library_is_an_error_not_a_crash(host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    record = probe(20).record
    assert (record.status, record.error_code, record.detail) == ("error", 12, "LibraryNotFound")


def test_a_fact_that_fails_is_null_with_its_code(host: Host) -> None:
    host.fault("fail nvmlDeviceGetMigMode 3 1")
    first, second = probe(20).devices
    assert first.mig is False
    assert second.mig is None
    assert (second.errors["mig"].code, second.errors["mig"].name) == (3, "NotSupported")


def test_a_lost_device_keeps_its_place(host: Host) -> None:
    host.fault("fail nvmlDeviceGetHandleByIndex_v2 15 0")
    lost, healthy = probe(20).devices
    assert (lost.uuid, lost.errors["handle"].code) == (None, 15)
    assert healthy.uuid == uuid_of(1)


def test_a_parent_returns_though_its_child_cannot_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []
    monkeypatch.setattr(child.os, "killpg", lambda pid, number: refused.append(pid))
    began = time.monotonic()
    answer = ask(["sleep", "60"], 0.3)
    elapsed = time.monotonic() - began
    monkeypatch.undo()
    os.kill(refused[0], 9)
    os.waitpid(refused[0], 0)
    assert answer.status == "hung"
    assert elapsed < 30


def test_a_grandchild_that_keeps_the_pipe_does_not_keep_the_parent() -> None:
    answer = ask(["sh", "-c", "sleep 60 & echo done"], 2.0)
    assert answer.status == "hung"
    assert answer.out == "done\n"


def test_a_flood_is_cut_off() -> None:
    began = time.monotonic()
    answer = ask(["yes"], 60)
    assert answer.status == "flooded"
    assert time.monotonic() - began < 50
    assert read_answer(answer).record.status == "garbled"
    assert smi.read_answer(answer, frozenset()).record.status == "garbled"


def test_what_a_library_prints_does_not_enter_the_document(host: Host) -> None:
    host.fault("print nvmlDeviceGetCount_v2")
    assert probe(20).ok


def _document(host: Host) -> str:
    return ask([sys.executable, "-P", str(Path(child.__file__).with_name("probe_child.py"))], 20).out


def test_no_part_and_no_mixture_of_a_reading_passes(host: Host) -> None:
    text = _document(host)
    assert read_answer(Answer("exited", 0, text, "", 0.1)).ok
    for end in range(0, len(text) - 1, 37):
        assert not read_answer(Answer("exited", 0, text[:end], "", 0.1)).ok
    for at in range(1, len(text) - 1, 37):
        mixed = text[:at] + "NVRM: Xid\n" + text[at:]
        assert not read_answer(Answer("exited", 0, mixed, "", 0.1)).ok


def test_a_reading_with_a_changed_number_does_not_pass(host: Host) -> None:
    text = _document(host)
    changed = text.replace('"used": 0', '"used": 1', 1)
    assert changed != text
    assert read_answer(Answer("exited", 0, changed, "", 0.1)).record.status == "garbled"


ROWS = f"{uuid_of(0)}, 4, 143771\n{uuid_of(1)}, 0, 143771\n"
ASKED = frozenset({uuid_of(0), uuid_of(1)})


def test_smi_rows_parse() -> None:
    rows = smi.parse(ROWS, ASKED)
    assert rows is not None
    assert (rows[uuid_of(0)].used_mib, rows[uuid_of(1)].total_mib) == (4, 143771)


@given(st.integers(0, len(ROWS) - 1))
def test_no_beginning_of_smi_output_is_whole(end: int) -> None:
    assert smi.parse(ROWS[:end], ASKED) is None


@given(st.integers(0, len(ROWS)), st.text("GPU-, 0123456789\nxyz", min_size=1, max_size=20))
def test_text_inside_smi_output_never_changes_the_rows(at: int, noise: str) -> None:
    rows = smi.parse(ROWS[:at] + noise + ROWS[at:], ASKED)
    assert rows is None or rows.keys() == ASKED


@pytest.mark.parametrize("text", ["", "\n", "No devices were found\n", ROWS + ROWS, ROWS.replace(", 4,", ", [N/A],")])
def test_smi_output_that_proves_nothing(text: str) -> None:
    assert smi.parse(text, ASKED) is None


def test_smi_is_asked_for_the_wanted_gpus_alone(host: Host) -> None:
    host.set(1, used=5 * MIB)
    second = smi.PendingSecond((uuid_of(1),), 20).result()
    assert second.record.status == "ok"
    assert second.record.used_mib == {uuid_of(1): 5}


@pytest.mark.parametrize(
    ("fault", "status"),
    [("smi exit 9", "failed"), ("smi cut 50", "garbled"), ("smi mix WARNING: infoROM is corrupted", "garbled")],
)
def test_smi_faults_have_names(host: Host, fault: str, status: str) -> None:
    host.fault(fault)
    assert smi.PendingSecond(host.uuids, 20).result().record.status == status


def test_smi_that_hangs_or_is_absent(host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    host.fault("smi hang 60")
    assert smi.PendingSecond(host.uuids, 0.5).result().record.status == "hung"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert smi.PendingSecond(host.uuids, 20).result().record.status == "missing"
