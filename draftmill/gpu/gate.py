"""The gate that jobs stand behind: a sentinel's proof before the job, and the job's own lease.

    verdict = gate.sentinel(policy, device, gpus=1, run_id=run, stage="extract", shard=shard)

    with gate.lease(policy, device, gpus=1, run_id=run, stage="extract", shard=shard) as lease:
        child = subprocess.Popen(argv, env={**os.environ, **lease.environment()}, pass_fds=lease.pass_fds)
        lease.attest()

A job does not trust the sentinel's file: the lease is taken first and the GPUs are proven again under it. With
`device="cpu"` nothing is read and the verdict is `not_required`, so that a job's code is the same on every machine.
Both raise GpuBusy or GateRefused (user errors of one sentence, the record in `.verdict`) instead of returning a
verdict that is not free.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from draftmill.errors import UserError
from draftmill.gpu import groups, pause, processes, servers
from draftmill.gpu import lease as leases
from draftmill.gpu.attest import Attested, attest
from draftmill.gpu.errors import GateRefused, GpuBusy, refusal
from draftmill.gpu.lease import LeaseRecord
from draftmill.gpu.policy import GatePolicy
from draftmill.gpu.processes import Process
from draftmill.gpu.record import Reason, Verdict
from draftmill.gpu.search import Found, Notify, Request, Search
from draftmill.gpu.sense import sense
from draftmill.gpu.verdict import decide, judge_probe
from draftmill.gpu.writing import not_required

__all__ = ["GateRefused", "GpuBusy", "Lease", "lease", "read_sentinel", "sentinel"]
Device = Literal["cuda", "cpu"]
_END_GRACE_S = 5.0


def sentinel(
    policy: GatePolicy,
    device: Device,
    *,
    gpus: int,
    run_id: str | None,
    stage: str | None,
    shard: str | None,
    server_spec: str | None = None,
    notify: Notify | None = None,
) -> Verdict:
    """Prove that `gpus` of the visible GPUs are free, or held by a server of ours that will serve or leave.

    Waits like `lease`, keeps nothing, and asks no server to leave.
    """
    request = Request(gpus, run_id, stage, shard, server_spec, evict=False)
    if device == "cpu":
        return not_required(policy, request)
    found = Search(policy, request, notify or _to_stderr).run()
    for hold in found.holds:
        hold.release()
    return found.verdict


@contextmanager
def lease(
    policy: GatePolicy,
    device: Device,
    *,
    gpus: int,
    run_id: str | None,
    stage: str | None,
    shard: str | None,
    server_spec: str | None = None,
    owner: Process | None = None,
    notify: Notify | None = None,
) -> "Iterator[Lease]":
    """Take `gpus` leases, prove the GPUs free under them, and keep them for the block.

    Waits without limit for living leases and paused GPUs, and `policy.wait_s` seconds for anybody else. A server of
    ours with this `server_spec` stays and is the job's to use; any other is asked to leave. `owner` is the process that
    the leases belong to for `reclaim` (this one by default; a job that starts a server names its run's).
    """
    request = Request(gpus, run_id, stage, shard, server_spec, owner=owner)
    if device == "cpu":
        yield Lease(policy, None, not_required(policy, request))
        return
    found = Search(policy, request, notify or _to_stderr).run()
    held = Lease(policy, found, found.verdict)
    try:
        held._sign()
        yield held
    finally:
        held.release()


def _to_stderr(text: str) -> None:
    print(f"gpu gate: {text}", file=sys.stderr, flush=True)


class Lease:
    """GPUs that are ours for a while, and what a process needs in order to use them.

    `uuids`: full UUIDs, sorted; empty on the CPU. `verdict`: the record they were proven free by. `server`: the record
    of the server of ours that holds them already, or None when this process does. `pass_fds`: open files that every
    process which uses the GPUs must inherit, so that the lease lives as long as the longest of them.
    """

    def __init__(self, policy: GatePolicy, found: Found | None, verdict: Verdict) -> None:
        self.verdict = verdict
        self._policy = policy
        self._holds = found.holds if found else []
        self._record = found.record if found else None
        self._folder = leases.lock_dir(policy.lock_dir) if found else Path()
        self._groups: list[Path] = []
        self._handed_over = False

    def _sign(self) -> None:
        if self._record is not None:
            self._groups.append(groups.remember(self._folder, self._record, self._record.holder, "job"))

    @property
    def uuids(self) -> tuple[str, ...]:
        """Full UUIDs of the GPUs, sorted."""
        return tuple(hold.uuid for hold in self._holds)

    @property
    def server(self) -> LeaseRecord | None:
        """The server of ours that holds the GPUs already, if one does."""
        return next((hold.server for hold in self._holds if hold.server), None)

    @property
    def pass_fds(self) -> tuple[int, ...]:
        """Open files that a process which uses the GPUs must inherit."""
        return tuple(hold.device for hold in self._holds if hold.device is not None)

    def environment(self) -> dict[str, str]:
        """What to add to the environment of a process that uses the GPUs; nothing on the CPU."""
        if self._record is None:
            return {}
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(self.uuids),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            groups.MARKER: self._record.token,
        }

    def started(self, pid: int) -> Process:
        """Write down a process that was started under this lease, so that `reclaim` can find it and its group.

        Raises UserError when it is dead already.
        """
        found = processes.identify(pid)
        if found is None:
            raise UserError(f"The process {pid} that was to use the GPUs has already ended; see its log.")
        if self._record is not None:
            self._groups.append(groups.remember(self._folder, self._record, found, "group"))
        return found

    def attest(self) -> dict[str, dict[str, object]]:
        """Read the GPUs once more: what rose since the proof is ours, or GpuBusy after ending what we started.

        Returns, by UUID, `state` (ours, no_rise, or unattributed where pids cannot be joined), `rose_mib`, `ours_mib`.
        Raises GateRefused when the GPUs cannot be read any more.
        """
        if self._record is None:
            return {}
        facts = sense(self.uuids, self._policy)
        ours, own = self._pids(), processes.own_pids(self._policy.pid_namespace)
        seen = [attest(gpu, facts, ours, self._policy, own) for gpu in self.verdict.gpus]
        reasons = (*judge_probe(facts.probe), *(r for one in seen for r in one.reasons), *_unread(seen))
        states = {one.uuid: one.to_json() for one in seen}
        self.verdict = self.verdict.model_copy(update={"attestation": {"at": leases.now(), "gpus": states}})
        if reasons:
            self._end_ours()
            raise refusal(self.verdict.model_copy(update={"verdict": decide(reasons), "reasons": reasons}))
        return states

    def hand_over(self, pid: int, spec: str) -> LeaseRecord:
        """Make the process `pid` (the leader of its own process group, which inherited `pass_fds`) the holder.

        From now on it is a server of ours that serves `spec`: its GPUs are no obstacle to a job of that spec, and any
        other job asks it to leave. Attests first. The slot stays with this job until the block ends.
        """
        leader = self.started(pid)
        status = processes.stat(pid)
        if self._record is None or status is None or status.group != pid:
            raise UserError(f"The process {pid} cannot be a server: start it with start_new_session=True on a GPU.")
        self.attest()
        record = replace(self._record, kind="server", holder=leader, group=pid, spec=spec, attested=True)
        if record.owner == self._record.holder:
            record = replace(record, owner=leader)
        for hold in self._holds:
            if hold.device is not None:
                leases.write_record(hold.device, leases.for_gpu(record, hold.uuid))
        # What was written down for this job would make the server a leftover as soon as the job is over.
        written = groups.remember(self._folder, record, leader, "server")
        for path in self._groups:
            if path != written:
                groups.forget(path)
        self._groups, self._handed_over = [written], True
        return record

    def release(self) -> None:
        """Give the GPUs back as far as this process is concerned; on a paused GPU a server of ours leaves too."""
        if not self._handed_over:
            self._forget_groups()
        for hold in self._holds:
            if hold.device is not None:
                os.close(hold.device)
                hold.device = None
            hold.release()
            if pause.is_paused(self._folder, hold.uuid):
                servers.leave_if_idle(self._folder, hold.uuid, self._policy.server_stop_s)
        self._holds = []

    def _forget_groups(self) -> None:
        # What lives on keeps its record: it is a leftover from the moment this process is gone.
        for path, record in self._recorded():
            if not groups.survivors(record):
                groups.forget(path)

    def _recorded(self) -> list[tuple[Path, groups.GroupRecord]]:
        if not self._groups:
            return []
        return [(path, record) for path, record in groups.recorded(self._folder) if path in self._groups]

    def _pids(self) -> set[int]:
        """Pids of this process, what descends from it, and whatever has the lease's files or its token."""
        assert self._record is not None
        ours = {os.getpid()} | processes.descendants(os.getpid())
        marker = f"{groups.MARKER}={self._record.token}"
        ours |= {seen.pid for seen in processes.all_processes() if processes.carries(seen.pid, marker)}
        for hold in self._holds:
            ours |= {p.pid for p in processes.holders_of(leases.device_path(self._folder, hold.uuid))}
            if hold.server is not None:
                ours |= servers.tenant(self._folder, hold.server).pids
        return ours

    def _end_ours(self) -> None:
        processes.end({p for _, record in self._recorded() for p in groups.survivors(record)}, _END_GRACE_S)


def _unread(seen: list[Attested]) -> Iterator[Reason]:
    for one in seen:
        if one.state == "unread":
            yield Reason(code="gpu_missing", gpu=one.uuid, value=0, detail="could not be read after the start")


def read_sentinel(path: Path, run_id: str | None) -> Verdict:
    """A sentinel's record, if it proves anything for this run on this host; raises UserError otherwise.

    A file that a killed run left behind, or that another host or boot wrote, proves nothing. Its age is not judged
    here (`expires_at` says it): the job's own lease proves the GPUs again.
    """
    try:
        verdict = Verdict.model_validate_json(path.read_text())
    except (OSError, ValidationError):
        raise UserError(f"The GPU sentinel {path} is no verdict record; remove it and start the build again.") from None
    same = (verdict.run_id, verdict.boot_id) == (run_id, processes.boot_id())
    if not same or verdict.exit_code != 0:
        raise UserError(
            f"The GPU sentinel {path} is of run {verdict.run_id or 'unknown'} on {verdict.host} and says "
            f"{verdict.verdict}, so it proves nothing for run {run_id}; remove it and start the build again."
        )
    return verdict
