"""The small process that keeps one managed server: its parent, its clock and its end.

`python -m draftmill.engines.keeper` with a plan (server_record.Plan) on standard input. It leads the process group,
holds the lease's open files and passes them on, starts the server, and watches: whether anybody uses it (a held slot
lock), whether it lives, whether a job asks for a fresh one. It ends on SIGTERM (another stage needs the GPU, or the run
is over), after `idle_s` seconds without use, and when a dead server has no user. The server gets SIGKILL from the kernel
if the keeper dies first. The lease is let go only when the memory of the GPU is free again, so that nobody ever starts
on a card that is still half full; the same holds between two starts of the server.

Nothing here speaks HTTP: whether the server answers well is for its users to judge (server.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftmill.engines import server_record
from draftmill.engines.server_record import Plan, ServerRecord
from draftmill.gpu import lease as leases
from draftmill.gpu import processes, shm
from draftmill.gpu.probe import probe
from draftmill.gpu.processes import Process

_TICK_S, _WEIGH_S = 0.25, 10.0
# Whoever works between two jobs may still ask for a dead server; after this it is left.
_DEAD_S, _GONE_S, _FREE_S = 20.0, 10.0, 60.0
_PR_SET_CHILD_SUBREAPER = 36
_KEPT = 50
_PAGE = os.sysconf("SC_PAGE_SIZE")
_libc = ctypes.CDLL(None)


class Keeper:
    """Keeps the server of one plan until nobody needs it."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._place = plan, Path(plan.folder)
        self._slots = [leases.slot_path(Path(plan.lock_dir), uuid) for uuid in plan.uuids]
        self._leaving, self._held = "", False
        self._used = self._weighed = self._died = time.monotonic()
        self._tried: set[int] = set()
        self._port_lock = -1
        self._child: subprocess.Popen[bytes] | None = None
        me = processes.myself()
        self._record = ServerRecord(
            token=plan.token, spec=plan.spec, uuids=plan.uuids, url="", epoch=0, state="dead", keeper=me,
            server=None, log=plan.log, began=time.time(),
        )  # fmt: skip

    def run(self) -> None:
        """Start the server and keep it; returns when it is gone and its memory with it."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._asked_to_leave)
        # Orphans of a killed launcher become children of this process, so that none is lost sight of.
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            self._start("first start")
            while not self._leaving:
                time.sleep(_TICK_S)
                self._look()
        except OSError as error:
            self._leaving = f"a fault: {error}"
        finally:
            self._say(f"leaving: {self._leaving or 'a fault'}")
            with contextlib.suppress(OSError):  # on a full disk the server is to be ended all the same
                self._note(state="leaving", why=self._leaving)
            self._stop()
            server_record.remove(self._place, self._plan.token)

    def _asked_to_leave(self, number: int, _: object) -> None:
        self._leaving = self._leaving or f"asked by {signal.Signals(number).name}"

    def _look(self) -> None:
        now = time.monotonic()
        in_use = any(leases.is_held(slot) for slot in self._slots)
        self._used = now if in_use else self._used
        if self._child is not None and (status := self._child.poll()) is not None:
            self._child, self._died = None, now
            self._say(f"the server ended by itself with status {status}")
            self._note(state="dead", why=f"it ended by itself with status {status}", server=None)
        if not (in_use or self._holds()):
            self._leaving = self._leaving or "the job that started it is gone and never made it the lease's holder"
        elif (asked := server_record.take_request(self._place, self._plan.token)) is not None:
            self._restart(*asked)
        elif self._child is None and not in_use and now - self._died >= _DEAD_S:
            self._leaving = self._leaving or "the server is dead and nobody uses it"
        elif now - self._used >= self._plan.idle_s:
            self._leaving = self._leaving or f"not used for {self._plan.idle_s:g} s"
        elif self._child is not None and now - self._weighed >= _WEIGH_S:
            self._weighed = now
            with contextlib.suppress(OSError):  # a full disk is no reason to end a server; it is weighed again
                self._note(host_bytes=sum(_resident(found.pid) for found in self._others()))

    def _holds(self) -> bool:
        """Whether the lease says that this process is its holder; once it does it stays so."""
        if not self._held:
            path = leases.device_path(Path(self._plan.lock_dir), self._plan.uuids[0])
            record = leases.read_record(path)
            self._held = record is not None and record.holder == self._record.keeper
        return self._held

    def _restart(self, epoch: int, why: str) -> None:
        if epoch != self._record.epoch:
            return
        self._say(f"a restart was asked for: {why}")
        self._note(
            state="dead", why=f"restarting: {why}", restarts=(*self._record.restarts, (time.time(), why))[-_KEPT:]
        )
        self._stop()
        if not self._leaving:
            self._start(why)

    def _start(self, why: str) -> None:
        plan = self._plan
        if self._port_lock >= 0:
            os.close(self._port_lock)
        port, self._port_lock = server_record.take_port(Path(plan.lock_dir), plan.first_port, self._tried)
        self._tried.add(port)
        command = [part.replace("{port}", str(port)) for part in plan.command]
        # Rows carry the epoch, so it rises across keepers too.
        epoch = max(self._record.epoch + 1, int(time.time()))
        with open(plan.log, "ab") as log:
            log.write(f"[keeper] epoch {epoch} ({why}): {' '.join(command)}\n".encode())
            log.flush()
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **plan.environment},
                pass_fds=plan.pass_fds,
                preexec_fn=processes.dying_with_parent(),
            )
        self._note(
            url=f"http://127.0.0.1:{port}", epoch=epoch, state="running", why=why, began=time.time(),
            server=processes.identify(self._child.pid), host_bytes=0,
        )  # fmt: skip

    def _stop(self) -> None:
        """End everything below this process, and wait until the GPUs' memory is free."""
        if self._child is not None:
            self._child.terminate()
        made = {found.pid for found in self._others()}
        processes.wait_until(lambda: self._reap() and not self._others(), self._plan.stop_s)
        end = time.monotonic() + _GONE_S
        while (left := self._others()) and time.monotonic() < end:
            made |= {found.pid for found in left}
            for found in left:
                processes.signal_process(found, signal.SIGKILL)
            self._reap()
            time.sleep(_TICK_S / 10)
        self._reap()
        self._child = None
        freed = processes.wait_until(self._memory_free, _FREE_S, every_s=_TICK_S)
        self._say("its processes are gone" + (", its memory is free" if freed else "; its memory is still held"))
        self._tidy_shm(made)

    def _reap(self) -> bool:
        # The server's own status is taken by its Popen; orphans that came to this process are reaped here.
        if self._child is not None:
            self._child.poll()
        return True

    def _others(self) -> list[Process]:
        """Living processes of the server: what descends from this process or is in its group."""
        me = os.getpid()
        below = processes.descendants(me)
        return [p.process for p in processes.all_processes() if p.pid != me and (p.group == me or p.pid in below)]

    def _memory_free(self) -> bool:
        seen = probe(self._plan.probe_timeout_s)
        found = [device.mem for uuid in self._plan.uuids if (device := seen.device(uuid)) is not None]
        whole = len(found) == len(self._plan.uuids)
        return whole and all(mem is not None and mem.used >> 20 <= self._plan.max_used_mib for mem in found)

    def _tidy_shm(self, made: set[int]) -> None:
        # The engine leaves a small file a start, also after a clean end; days of starts would fill /dev/shm.
        for file in shm.look(every=True).leftovers:
            nameless = file.name.startswith("sglang_loads_") and file.mtime >= self._record.began - 1
            ours = file.creator_pid in made or (file.creator_pid is None and nameless)
            if ours and file.uid == os.getuid() and not shm.used(file, ()):
                shm.remove(file)

    def _note(self, **changed: Any) -> None:
        self._record = replace(self._record, **changed)
        server_record.write(self._place, self._record)

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError), open(self._plan.log, "ab") as log:
            log.write(f"[keeper] {text}\n".encode())


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0


def main() -> None:
    """Keep the server whose plan comes on standard input."""
    plan = Plan.from_json(json.load(sys.stdin))
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)
    Keeper(plan).run()


if __name__ == "__main__":
    main()
