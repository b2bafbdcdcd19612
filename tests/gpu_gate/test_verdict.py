"""From facts to a verdict: free only if every fact proves it, and each trap under its own name."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.gpu.policy import GatePolicy
from draftmill.gpu.probe import Device, Probe, RawProcess, probe
from draftmill.gpu.reasons import KINDS
from draftmill.gpu.record import Fault, Memory, ProbeRecord, SecondSensorRecord, ShmRecord
from draftmill.gpu.sense import sense
from draftmill.gpu.smi import Row, Second
from draftmill.gpu.verdict import NEEDED, OPTIONAL, Facts, Person, Tenant, decide, judge_gpu, judge_host

from .conftest import GIB, MIB, Host, uuid_of

UUID = uuid_of(0)
POLICY = GatePolicy(min_shm_free_gib=1)
IDLE: dict[str, object] = {
    "index": 0,
    "uuid": UUID,
    "name": "Fake",
    "pci": "00000000:01:00.0",
    "errors": {},
    "mem": Memory(version=2, total=143_771 * MIB, reserved=615 * MIB, used=0),
    "compute": (),
    "graphics": (),
    "mps": (),
    "utilization": 0,
    "compute_mode": 0,
    "mig": False,
    "persistence": True,
    "ecc_uncorrected": 0,
    "remapped": (False, False),
    "retire_pending": False,
    "recovery_action": 0,
    "clocks_event_reasons": 0,
    "xid": None,
}
OK = ProbeRecord(status="ok", devices_reported=1)


def facts(second: Second | None = None, status: str = "ok", free_shm: int = 8 * GIB, **changed: object) -> Facts:
    device = Device.model_validate({**IDLE, **changed})
    record = OK.model_copy(update={"status": status})
    witness = second or Second(SecondSensorRecord(status="ok", complete=True), {UUID: Row(0, 143_771)})
    people = {p.pid: Person(True, "somebody", "python train.py") for p in device.compute or ()}
    devices = (device,) if status == "ok" else ()
    return Facts(Probe(record, devices), witness, ShmRecord(free_bytes=free_shm), {}, people)


def used(mib: float, version: int = 2) -> Memory:
    return Memory(version=version, total=143_771 * MIB, reserved=615 * MIB, used=int(mib * MIB))


def codes(found: Facts, policy: GatePolicy = POLICY, uuid: str = UUID) -> set[str]:
    return {r.code for r in (*judge_host(found, policy), *judge_gpu(uuid, found, policy).reasons)}


def test_an_idle_gpu_is_free() -> None:
    assert codes(facts()) == set()
    assert judge_gpu(UUID, facts(), POLICY).verdict == "free"


LISTED = (RawProcess(pid=42, bytes=GIB),)


@pytest.mark.parametrize(
    ("changed", "expected", "value"),
    [
        ({"mem": used(59_392)}, "memory_held_no_visible_process", 59_392),
        ({"mem": used(257)}, "memory_held_no_visible_process", 257),
        ({"mem": used(600, version=1)}, "memory_held_no_visible_process", 600),
        ({"mem": used(1024), "compute": LISTED}, "memory_held", 1024),
        ({"compute": LISTED}, "compute_process", 42),
        ({"graphics": LISTED}, "graphics_process", 42),
        ({"mps": LISTED}, "mps_process", 42),
        ({"ecc_uncorrected": 1}, "ecc_errors", 1),
        ({"remapped": (True, False)}, "remap_pending", 1),
        ({"remapped": (False, True)}, "remap_failed", 1),
        ({"retire_pending": True}, "retire_pending", 1),
        ({"recovery_action": 1}, "recovery_action", 1),
        ({"compute_mode": 2}, "compute_mode", 2),
        ({"compute_mode": 3}, "compute_mode", 3),
        ({"mig": True}, "mig_enabled", 1),
    ],
)
def test_each_trap_is_busy_under_its_own_name(changed: dict[str, object], expected: str, value: int) -> None:
    found = facts(Second(SecondSensorRecord(status="off"), {}), **changed)
    record = judge_gpu(UUID, found, POLICY)
    by_code = {r.code: r for r in record.reasons}
    assert by_code[expected].value == value
    assert record.verdict == "busy"


def test_full_utilization_alone_is_no_reason() -> None:
    assert codes(facts(utilization=100)) == set()


def test_an_unseen_process_list_does_not_excuse_memory() -> None:
    found = facts(Second(SecondSensorRecord(status="off"), {}), mem=used(58 * 1024), compute=())
    assert codes(found) == {"memory_held_no_visible_process"}


@pytest.mark.parametrize("name", [*NEEDED[1:], *OPTIONAL])
@pytest.mark.parametrize("code", [3, 4, 9, 13, 15, 16, 18, 999])
def test_an_unreadable_fact_is_unknown_unless_the_card_lacks_it(name: str, code: int) -> None:
    found = facts(**{name: None, "errors": {name: Fault(code=code, name="X")}})
    excused = name in OPTIONAL and code in (3, 13)
    record = judge_gpu(UUID, found, POLICY)
    assert record.verdict == ("free" if excused else "unknown")
    assert [r.value for r in record.reasons] == ([] if excused else [code])
    if excused:
        assert record.absent[name].code == code


def test_a_fact_that_is_absent_without_an_error_is_unknown() -> None:
    assert codes(facts(mig=None)) == {"fact_missing"}


@pytest.mark.parametrize(
    ("status", "expected"),
    [("error", "nvml_error"), ("hung", "probe_hung"), ("garbled", "probe_garbled"), ("failed", "probe_failed")],
)
def test_a_failed_probe_is_unknown(status: str, expected: str) -> None:
    found = facts(status=status)
    assert {r.code for r in judge_host(found, POLICY)} == {expected}
    assert judge_gpu(UUID, found, POLICY).verdict == "unknown"


def test_a_missing_gpu_is_not_free() -> None:
    record = judge_gpu(uuid_of(3), facts(), POLICY)
    assert (record.verdict, [r.code for r in record.reasons]) == ("unknown", ["gpu_missing"])


@pytest.mark.parametrize(
    ("row", "agrees"),
    [
        (Row(0, 143_771), True),
        (Row(615, 143_771), True),
        (Row(256, 143_771), True),
        (Row(1000, 143_771), False),
        (Row(0, 80_000), False),
    ],
)
def test_the_sensors_must_agree(row: Row, agrees: bool) -> None:
    found = facts(Second(SecondSensorRecord(status="ok", complete=True), {UUID: row}))
    assert codes(found) == (set() if agrees else {"sensors_disagree"})


def test_a_gpu_that_only_one_sensor_sees_is_unknown() -> None:
    assert codes(facts(Second(SecondSensorRecord(status="ok"), {}))) == {"sensors_disagree"}


@pytest.mark.parametrize("setting", ["require", "prefer", "off"])
@pytest.mark.parametrize("status", ["missing", "failed", "hung", "garbled"])
def test_a_second_sensor_that_is_there_must_work(setting: str, status: str) -> None:
    policy = POLICY.model_copy(update={"second_sensor": setting})
    found = facts(Second(SecondSensorRecord(status=status), {}))
    excused = status == "missing" and setting != "require"
    assert codes(found, policy) == (set() if excused else {f"second_sensor_{status}"})


def test_graphics_and_mps_and_exclusive_are_knobs() -> None:
    policy = POLICY.model_copy(
        update={"allow_graphics": True, "allow_mps": True, "allow_exclusive": True, "allow_mig": True}
    )
    off = Second(SecondSensorRecord(status="off"), {})
    display = facts(off, mem=used(700), graphics=(RawProcess(pid=7, bytes=600 * MIB),))
    assert codes(display, policy) == set()
    assert codes(facts(off, mem=used(800), graphics=display.probe.devices[0].graphics), policy) == {"memory_held"}
    assert codes(facts(mps=LISTED, compute_mode=3, mig=True), policy) == set()
    assert codes(facts(compute_mode=2), policy) == {"compute_mode"}


def test_a_full_shared_memory_and_a_taken_port_are_busy() -> None:
    full = facts(free_shm=100 * MIB)
    assert codes(full) == {"shm_low"}
    taken = Facts(full.probe, full.second, ShmRecord(free_bytes=8 * GIB), {"30000": "taken"}, {})
    assert codes(taken) == {"port_taken"}


def test_a_server_of_ours_is_no_reason_but_a_stranger_beside_it_is() -> None:
    both = (RawProcess(pid=42, bytes=60 * GIB), RawProcess(pid=43, bytes=GIB))
    found = facts(mem=used(61 * 1024), compute=both)
    mine = judge_gpu(UUID, found, POLICY, Tenant(frozenset({42, 43}), {"spec": "s"}))
    assert (mine.verdict, mine.server) == ("free", {"spec": "s"})
    shared = judge_gpu(UUID, found, POLICY, Tenant(frozenset({42}), {"spec": "s"}))
    assert [(r.code, r.value) for r in shared.reasons] == [("compute_process", 43)]


def test_a_sick_gpu_is_not_excused_by_a_server() -> None:
    record = judge_gpu(UUID, facts(ecc_uncorrected=5), POLICY, Tenant(frozenset(), {}))
    assert [r.code for r in record.reasons] == ["ecc_errors"]


def test_every_reason_says_what_to_do() -> None:
    assert all(kind.meaning and kind.remedy and kind.number for kind in KINDS.values())


FAULTS = st.builds(Fault, code=st.sampled_from([3, 4, 9, 12, 13, 15, 16, 18, 25, 999]), name=st.just("X"))
PROCESSES = st.lists(st.builds(RawProcess, pid=st.integers(1, 99), bytes=st.none() | st.just(MIB)), max_size=2)
VALUES: dict[str, st.SearchStrategy[object]] = {
    "mem": st.builds(
        Memory,
        version=st.sampled_from([1, 2]),
        total=st.just(143_771 * MIB),
        reserved=st.none() | st.just(615 * MIB),
        used=st.sampled_from([0, 4 * MIB, 256 * MIB, 257 * MIB, 58 * GIB]),
    ),
    "compute": PROCESSES.map(tuple),
    "graphics": PROCESSES.map(tuple),
    "mps": PROCESSES.map(tuple),
    "utilization": st.integers(0, 100),
    "compute_mode": st.integers(0, 3),
    "mig": st.booleans(),
    "persistence": st.booleans(),
    "ecc_uncorrected": st.sampled_from([0, 0, 1]),
    "remapped": st.tuples(st.booleans(), st.booleans()),
    "retire_pending": st.booleans(),
    "recovery_action": st.integers(0, 4),
    "clocks_event_reasons": st.just(0),
}


@st.composite
def devices(draw: st.DrawFn) -> dict[str, object]:
    """A device of which most facts are good and any may be bad, absent, or unreadable."""
    device: dict[str, object] = {"errors": {}}
    for name in draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=3, unique=True)):
        kind = draw(st.sampled_from(["value", "fault", "absent"]))
        device[name] = draw(VALUES[name]) if kind == "value" else None
        if kind == "fault":
            device["errors"] = {**device["errors"], name: draw(FAULTS)}  # type: ignore[dict-item]
    return device


SECONDS = st.sampled_from(
    [
        Second(SecondSensorRecord(status="ok"), {UUID: Row(0, 143_771)}),
        Second(SecondSensorRecord(status="ok"), {UUID: Row(58_000, 143_771)}),
        Second(SecondSensorRecord(status="ok"), {}),
        *(Second(SecondSensorRecord(status=s), {}) for s in ("missing", "failed", "hung", "garbled")),
    ]
)


def proven(device: Device, second: Second, status: str) -> bool:
    """The rule itself, written out a second time as one conjunction."""

    def present(name: str) -> bool:
        fault = device.errors.get(name)
        return getattr(device, name) is not None if fault is None else name in OPTIONAL and fault.code in (3, 13, 25)

    mem = device.mem
    return (
        status == "ok"
        and all(present(name) for name in (*NEEDED, *OPTIONAL))
        and mem is not None
        and mem.used <= 256 * MIB
        and not device.compute
        and not device.graphics
        and not device.mps
        and device.compute_mode in (0, None)
        and not device.mig
        and not device.ecc_uncorrected
        and device.remapped in (None, (False, False))
        and not device.retire_pending
        and not device.recovery_action
        and (
            second.record.status == "missing"
            or (UUID in second.rows and abs(second.rows[UUID].used_mib - mem.used // MIB) <= 256)
        )
    )


@settings(max_examples=600)
@given(devices(), SECONDS, st.sampled_from(["ok", "ok", "ok", "error", "hung", "garbled", "failed"]))
def test_free_only_if_every_fact_proves_it(changed: dict[str, object], second: Second, status: str) -> None:
    found = facts(second, status, **changed)
    device = Device.model_validate({**IDLE, **changed})
    reasons = (*judge_host(found, POLICY), *judge_gpu(UUID, found, POLICY).reasons)
    expected = proven(device, second, status)
    if expected or device.mem is None or second.record.status != "ok":
        assert (decide(reasons) == "free") == expected
    else:
        assert decide(reasons) != "free"


def test_the_real_binding_and_the_fake_agree_with_the_rule(host: Host) -> None:
    quick = GatePolicy(probe_timeout_s=20, min_shm_free_gib=0)
    assert judge_gpu(uuid_of(1), sense(host.uuids, quick), quick).verdict == "free"
    host.set(1, used=58 * GIB)
    held = sense(host.uuids, quick)
    assert [r.code for r in judge_gpu(uuid_of(1), held, quick).reasons] == ["memory_held_no_visible_process"]
    assert judge_gpu(uuid_of(0), held, quick).verdict == "free"


@pytest.mark.parametrize(
    "fault", ["fail nvmlDeviceGetMemoryInfo_v2 15 1", "fail nvmlDeviceGetComputeRunningProcesses_v3 3 1"]
)
def test_a_fault_of_one_gpu_leaves_the_other_free(host: Host, fault: str) -> None:
    quick = GatePolicy(probe_timeout_s=20, min_shm_free_gib=0)
    host.fault(fault)
    found = sense(host.uuids, quick)
    assert [judge_gpu(uuid, found, quick).verdict for uuid in host.uuids] == ["free", "unknown"]


def test_a_lost_gpu_is_missing_with_its_error(host: Host) -> None:
    host.fault("fail nvmlDeviceGetUUID 15 1")
    found = Facts(probe(20), Second(SecondSensorRecord(status="off"), {}))
    reason = judge_gpu(uuid_of(1), found, POLICY).reasons[0]
    assert (reason.code, reason.value) == ("gpu_missing", 1)
    assert "NVML error 15" in reason.detail
