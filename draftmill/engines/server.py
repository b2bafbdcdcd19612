"""Servers of the build's own: started behind the gate, found by later jobs, asked to restart, ended with the run.

A job calls `open_server` under its lease. If a server of the same spec holds the GPU already, the job uses it; if not,
it starts a keeper (keeper.py), makes it the holder of the lease at once, and waits until the server has proven itself:
its process lives, it says that it serves this model with this context, its KV cache is as large as it should be (a start
on a card that is half full gives a small one without a word), and a first prompt is answered. Whatever fails, the last
lines of the server's log are in the error.

The keeper is made the holder before the weights are loaded: a job that is killed meanwhile costs no second start.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from draftmill.config import Config
from draftmill.engines import server_checks, server_record
from draftmill.engines.server_checks import NotYet
from draftmill.engines.server_command import Wanted, wanted
from draftmill.engines.server_record import Plan, ServerRecord
from draftmill.errors import UserError
from draftmill.gpu import gate, groups, processes, servers
from draftmill.gpu import lease as leases
from draftmill.gpu.policy import GatePolicy

LOGS = Path("logs/servers")
_POLL_S, _HOUR_S, _RECORD_S, _ENDING_S, _KILL_S = 0.25, 3600.0, 30.0, 15.0, 10.0
_TAIL_LINES, _TAIL_BYTES = 12, 16384


@dataclass(frozen=True)
class ManagedServer:
    """A server of ours at one epoch (sglang_api.ServerHandle). It can be made again from `reference()`.

    `kv_tokens` is what its KV cache holds, `running` how many rows it runs at once (0 if it does not say).
    """

    token: str
    place: str
    url: str
    uuid: str
    epoch: int
    log: str
    expected: Mapping[str, Any]
    start_s: float
    stop_s: float
    max_restarts: int
    kv_tokens: int = 0
    running: int = 0

    @property
    def state(self) -> str:
        """One word for people: ready, restarting, dead, leaving or gone."""
        record = self._record()
        if record is None or not processes.alive(record.keeper):
            return "gone"
        if record.state != "running":
            return record.state
        return "ready" if record.epoch == self.epoch else "restarting"

    def alive(self) -> bool:
        """Whether the server's process of this epoch lives."""
        record = self._record()
        if record is None:
            # One that is there and cannot be read says nothing: this process may be out of open files.
            return server_record.path(Path(self.place), self.token).exists()
        if record.epoch != self.epoch or record.server is None:
            return False
        return record.state == "running" and processes.alive(record.server)

    @property
    def host_bytes(self) -> int:
        """Resident host memory of all its processes as last weighed; 0 before that."""
        record = self._record()
        return record.host_bytes if record else 0

    @property
    def began(self) -> float:
        """When this epoch began, in seconds since 1970; 0 when it is gone."""
        record = self._record()
        return record.began if record else 0.0

    def loaded(self) -> ManagedServer:
        """The server when its epoch has proven itself, at once if it has or is dead; blocks while it loads.

        Raises UserError when it does not start.
        """
        proven = server_record.proven(Path(self.place), self.token) == self.epoch
        return self if proven or not self.alive() else _wait(self, after=self.epoch - 1)

    def restart(self, reason: str) -> ManagedServer:
        """End the server and start it again on another port; blocks until the new one has proven itself.

        Somebody else's restart since this epoch counts as this one. Raises UserError when restarts are used up, when
        the keeper is gone, or when the server does not start.
        """
        record = self._need_record()
        lately = [why for at, why in record.restarts if at > time.time() - _HOUR_S]
        if record.epoch == self.epoch:
            if len(lately) >= self.max_restarts:
                raise UserError(
                    f"The SGLang server on {self.uuid} was restarted {len(lately)} times within an hour and is sick again "
                    f"({reason}): see {self.log}, mend what it says and give the same command again."
                )
            server_record.ask_restart(Path(self.place), self.token, self.epoch, reason)
        return _wait(self, after=self.epoch)

    def reference(self) -> dict[str, Any]:
        """A JSON value from which `attach` makes the handle again."""
        return {"kind": "managed", **asdict(self)}

    def _record(self) -> ServerRecord | None:
        return server_record.read(Path(self.place), self.token)

    def _need_record(self) -> ServerRecord:
        record = self._record()
        if record is None or not processes.alive(record.keeper) or record.state == "leaving":
            raise ServerGone(
                f"The SGLang server on {self.uuid} is gone (see {self.log}); the job is to be started again, "
                "and what was generated is kept."
            )
        return record


