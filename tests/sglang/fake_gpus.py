"""A fake driver whose memory follows living processes: what carries a lease's token and a stand-in's name holds a GPU."""

import os
import threading
from dataclasses import replace
from pathlib import Path

from draftmill.gpu import processes
from tests.gpu_gate.conftest import GIB, Host

HELD = 60 * GIB


def environment_of(pid: int) -> dict[str, str]:
    try:
        raw = (Path("/proc") / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    return dict(part.split("=", 1) for part in raw.decode(errors="replace").split("\0") if "=" in part)


class Driver:
    """Shows `HELD` bytes on every GPU that a living stand-in named `program` was given. Use as a context manager."""

    def __init__(self, host: Host, program: str) -> None:
        self._host, self._program = host, program
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._known: dict[processes.Process, set[str]] = {}

    def __enter__(self) -> "Driver":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        last = None
        while not self._stop.wait(0.05):
            seen = self.look()
            if seen != last:
                self._show(seen)
            last = seen

    def look(self) -> dict[str, list[int]]:
        """Pids of living stand-ins by GPU."""
        found: dict[str, list[int]] = {}
        for process in processes.all_processes():
            if process.process not in self._known:
                line = processes.command(process.pid, 4000) or ""
                shown = environment_of(process.pid).get("CUDA_VISIBLE_DEVICES", "") if self._program in line else ""
                # A process that is about to become the stand-in still has its parent's command line.
                if self._program not in line:
                    continue
                self._known[process.process] = self._uuids(shown)
            for uuid in self._known[process.process]:
                found.setdefault(uuid, []).append(process.pid)
        return found

    def _uuids(self, shown: str) -> set[str]:
        names = [name for name in shown.split(",") if name]
        return {self._host.gpus[int(name)].uuid if name.isdigit() else name for name in names}

    def _show(self, seen: dict[str, list[int]]) -> None:
        host = self._host
        host.processes = [
            f"proc {index} {pid} {HELD} c" for index, gpu in enumerate(host.gpus) for pid in seen.get(gpu.uuid, [])
        ]
        host.gpus = [replace(gpu, used=HELD * len(seen.get(gpu.uuid, []))) for gpu in host.gpus]
        host.write()


def living(program: str) -> list[int]:
    """Pids of living processes with this text in their command line, this one excepted."""
    found = []
    for seen in processes.all_processes():
        if seen.pid != os.getpid() and program in (processes.command(seen.pid, 4000) or ""):
            found.append(seen.pid)
    return found
