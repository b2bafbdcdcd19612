"""After the start: whether the memory that rose is ours.

The lease keeps other runs of draftmill away; nothing keeps anybody else from starting on the same GPU in the second
between the proof and our launch. So the GPU is read once more: processes that are not ours, or memory beyond what ours
are seen to hold, mean that two now share it. Where pids cannot be joined (a container) the rise cannot be attributed,
and the record says so instead of claiming it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from draftmill.gpu.policy import GatePolicy
from draftmill.gpu.probe import Device
from draftmill.gpu.record import GpuRecord, Reason
from draftmill.gpu.verdict import MIB, Facts, Person, reason

State = Literal["no_rise", "ours", "unattributed", "foreign", "unread"]


@dataclass(frozen=True)
class Attested:
    """One GPU after the start: memory that rose and memory seen to be ours, in MiB."""

    uuid: str
    state: State
    rose_mib: int
    ours_mib: int | None
    reasons: tuple[Reason, ...] = ()

    def to_json(self) -> dict[str, object]:
        """The part that goes into the verdict record."""
        return {"state": self.state, "rose_mib": self.rose_mib, "ours_mib": self.ours_mib}


def attest(before: GpuRecord, facts: Facts, ours: Collection[int], policy: GatePolicy, own_pids: bool) -> Attested:
    """Compare a GPU with its state when it was proven free.

    `ours` are pids of the run; `own_pids` says that a pid which is not listed is not there, as on the host itself.
    """
    device = facts.probe.device(before.uuid)
    if device is None or device.mem is None or device.compute is None or before.mem is None:
        return Attested(before.uuid, "unread", 0, None)
    rose = max(0, device.mem.used - before.mem.used)
    strangers = _strangers(before, device, facts.people, ours)
    if strangers:
        return Attested(before.uuid, "foreign", rose // MIB, None, tuple(strangers))
    # A number that only looks like one of ours may be another container's; it counts when it is believed.
    mine = {pid for pid in ours if facts.people.get(pid, Person(believed=False)).believed}
    return _weigh(before.uuid, device, rose, mine, policy, own_pids)


def _strangers(before: GpuRecord, device: Device, people: Mapping[int, Person], ours: Collection[int]) -> list[Reason]:
    known = {p.pid for p in before.processes} | set(ours)
    found = []
    for raw in (*(device.compute or ()), *(device.mps or ())):
        person = people.get(raw.pid, Person(believed=False))
        if raw.pid not in known and person.believed:
            size = "unknown memory" if raw.bytes is None else f"{raw.bytes // MIB} MiB"
            detail = f"pid {raw.pid} of {person.user}: {person.command}, {size}"
            found.append(reason("foreign_process_after_launch", before.uuid, raw.pid, detail))
    return found


def _weigh(uuid: str, device: Device, rose: int, ours: Collection[int], policy: GatePolicy, own_pids: bool) -> Attested:
    mine = [raw for raw in (*(device.compute or ()), *(device.mps or ())) if raw.pid in set(ours)]
    sizes = [raw.bytes for raw in mine]
    held = sum(size for size in sizes if size is not None)
    slack = policy.attest_slack_mib * MIB
    if not mine and rose <= policy.idle_mib * MIB:
        return Attested(uuid, "no_rise", rose // MIB, 0)
    if None in sizes or not (mine or own_pids):
        return Attested(uuid, "unattributed", rose // MIB, None)
    if rose - held > (slack if mine else policy.max_used_mib * MIB):
        extra = (rose - held) // MIB
        detail = f"{extra} MiB rose and belong to no process of this run"
        return Attested(
            uuid,
            "foreign",
            rose // MIB,
            held // MIB,
            (reason("foreign_memory_after_launch", uuid, extra, detail, policy.attest_slack_mib),),
        )
    return Attested(uuid, "ours", rose // MIB, held // MIB)
