"""Choosing GPUs: take the locks first, then prove what was locked, and wait while waiting can help.

Each round takes what it needs or nothing. GPUs that turned out busy or sick are tried last, so that a retry takes
another one. Waiting is without limit while living leases or pauses stand between this job and enough GPUs; everything
else gets `wait_s`, and a fault that does not pass by itself gets no wait at all.
"""

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from draftmill.gpu import lease as leases
from draftmill.gpu import pause, servers
from draftmill.gpu.errors import refusal
from draftmill.gpu.lease import LeaseRecord, Occupant
from draftmill.gpu.policy import GatePolicy
from draftmill.gpu.probe import Device, probe
from draftmill.gpu.processes import Process
from draftmill.gpu.proof import Proof, prove
from draftmill.gpu.reasons import KINDS
from draftmill.gpu.record import GpuRecord, Reason, SecondSensorRecord, Verdict
from draftmill.gpu.smi import Second
from draftmill.gpu.verdict import Facts, decide, judge_probe, reason
from draftmill.gpu.visible import resolve
from draftmill.gpu.writing import build_verdict

Notify = Callable[[str], None]
_REPEAT_S = 30.0
_CHANGE_POLLS = 5


@dataclass(frozen=True)
class Request:
    """What a job asks for. `evict`: servers of ours are asked to leave (a sentinel only proves that they can be)."""

    gpus: int
    run_id: str | None
    stage: str | None
    shard: str | None
    server_spec: str | None = None
    evict: bool = True
    owner: Process | None = None


@dataclass
class Hold:
    """The locks on one GPU: the job's slot, and the GPU itself unless a server of ours holds it."""

    uuid: str
    slot: int
    device: int | None = None
    server: LeaseRecord | None = None

    def release(self) -> None:
        """Close the locks here; what inherited the device's keeps it."""
        for handle in (self.device, self.slot):
            if handle is not None:
                with contextlib.suppress(OSError):
                    os.close(handle)
        self.device = None


@dataclass
class Found:
    """GPUs that are locked and proven: the result of a search."""

    holds: list[Hold]
    record: LeaseRecord
    proof: Proof
    verdict: Verdict


@dataclass
class _Round:
    """What stood in the way this time: per GPU the reasons, and which of them are leases or pauses that will end."""

    visible: tuple[str, ...] = ()
    host: tuple[Reason, ...] = ()
    against: dict[str, GpuRecord] = field(default_factory=dict)
    occupied: set[str] = field(default_factory=set)
    facts: Facts | None = None

    def block(self, why: Reason, passes_surely: bool) -> None:
        assert why.gpu is not None
        self.against[why.gpu] = GpuRecord(uuid=why.gpu, verdict=decide([why]), reasons=(why,))
        if passes_surely:
            self.occupied.add(why.gpu)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        return (*self.host, *(r for gpu in self.against.values() for r in gpu.reasons))