class ServerGone(UserError):
    """The server and its keeper are gone: killed, or asked to leave for another stage."""

    kind = "busy"


def attach(reference: Mapping[str, Any]) -> ManagedServer:
    """The handle of `reference()` at the server's present epoch. Raises UserError when the server is gone."""
    known = ManagedServer(**{name: value for name, value in reference.items() if name != "kind"})
    record = known._need_record()
    return replace(known, url=record.url, epoch=record.epoch)


def open_server(
    config: Config, lease: gate.Lease, identity: str, notify: Callable[[str], None] = print
) -> ManagedServer:
    """The server of this lease, started if there is none; returns when it has proven itself.

    `identity` is the target's (target/files.py). Raises UserError with the end of the server's log if it does not
    start in time, or is not what the configuration says; it is ended then.
    """
    need = wanted(config, identity)
    if not lease.uuids:
        raise UserError(
            "generate.sglang: a server of the build's own needs a GPU; set device to cuda, name servers under "
            "generate.sglang.urls, or set generate.engine to transformers."
        )
    place = server_record.folder(leases.lock_dir(config.gate.lock_dir))
    token = lease.server.token if lease.server else _launch(config, lease, need, place)
    known = _known(config, need, lease, place, token)
    notify(f"server on {known.uuid}: {'found' if lease.server else 'starting'}, log {known.log}")
    began = time.monotonic()
    try:
        # It may have died while nobody looked; the keeper starts it again for the asking.
        died = lease.server is not None and known.state == "dead"
        ready = known.restart("it was found dead") if died else _wait(known, after=-1)
        lease.attest()
    except UserError:
        leave(config.gate, token)
        raise
    notify(f"server on {ready.uuid}: ready after {time.monotonic() - began:.0f} s, KV cache {ready.kv_tokens} tokens")
    if words := server_checks.crowded(config.generate.sglang.in_flight, ready.running):
        notify(words)
    return ready


def _launch(config: Config, lease: gate.Lease, need: Wanted, place: Path) -> str:
    environment = lease.environment()
    token, lock_dir = environment[groups.MARKER], place.parent
    # A keeper that was killed left its record behind.
    server_record.forget_others(place, lease.uuids)
    LOGS.mkdir(parents=True, exist_ok=True)
    log = (LOGS / f"{lease.uuids[0]}-{token[:6]}.log").resolve()
    server = config.generate.sglang.server
    plan = Plan(
        token=token,
        spec=need.spec,
        uuids=lease.uuids,
        folder=str(place),
        lock_dir=str(lock_dir),
        command=need.command,
        environment={**_visible(lease), **need.environment},
        log=str(log),
        first_port=server.first_port,
        idle_s=server.idle_seconds,
        stop_s=server.stop_seconds,
        max_used_mib=config.gate.max_used_mib,
        probe_timeout_s=config.gate.probe_timeout_s,
        pass_fds=lease.pass_fds,
    )
    with open(log, "ab") as out:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "draftmill.engines.keeper"],
            env={**os.environ, **environment},
            pass_fds=lease.pass_fds,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    assert keeper.stdin is not None
    with keeper.stdin as pipe:
        pipe.write(json.dumps(asdict(plan)).encode())
    lease.hand_over(keeper.pid, need.spec)
    return token


def _visible(lease: gate.Lease) -> dict[str, str]:
    """The devices as the server must name them: SGLang with several GPUs takes CUDA_VISIBLE_DEVICES for numbers."""
    numbers = {gpu.uuid: gpu.index for gpu in lease.verdict.gpus}
    found = [numbers.get(uuid) for uuid in lease.uuids]
    if len(found) < 2 or None in found:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(number) for number in found)}


def _known(config: Config, need: Wanted, lease: gate.Lease, place: Path, token: str) -> ManagedServer:
    """The server as its record says, which its keeper writes when it has started it."""
    found: list[ServerRecord] = []

    def written() -> bool:
        record = server_record.read(place, token)
        found[:] = [record] if record is not None and record.url else []
        return bool(found)

    server = config.generate.sglang.server
    if not processes.wait_until(written, _RECORD_S):
        raise UserError(
            f"The keeper of the server on {lease.uuids[0]} wrote no record within {_RECORD_S:g} s: see its log in {LOGS}."
        )
    record = found[0]
    return ManagedServer(
        token=token,
        place=str(place),
        url=record.url,
        uuid="+".join(lease.uuids),
        epoch=record.epoch,
        log=record.log,
        expected={
            "model": need.model,
            "revision": need.revision,
            "context": need.context,
            "kv_tokens": server.min_kv_tokens or need.context,
        },
        start_s=server.start_seconds,
        stop_s=server.stop_seconds,
        max_restarts=server.max_restarts,
    )


