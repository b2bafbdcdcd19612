"""Which GPUs may be used at all: an outer CUDA_VISIBLE_DEVICES bounds the set.

Slurm, containers and people set it, as CUDA's indices or as (shortened) UUIDs. CUDA counts only the devices it can
open, in the order of the PCI bus or fastest first, and stops at the first entry it does not know. Where an index could
mean two different cards the gate does not guess.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draftmill.gpu.probe import Device
from draftmill.gpu.record import Reason
from draftmill.gpu.verdict import reason

_NO_PERMISSION = 4


@dataclass(frozen=True)
class Visible:
    """Full UUIDs in the order of CUDA_VISIBLE_DEVICES (NVML's order if unset), and what could not be resolved."""

    uuids: tuple[str, ...]
    reasons: tuple[Reason, ...] = ()


def resolve(devices: Sequence[Device], environment: Mapping[str, str], expected: Sequence[str] = ()) -> Visible:
    """The GPUs that a CUDA program started with `environment` could use, bounded by `expected` if given."""
    value = environment.get("CUDA_VISIBLE_DEVICES")
    open_ = [d for d in devices if d.uuid is not None]
    if value is None:
        found = Visible(tuple(d.uuid for d in open_ if d.uuid))
    else:
        entries = [entry.strip() for entry in value.split(",")] if value.strip() else []
        found = _entries(entries, devices, open_, environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID")
    if not expected:
        return found
    return Visible(tuple(u for u in found.uuids if u in set(expected)), found.reasons)


def _entries(entries: Sequence[str], devices: Sequence[Device], open_: Sequence[Device], by_bus: bool) -> Visible:
    uuids: list[str] = []
    for number, entry in enumerate(entries):
        if entry.startswith("-") or entry == "NoDevFiles":
            break
        uuid, why = _index(entry, devices, open_, by_bus) if entry.isdigit() else _prefix(entry, open_)
        if uuid is None or uuid in uuids:
            detail = f"CUDA_VISIBLE_DEVICES entry {entry!r} {why or 'is named twice'}"
            return Visible(tuple(uuids), (reason("visible_devices_unclear", None, number, detail),))
        uuids.append(uuid)
    return Visible(tuple(uuids))


def _index(
    entry: str, devices: Sequence[Device], open_: Sequence[Device], by_bus: bool
) -> tuple[str | None, str | None]:
    broken = [d for d in devices if d.uuid is None and any(f.code != _NO_PERMISSION for f in d.errors.values())]
    if broken:
        return None, "is an index, and a device that cannot be read leaves the counting open; use UUIDs"
    if not by_bus and len({d.name for d in open_}) > 1:
        return None, "is an index, and CUDA may count cards of different names in its own order; use UUIDs"
    if int(entry) >= len(open_):
        return None, f"is beyond the {len(open_)} GPUs that can be opened"
    return open_[int(entry)].uuid, None


def _prefix(entry: str, open_: Sequence[Device]) -> tuple[str | None, str | None]:
    if entry.startswith("MIG-"):
        return None, "is a MIG instance, which the gate does not judge"
    fits = [d.uuid for d in open_ if d.uuid is not None and d.uuid.startswith(entry)]
    if not entry or len(fits) != 1:
        return None, f"fits {len(fits) if entry else 0} GPUs"
    return fits[0], None
