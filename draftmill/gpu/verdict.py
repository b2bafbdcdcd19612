"""From facts to a verdict, as pure functions: nothing here reads a sensor, a file or a clock.

The rule is one sentence: a GPU is free only when every needed fact is present and speaks for it. So the code collects
reasons against; a fact that is missing, unreadable or contradicted is a reason of kind `unknown`. An empty process list
proves nothing by itself (in a container it is always empty), which is why memory decides.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from draftmill.gpu.policy import GatePolicy
from draftmill.gpu.probe import Device, Probe, RawProcess
from draftmill.gpu.reasons import KINDS
from draftmill.gpu.record import Decision, Fault, GpuRecord, Health, ProcessOnGpu, Reason, ShmRecord
from draftmill.gpu.smi import Second

MIB = 1 << 20
# NVML codes that say "this card or driver has no such feature": not supported, function not found, and the version of
# an argument not known to an older driver.
FEATURE_ABSENT = frozenset({3, 13, 25})
NEEDED = ("uuid", "mem", "compute")
OPTIONAL = (
    "graphics",
    "mps",
    "utilization",
    "compute_mode",
    "mig",
    "persistence",
    "ecc_uncorrected",
    "remapped",
    "retire_pending",
    "recovery_action",
    "clocks_event_reasons",
)
# Compute modes of NVML: 0 default, 1 exclusive thread, 2 prohibited, 3 exclusive process.
_DEFAULT_MODE, _PROHIBITED_MODE = 0, 2


@dataclass(frozen=True)
class Person:
    """Who is behind a pid that the driver lists; `believed`: the pid is one of this process's namespace."""

    believed: bool
    user: str | None = None
    command: str | None = None


@dataclass(frozen=True)
class Facts:
    """All that a verdict rests on. `people` describes the pids that the devices list."""

    probe: Probe
    second: Second
    shm: ShmRecord = field(default_factory=ShmRecord)
    ports: Mapping[str, str] = field(default_factory=dict)
    people: Mapping[int, Person] = field(default_factory=dict)


@dataclass(frozen=True)
class Tenant:
    """A server of ours on a GPU: its memory and its pids are no reason against the job that will use it."""

    pids: frozenset[int]
    record: Mapping[str, object]


def decide(reasons: Iterable[Reason]) -> Decision:
    """Free without reasons; unknown as soon as one reason is; else busy."""
    weights = {KINDS[reason.code].weighs for reason in reasons}
    return "unknown" if "unknown" in weights else "busy" if weights else "free"


def reason(code: str, gpu: str | None, value: float, detail: str, limit: float | None = None) -> Reason:
    """A reason of the vocabulary; raises KeyError for a code that is not in it."""
    KINDS[code]
    return Reason(code=code, gpu=gpu, value=value, limit=limit, detail=detail)


def judge_host(facts: Facts, policy: GatePolicy) -> list[Reason]:
    """Reasons that concern the host as a whole: a sensor that failed, shared memory, ports."""
    return [*judge_probe(facts.probe), *_judge_second(facts.second, policy), *_judge_room(facts, policy)]


def judge_probe(probe: Probe) -> list[Reason]:
    """Reasons from the first sensor as a whole."""
    record = probe.record
    number = float(record.error_code or 0)
    match record.status:
        case "ok":
            return []
        case "hung":
            detail = f"NVML gave no answer in {record.elapsed_s:.1f} s"
            return [reason("probe_hung", None, record.elapsed_s, detail)]
        case "error":
            detail = f"NVML error {record.error_code} ({record.detail})"
            return [reason("nvml_error", None, number, detail)]
        case "garbled":
            return [reason("probe_garbled", None, number, f"NVML's reading is not whole: {record.detail}")]
        case _:
            return [reason("probe_failed", None, number, f"the probe could not run: {record.detail}")]


def _judge_second(second: Second, policy: GatePolicy) -> list[Reason]:
    record = second.record
    match record.status:
        case "failed":
            detail = f"nvidia-smi exited with {record.exit_code}"
            return [reason("second_sensor_failed", None, float(record.exit_code or 0), detail)]
        case "hung":
            detail = f"nvidia-smi gave no answer in {record.elapsed_s:.1f} s"
            return [reason("second_sensor_hung", None, record.elapsed_s, detail)]
        case "garbled":
            return [reason("second_sensor_garbled", None, 0, "nvidia-smi's output is not whole")]
        case "missing" if policy.second_sensor == "require":
            return [reason("second_sensor_missing", None, 0, "nvidia-smi is not installed here and is required")]
        case _:
            return []