def _wait(known: ManagedServer, after: int) -> ManagedServer:
    """Wait until an epoch later than `after` has proven itself; returns its handle."""
    end, last = time.monotonic() + known.start_s, "its keeper has not started it yet"
    while time.monotonic() < end:
        record = known._need_record()
        fresh = record.epoch > after
        if fresh and record.state == "dead":
            raise _failed(known, record, record.why)
        if fresh:
            # One that was proven before may be full of rows, and a prompt would wait behind them: the lane's canaries
            # judge it.
            first = server_record.proven(Path(known.place), known.token) != record.epoch
            try:
                room = server_checks.prove(record.url, known.expected, first=first)
                server_record.note_proven(Path(known.place), known.token, record.epoch)
                return replace(known, url=record.url, epoch=record.epoch, **asdict(room))
            except NotYet as reason:
                last = str(reason)
            except UserError as refused:
                raise _failed(known, record, str(refused).rstrip(".")) from None
        time.sleep(_POLL_S)
    raise _failed(known, known._record(), f"after {known.start_s:g} s {last}")


def _failed(known: ManagedServer, record: ServerRecord | None, why: str) -> UserError:
    log = record.log if record else known.log
    return UserError(
        f"The SGLang server on {known.uuid} did not start ({why}); the end of its log {log} may say what to mend "
        f"(generate.sglang.server):\n{_tail(Path(log))}"
    )


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"(the log cannot be read: {error.strerror})"
    # What the keeper did afterwards is no news; what the server said before it died is.
    said = [line for line in lines if line.strip() and not line.startswith("[keeper]")]
    return "\n".join(f"  | {line}" for line in said[-_TAIL_LINES:]) or "  | (empty)"


def leave(policy: GatePolicy, token: str) -> None:
    """End the server of this lease, whoever uses it; SIGKILL after the gate's `server_stop_s`.

    The caller may hold the lease's open files itself, so the end of the keeper is waited for and not that of the lock.
    """
    folder = leases.lock_dir(policy.lock_dir)
    occupants = (leases.occupant(folder, uuid) for uuid in leases.known_gpus(folder))
    for record in (found.record for found in occupants if found is not None):
        if record is not None and record.token == token and record.kind == "server":
            servers.signal_group(record, signal.SIGTERM)
            if processes.wait_gone([record.holder], policy.server_stop_s):
                servers.signal_group(record, signal.SIGKILL)
                processes.wait_gone([record.holder], _KILL_S)
            return


def end_servers(policy: GatePolicy, run_id: str | None = None, notify: Callable[[str], None] = print) -> int:
    """Ask servers of ours to leave whose last job was of this run (of any run for None); returns how many left.

    A server that a job of another run uses now, or used last, stays.
    """
    folder, left = leases.lock_dir(policy.lock_dir), set[str]()
    for uuid in leases.known_gpus(folder):
        found = leases.occupant(folder, uuid)
        if found is None or not found.server or found.record is None or found.record.token in left:
            continue
        last = leases.read_record(leases.slot_path(folder, uuid)) or found.record
        of_run = run_id is None or last.run_id == run_id
        if of_run and servers.leave_if_idle(folder, uuid, policy.server_stop_s):
            left.add(found.record.token)
            notify(f"the server on GPU {uuid} has left")
    return len(left)


def _in_use(policy: GatePolicy, run_id: str) -> bool:
    folder = leases.lock_dir(policy.lock_dir)
    slots = [leases.slot_path(folder, uuid) for uuid in leases.known_gpus(folder)]
    held = [leases.read_record(slot) for slot in slots if leases.is_held(slot)]
    return any(record is not None and record.run_id == run_id for record in held)


def end_servers_at_exit(policy: GatePolicy, run_id: str) -> None:
    """End this run's servers when this process ends: after success, an error or Ctrl-C, but not after SIGKILL.

    After SIGKILL they end when they were idle for generate.sglang.server.idle_seconds.
    """
    mine = os.getpid()

    def end() -> None:
        if os.getpid() == mine:
            # After Ctrl-C the jobs are ending at this moment.
            processes.wait_until(lambda: not _in_use(policy, run_id), _ENDING_S)
            end_servers(policy, run_id, lambda text: print(f"draftmill: {text}", file=sys.stderr, flush=True))

    atexit.register(end)
