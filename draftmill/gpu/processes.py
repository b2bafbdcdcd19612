"""Who a process is, for longer than its pid: a pid with the instant it started, which the kernel never gives out twice.

Everything that may end in a signal goes through here. `Process` is an identity that survives the reuse of its pid;
`signal_process` checks it at the last moment through a pidfd, so that the signal cannot hit a stranger.
"""

import contextlib
import ctypes
import os
import pwd
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Process:
    """A process: its pid, and its start in clock ticks after boot (field 22 of /proc/PID/stat)."""

    pid: int
    start: int

    def to_json(self) -> dict[str, int]:
        """The identity as plain values."""
        return asdict(self)

    @staticmethod
    def from_json(value: Any) -> "Process | None":
        """The identity, or None for anything that is not one."""
        try:
            return Process(int(value["pid"]), int(value["start"]))
        except (KeyError, TypeError, ValueError):
            return None


@dataclass(frozen=True)
class Stat:
    """What /proc/PID/stat says. `state` is one letter: Z and X are dead, D is uninterruptible sleep."""

    pid: int
    comm: str
    state: str
    parent: int
    group: int
    session: int
    start: int

    @property
    def dead(self) -> bool:
        """Whether it is a zombie or gone: it holds nothing any more."""
        return self.state in "ZXx"

    @property
    def process(self) -> Process:
        """Its identity."""
        return Process(self.pid, self.start)


def stat(pid: int) -> Stat | None:
    """The process's status, zombies included, or None when there is no such process here."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The name is in parentheses and may itself hold any character.
    head, _, tail = text.rpartition(") ")
    fields = tail.split()
    if len(fields) < 20:
        return None
    comm = head.partition("(")[2]
    return Stat(pid, comm, fields[0], int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def identify(pid: int) -> Process | None:
    """The identity of a living process, or None when it is dead (a zombie is dead: it holds nothing)."""
    found = stat(pid)
    return None if found is None or found.dead else found.process


def myself() -> Process:
    """The identity of this process."""
    found = identify(os.getpid())
    return found if found is not None else Process(os.getpid(), -1)


def alive(process: Process) -> bool:
    """Whether this very process lives, not another one that was given its pid."""
    return identify(process.pid) == process


def all_processes() -> Iterator[Stat]:
    """Every living process that can be seen here."""
    for entry in os.listdir(_PROC):
        if entry.isdigit() and (found := stat(int(entry))) is not None and not found.dead:
            yield found


def owner(pid: int) -> int | None:
    """The uid that the process runs as, or None when it cannot be seen."""
    try:
        return (_PROC / str(pid)).stat().st_uid
    except OSError:
        return None


def user_name(uid: int | None) -> str | None:
    """The account's name, or its number where it has none."""
    if uid is None:
        return None
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def command(pid: int, limit: int = 120) -> str | None:
    """The command line, cut to `limit` characters, or the kernel's name for the process, or None."""
    try:
        line = (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return None
    if line:
        return line[:limit]
    found = stat(pid)
    return f"[{found.comm}]" if found else None


def carries(pid: int, marker: str) -> bool:
    """Whether the process was started with `marker` (NAME=value) in its environment."""
    try:
        return marker.encode() in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def open_files(pid: int) -> list[os.stat_result]:
    """The status of each open file of the process; empty where it may not be looked at."""
    found = []
    with contextlib.suppress(OSError):
        for number in os.listdir(_PROC / str(pid) / "fd"):
            with contextlib.suppress(OSError):
                found.append(os.stat(_PROC / str(pid) / "fd" / number))
    return found


def holders_of(path: Path) -> list[Process]:
    """Living processes that have this very file open, as far as they may be looked at; this process excepted."""
    try:
        wanted = path.stat()
    except OSError:
        return []
    same = (wanted.st_dev, wanted.st_ino)
    others = (found for found in all_processes() if found.pid != os.getpid())
    return [p.process for p in others if any((s.st_dev, s.st_ino) == same for s in open_files(p.pid))]


def uses_nvidia(pid: int) -> bool:
    """Whether the process has an NVIDIA device open, which makes it plausible as the owner of GPU memory."""
    try:
        numbers = os.listdir(_PROC / str(pid) / "fd")
    except OSError:
        return False
    for number in numbers:
        with contextlib.suppress(OSError):
            if os.readlink(_PROC / str(pid) / "fd" / number).startswith("/dev/nvidia"):
                return True
    return False


def in_initial_namespace() -> bool:
    """Whether this process sees the host's own pids (the kernel numbers the initial pid namespace 0xEFFFFFFC)."""
    return pid_namespace() == "pid:[4026531836]"


def pid_namespace() -> str | None:
    """The name of this process's pid namespace, or None where the system does not say."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def boot_id() -> str | None:
    """The kernel's name for this boot; pids and start times of another boot mean nothing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() or None
    except OSError:
        return None


def signal_process(process: Process, number: signal.Signals) -> bool:
    """Send a signal to this very process; False when it is gone or not ours to signal."""
    try:
        handle = os.pidfd_open(process.pid)
    except (ProcessLookupError, PermissionError):
        return False
    except OSError:
        return _signal_by_pid(process, number)
    try:
        if not alive(process):
            return False
        signal.pidfd_send_signal(handle, number)
        return True
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(handle)


def _signal_by_pid(process: Process, number: signal.Signals) -> bool:
    # Kernels without pidfd leave a window of microseconds between the check and the signal.
    if not alive(process):
        return False
    try:
        os.kill(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def dying_with_parent() -> Callable[[], None]:
    """What a child does before its exec (preexec_fn) to be killed as the thread that started it ends, however it ends."""
    parent = os.getpid()

    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def end(processes: Iterable[Process], grace_s: float, kill_wait_s: float = 10.0) -> list[Process]:
    """TERM, then KILL after `grace_s` seconds; returns those that live on `kill_wait_s` seconds after that."""
    left = [p for p in processes if signal_process(p, signal.SIGTERM)]
    left = wait_gone(left, grace_s)
    for process in left:
        signal_process(process, signal.SIGKILL)
    return wait_gone(left, kill_wait_s)


def wait_gone(processes: Iterable[Process], timeout_s: float) -> list[Process]:
    """Wait until all are dead, at most `timeout_s` seconds; returns the living."""
    left = list(processes)
    wait_until(lambda: not any(alive(p) for p in left), timeout_s)
    return [p for p in left if alive(p)]


def wait_until(true: Callable[[], bool], timeout_s: float, every_s: float = 0.05) -> bool:
    """Poll a condition until it holds or the time is over; returns whether it held."""
    deadline = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() >= deadline:
            return False
        time.sleep(every_s)
    return True


def own_pids(setting: str) -> bool:
    """Whether pids from outside are pids of this namespace: as set, or on the host itself for "auto"."""
    return setting == "same" or (setting == "auto" and in_initial_namespace())


def descendants(pid: int) -> set[int]:
    """Pids of the living children of a process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for seen in all_processes():
        children.setdefault(seen.parent, []).append(seen.pid)
    found, todo = set[int](), [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            found.add(child)
            todo.append(child)
    return found