def _judge_room(facts: Facts, policy: GatePolicy) -> list[Reason]:
    found = []
    wanted = policy.min_shm_free_gib * 1024
    if facts.shm.free_bytes is not None and (free := facts.shm.free_bytes / MIB) < wanted:
        found.append(reason("shm_low", None, round(free), f"{free:.0f} MiB free in /dev/shm", wanted))
    taken = [port for port, state in facts.ports.items() if state != "free"]
    found += [reason("port_taken", None, float(port), f"port {port} of 127.0.0.1 is taken") for port in taken]
    return found


def judge_gpu(uuid: str, facts: Facts, policy: GatePolicy, tenant: Tenant | None = None) -> GpuRecord:
    """One GPU's record. With a `tenant`, the server's own memory and processes do not count against it."""
    device = facts.probe.device(uuid)
    if device is None:
        return _missing(uuid, facts)
    people = _people(device, facts)
    reasons = [
        *_judge_whole(uuid, device),
        *([] if tenant else _judge_memory(uuid, device, people, policy)),
        *_judge_people(uuid, people, policy, tenant),
        *_judge_health(uuid, device, policy),
        *_judge_mode(uuid, device, policy),
        *([] if tenant else _judge_agreement(uuid, device, facts.second, policy)),
    ]
    return _record(uuid, device, people, reasons, tenant)


def _missing(uuid: str, facts: Facts) -> GpuRecord:
    if not facts.probe.ok:
        return GpuRecord(uuid=uuid, verdict="unknown", reasons=())
    lost = [d for d in facts.probe.devices if d.uuid is None]
    count = len(facts.probe.devices) - len(lost)
    faults = "; ".join(f"device {d.index}: NVML error {f.code} ({f.name})" for d in lost for f in d.errors.values())
    detail = f"not among the {count} GPUs reported" + (f" ({faults})" if faults else "")
    return GpuRecord(uuid=uuid, verdict="unknown", reasons=(reason("gpu_missing", uuid, count, detail),))


def _judge_whole(uuid: str, device: Device) -> list[Reason]:
    found = []
    for name in (*NEEDED, *OPTIONAL):
        fault = device.errors.get(name)
        if fault is None and getattr(device, name) is None:
            found.append(reason("fact_missing", uuid, 1, f"{name} is absent and no error says why"))
        elif fault is not None and (name in NEEDED or fault.code not in FEATURE_ABSENT):
            detail = f"{name}: NVML error {fault.code} ({fault.name})"
            found.append(reason("fact_unreadable", uuid, fault.code, detail))
    return found


def _people(device: Device, facts: Facts) -> tuple[ProcessOnGpu, ...]:
    listed: list[tuple[str, tuple[RawProcess, ...] | None]] = [
        ("compute", device.compute),
        ("graphics", device.graphics),
        ("mps", device.mps),
    ]
    found = []
    for kind, processes in listed:
        for raw in processes or ():
            person = facts.people.get(raw.pid, Person(believed=False))
            found.append(
                ProcessOnGpu.model_validate(
                    {
                        "kind": kind,
                        "pid": raw.pid,
                        "bytes": raw.bytes,
                        "visible": person.believed,
                        "user": person.user,
                        "command": person.command,
                    }
                )
            )
    return tuple(found)


def _judge_memory(uuid: str, device: Device, people: tuple[ProcessOnGpu, ...], policy: GatePolicy) -> list[Reason]:
    if device.mem is None:
        return []
    limit = policy.max_used_mib
    if policy.allow_graphics and any(p.kind == "graphics" for p in people):
        limit += policy.allow_graphics_mib
    used = device.mem.used / MIB
    if used <= limit:
        return []
    note = "" if device.mem.version == 2 else " (the driver's reserve included)"
    if people:
        return [reason("memory_held", uuid, round(used), f"{used:.0f} MiB used{note}", limit)]
    detail = f"{used:.0f} MiB used{note} and no process listed"
    return [reason("memory_held_no_visible_process", uuid, round(used), detail, limit)]