class Search:
    """One search for GPUs; `run` returns them locked and proven, or raises GateRefused."""

    def __init__(self, policy: GatePolicy, request: Request, notify: Notify) -> None:
        self._policy, self._request, self._notify = policy, request, notify
        self._folder: Path = leases.lock_dir(policy.lock_dir)
        self._began = time.monotonic()
        self._limited_since: float | None = None
        self._waited_s = 0.0
        self._suspects: set[str] = set()
        self._refused: dict[str, GpuRecord] = {}
        self._said: tuple[str, float] = ("", 0.0)

    def run(self) -> Found:
        """Search until found; raises GateRefused when waiting cannot help or has lasted long enough."""
        while True:
            round_ = _Round()
            found = self._round(round_)
            if found is not None:
                return found
            if self._others_left(round_):
                continue
            self._wait_or_refuse(round_)
            self._refused.clear()

    def _round(self, round_: _Round) -> Found | None:
        listing = probe(self._policy.probe_timeout_s, only_list=True)
        round_.facts = Facts(listing, Second(SecondSensorRecord(status="off"), {}))
        visible = resolve(listing.devices, os.environ, self._policy.expected_uuids)
        round_.visible, round_.host = visible.uuids, (*judge_probe(listing), *visible.reasons)
        if round_.host:
            return None
        if len(visible.uuids) < self._request.gpus:
            round_.host = (too_few(visible.uuids, listing.devices, self._request.gpus),)
            return None
        holds = self._take(round_)
        if len(holds) < self._request.gpus:
            _release(holds)
            return None
        return self._prove(holds, round_)

    def _take(self, round_: _Round) -> list[Hold]:
        server = self._my_server(round_.visible)
        if server is not None and (group := self._take_all(server.uuids, round_)):
            return group
        holds: list[Hold] = []
        try:
            for uuid in sorted(round_.visible, key=lambda u: (u in self._refused, self._served(u), u)):
                if len(holds) < self._request.gpus and (hold := self._take_one(uuid, round_)):
                    holds.append(hold)
        except BaseException:
            _release(holds)
            raise
        return sorted(holds, key=lambda hold: hold.uuid)

    def _serves(self, holds: list[Hold]) -> bool:
        """Whether the GPUs are held by one server that this job may use, and are all of its GPUs."""
        server = holds[0].server if holds else None
        if server is None or server.spec != self._request.server_spec:
            return False
        same = all(hold.server is not None and hold.server.token == server.token for hold in holds)
        return same and {hold.uuid for hold in holds} == set(server.uuids)

    def _evict_all(self, holds: list[Hold], round_: _Round) -> bool:
        for hold in holds:
            if hold.server is not None and (stays := self._evict(hold, hold.server)):
                round_.block(stays, passes_surely=False)
                return False
        return True

    def _served(self, uuid: str) -> bool:
        record = leases.read_record(leases.device_path(self._folder, uuid))
        return record is not None and Occupant(uuid, record).server

    def _my_server(self, visible: tuple[str, ...]) -> LeaseRecord | None:
        """A server that this job may use: its own spec, all of its GPUs visible, and as many as the job wants."""
        spec = self._request.server_spec
        for uuid in sorted(visible) if spec is not None else ():
            record = leases.read_record(leases.device_path(self._folder, uuid))
            if record is None or record.spec != spec or not Occupant(uuid, record).server:
                continue
            fits = len(record.uuids) == self._request.gpus and set(record.uuids) <= set(visible)
            if fits and not set(record.uuids) & set(self._refused) and self._free_slots(record.uuids):
                return record
        return None

    def _free_slots(self, uuids: tuple[str, ...]) -> bool:
        paused = any(pause.is_paused(self._folder, uuid) for uuid in uuids)
        return not paused and not any(leases.is_held(leases.slot_path(self._folder, uuid)) for uuid in uuids)

    def _take_all(self, uuids: tuple[str, ...], round_: _Round) -> list[Hold]:
        holds = [hold for uuid in sorted(uuids) if (hold := self._take_one(uuid, round_))]
        if self._serves(holds):
            return holds
        _release(holds)
        return []

    def _take_one(self, uuid: str, round_: _Round) -> Hold | None:
        """The locks of one GPU (a server of ours keeps its own), or None with the reason put down in `round_`."""
        if pause.is_paused(self._folder, uuid):
            by = (pause.who(self._folder, uuid) or {}).get("by") or "somebody"
            round_.block(reason("paused", uuid, 1, f"paused by {by}"), passes_surely=True)
            return None
        slot = leases.try_lock(leases.slot_path(self._folder, uuid))
        if slot is None:
            self._blocked(Occupant(uuid, leases.read_record(leases.slot_path(self._folder, uuid))), round_)
            return None
        hold = Hold(uuid, slot)
        try:
            return self._take_device(hold, round_)
        except BaseException:
            hold.release()
            raise

    def _take_device(self, hold: Hold, round_: _Round) -> Hold | None:
        path = leases.device_path(self._folder, hold.uuid)
        hold.device = leases.try_lock(path)
        if hold.device is not None:
            return hold
        occupant = Occupant(hold.uuid, leases.read_record(path))
        if occupant.server and occupant.record is not None:
            hold.server = occupant.record
            return hold
        self._blocked(occupant, round_)
        hold.release()
        return None

    def _evict(self, hold: Hold, record: LeaseRecord) -> Reason | None:
        self._say(f"asking {Occupant(hold.uuid, record).describe()} to leave GPU {hold.uuid}")
        if servers.leave(self._folder, record, self._policy.server_stop_s):
            hold.device = leases.try_lock(leases.device_path(self._folder, hold.uuid))
        self._suspects.add(hold.uuid)
        if hold.device is not None:
            hold.server = None
            return None
        detail = f"{Occupant(hold.uuid, record).describe()} did not leave"
        return reason("server_will_not_leave", hold.uuid, record.holder.pid, detail)

    def _blocked(self, occupant: Occupant, round_: _Round) -> None:
        record = occupant.record
        code = "lease_orphaned" if occupant.orphaned else "leased"
        why = reason(code, occupant.uuid, record.holder.pid if record else 0, occupant.describe())
        round_.block(why, passes_surely=not occupant.orphaned)

    def _prove(self, holds: list[Hold], round_: _Round) -> Found | None:
        try:
            return self._proven(holds, round_)
        except BaseException:
            _release(holds)
            raise

    def _proven(self, holds: list[Hold], round_: _Round) -> Found | None:
        record, proof = self._sign(holds), self._sample(holds)
        if proof.free and self._request.evict and any(h.server for h in holds) and not self._serves(holds):
            # Only now, with GPUs enough and the others proven: no server leaves for nothing.
            if not self._evict_all(holds, round_):
                _release(holds)
                return None
            record, proof = self._sign(holds), self._sample(holds)
        round_.facts = proof.facts
        if proof.free:
            return Found(holds, record, proof, self._verdict(proof, record))
        _release(holds)
        round_.host = proof.host
        for gpu in proof.gpus:
            if gpu.verdict != "free":
                self._suspects.add(gpu.uuid)
                self._refused[gpu.uuid] = gpu
        return None

    def _sample(self, holds: list[Hold]) -> Proof:
        tenants = {h.uuid: servers.tenant(self._folder, h.server) for h in holds if h.server}
        return prove(tuple(hold.uuid for hold in holds), tenants, self._policy, self._suspects)

    def _sign(self, holds: list[Hold]) -> LeaseRecord:
        request, uuids = self._request, tuple(hold.uuid for hold in holds)
        record = leases.new_record(uuids, request.run_id, request.stage, request.shard, request.owner)
        for hold in holds:
            for handle in (hold.slot, hold.device):
                if handle is not None:
                    leases.write_record(handle, leases.for_gpu(record, hold.uuid))
        return record

    def _others_left(self, round_: _Round) -> bool:
        """Whether enough GPUs are untried to try again at once."""
        if round_.host:
            return False
        untried = set(round_.visible) - set(self._refused) - set(round_.against)
        return bool(self._refused) and len(untried) >= self._request.gpus

    def _wait_or_refuse(self, round_: _Round) -> None:
        round_.against.update(self._refused)
        usable = len(round_.visible) - len(set(self._refused) | (set(round_.against) - round_.occupied))
        if round_.occupied and not round_.host and usable >= self._request.gpus:
            self._limited_since = None
        else:
            now = time.monotonic()
            self._limited_since = now if self._limited_since is None else self._limited_since
            if not self._may_pass(round_) or now - self._limited_since >= self._policy.wait_s:
                raise refusal(self._refusal(round_))
        self._say("waiting for a GPU: " + "; ".join(f"{r.gpu or 'host'}: {r.detail}" for r in round_.reasons))
        # A little jitter keeps two searches from trying and failing in step.
        nap_s = self._policy.poll_s * random.uniform(0.8, 1.2)
        time.sleep(nap_s)
        self._waited_s += nap_s

    def _may_pass(self, round_: _Round) -> bool:
        if not all(KINDS[r.code].passing for r in round_.host):
            return False
        stuck = [g for g in round_.against.values() if not all(KINDS[r.code].passing for r in g.reasons)]
        return bool(round_.host) or len(round_.visible) - len(stuck) >= self._request.gpus

    def _say(self, text: str) -> None:
        now = time.monotonic()
        # Who holds what may change with every round while others search too; a log wants it now and then.
        quiet = _REPEAT_S if text == self._said[0] else _CHANGE_POLLS * self._policy.poll_s
        if not self._said[0] or now - self._said[1] >= quiet:
            self._said = (text, now)
            self._notify(text)

    def _verdict(self, proof: Proof, record: LeaseRecord) -> Verdict:
        return build_verdict(
            self._policy,
            self._request,
            proof.facts,
            proof.gpus,
            (),
            self._began,
            self._folder,
            record,
            proof.settle,
            self._waited_s,
        )

    def _refusal(self, round_: _Round) -> Verdict:
        assert round_.facts is not None
        return build_verdict(
            self._policy,
            self._request,
            round_.facts,
            tuple(round_.against.values()),
            round_.host,
            self._began,
            self._folder,
            waited_s=self._waited_s,
        )


def too_few(uuids: Iterable[str], devices: Iterable[Device], wanted: int) -> Reason:
    """The reason that fewer GPUs are visible than wanted, with the devices that cannot be read."""
    count = len(tuple(uuids))
    faults = [(d.index, fault) for d in devices if not d.uuid for fault in d.errors.values()]
    lost = "".join(f", device {index}: NVML error {fault.code} ({fault.name})" for index, fault in faults)
    detail = f"{count} visible{lost}"
    return reason("too_few_gpus", None, count, detail, wanted)


def _release(holds: Iterable[Hold]) -> None:
    for hold in holds:
        hold.release()