def _judge_people(
    uuid: str, people: tuple[ProcessOnGpu, ...], policy: GatePolicy, tenant: Tenant | None
) -> list[Reason]:
    allowed = {"graphics": policy.allow_graphics, "mps": policy.allow_mps, "compute": False}
    found = []
    for person in people:
        if allowed[person.kind] or (tenant and (not person.visible or person.pid in tenant.pids)):
            continue
        found.append(reason(f"{person.kind}_process", uuid, person.pid, describe(person)))
    return found


def describe(person: ProcessOnGpu) -> str:
    """A process in words: pid, user, command where they can be seen, and MiB."""
    size = "unknown memory" if person.bytes is None else f"{person.bytes // MIB} MiB"
    who = f" of {person.user}: {person.command}" if person.user and person.visible else " (not visible here)"
    return f"pid {person.pid}{who}, {size}"


def _judge_health(uuid: str, device: Device, policy: GatePolicy) -> list[Reason]:
    found = []
    limit = policy.max_ecc_uncorrected
    if (errors := device.ecc_uncorrected) is not None and errors > limit:
        found.append(reason("ecc_errors", uuid, errors, f"{errors} uncorrected ECC errors", limit))
    pending, failed = device.remapped or (False, False)
    if pending:
        found.append(reason("remap_pending", uuid, 1, "memory rows wait to be remapped"))
    if failed:
        found.append(reason("remap_failed", uuid, 1, "remapping memory rows failed"))
    if device.retire_pending:
        found.append(reason("retire_pending", uuid, 1, "memory pages wait to be retired"))
    if device.recovery_action:
        detail = f"the driver asks for recovery action {device.recovery_action}"
        found.append(reason("recovery_action", uuid, device.recovery_action, detail))
    return found


def _judge_mode(uuid: str, device: Device, policy: GatePolicy) -> list[Reason]:
    found = []
    mode = device.compute_mode
    if mode not in (None, _DEFAULT_MODE) and (mode == _PROHIBITED_MODE or not policy.allow_exclusive):
        name = "prohibited" if mode == _PROHIBITED_MODE else "exclusive"
        found.append(reason("compute_mode", uuid, float(mode or 0), f"the compute mode is {name} ({mode})"))
    if device.mig and not policy.allow_mig:
        found.append(reason("mig_enabled", uuid, 1, "MIG is enabled"))
    return found


def _judge_agreement(uuid: str, device: Device, second: Second, policy: GatePolicy) -> list[Reason]:
    if second.record.status != "ok" or device.mem is None:
        return []
    row = second.rows.get(uuid)
    if row is None:
        return [reason("sensors_disagree", uuid, device.mem.total // MIB, "nvidia-smi does not list this GPU")]
    used = device.mem.used / MIB
    # Older versions of nvidia-smi count the driver's reserve as used, newer ones do not.
    readings = (used, used + (device.mem.reserved or 0) / MIB)
    apart = max(min(abs(row.used_mib - r) for r in readings), abs(row.total_mib - device.mem.total / MIB))
    if apart <= policy.sensor_tolerance_mib:
        return []
    detail = f"nvidia-smi says {row.used_mib} of {row.total_mib} MiB, NVML {used:.0f} of {device.mem.total // MIB}"
    return [reason("sensors_disagree", uuid, round(apart), detail, policy.sensor_tolerance_mib)]


def _record(
    uuid: str, device: Device, people: tuple[ProcessOnGpu, ...], reasons: list[Reason], tenant: Tenant | None
) -> GpuRecord:
    pending, failed = device.remapped or (None, None)
    health = Health(
        ecc_uncorrected=device.ecc_uncorrected,
        remap_pending=pending,
        remap_failed=failed,
        retire_pending=device.retire_pending,
        recovery_action=device.recovery_action,
        clocks_event_reasons=device.clocks_event_reasons,
        xid=device.xid if device.xid is not None else "not readable",
    )
    absent: dict[str, Fault] = {k: v for k, v in device.errors.items() if k in OPTIONAL}
    return GpuRecord(
        uuid=uuid,
        index=device.index,
        name=device.name,
        pci=device.pci,
        mem=device.mem,
        processes=people,
        utilization=device.utilization,
        compute_mode=device.compute_mode,
        mig=device.mig,
        persistence=device.persistence,
        health=health,
        absent=absent,
        server=dict(tenant.record) if tenant else None,
        verdict=decide(reasons),
        reasons=tuple(reasons),
    )
