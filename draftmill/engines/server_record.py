"""What a managed server's keeper and the jobs that use it tell each other: a few small files under the lease.

The lease says who serves what; where it is reached stands in a file named by the lease's token, in a folder that only
this user can write to, so that no job ever guesses a port. A job asks for a restart by a file too, naming the epoch that
it saw, so that two jobs which notice the same fault cause one restart. A third file says which epoch has answered a first
prompt, so that nobody asks a server for one that is full of rows. No sockets, no threads: either side may be
killed at any moment and the other reads whole files.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from draftmill.errors import UserError
from draftmill.gpu import lease as leases
from draftmill.gpu import processes
from draftmill.gpu.processes import Process

# Ports that a server derives from its own lie within the hundred above it.
PORT_STEP, PORT_RANGE = 100, 100

ServerState = Literal["running", "dead", "leaving"]


@dataclass(frozen=True)
class Plan:
    """What a keeper is to keep. `command` holds {port}; `pass_fds` are the lease's open files, which it passes on.

    `idle_s`: seconds without use after which it ends; `stop_s`: seconds between SIGTERM and SIGKILL of the server.
    """

    token: str
    spec: str
    uuids: tuple[str, ...]
    folder: str
    lock_dir: str
    command: tuple[str, ...]
    environment: dict[str, str]
    log: str
    first_port: int
    idle_s: float
    stop_s: float
    max_used_mib: int
    probe_timeout_s: float
    pass_fds: tuple[int, ...] = ()

    @staticmethod
    def from_json(value: Any) -> Plan:
        """The plan as `asdict` and JSON made it."""
        lists = {name: tuple(value[name]) for name in ("uuids", "command", "pass_fds")}
        return Plan(**{**value, **lists})


@dataclass(frozen=True)
class ServerRecord:
    """A managed server as its keeper sees it: the process lives or not; whether it answers is for its users to find.

    `epoch` rises with every start, `began` is the start of this epoch in seconds since 1970, `host_bytes` the resident
    memory of all its processes, `restarts` when and why it was started anew.
    """

    token: str
    spec: str
    uuids: tuple[str, ...]
    url: str
    epoch: int
    state: ServerState
    keeper: Process
    server: Process | None
    log: str
    began: float
    why: str = ""
    host_bytes: int = 0
    restarts: tuple[tuple[float, str], ...] = ()

    @staticmethod
    def from_json(value: Any) -> ServerRecord | None:
        """The record, or None for anything that is not wholly one."""
        try:
            keeper = Process.from_json(value["keeper"])
            if keeper is None:
                return None
            typed = {
                "uuids": tuple(value["uuids"]),
                "restarts": tuple((float(at), str(why)) for at, why in value["restarts"]),
                "keeper": keeper,
                "server": Process.from_json(value["server"]),
            }
            return ServerRecord(**{**value, **typed})
        except (KeyError, TypeError, ValueError):
            return None


def folder(lock_dir: Path) -> Path:
    """The folder of this user's server records. Raises UserError when somebody else could write to it."""
    found = lock_dir / f"servers-{os.getuid()}"
    found.mkdir(mode=0o700, exist_ok=True)
    status = found.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022 or found.is_symlink():
        raise UserError(
            f"The folder {found} can be written to by others, so its records cannot be trusted; remove it, or set "
            "gate.lock_dir to another folder."
        )
    return found


def path(place: Path, token: str) -> Path:
    """The record of the server whose lease has this token."""
    return place / f"{token}.server.json"


def read(place: Path, token: str) -> ServerRecord | None:
    """The server's record, or None when there is none or it is not whole."""
    try:
        return ServerRecord.from_json(json.loads(path(place, token).read_text()))
    except (OSError, ValueError):
        return None


def write(place: Path, record: ServerRecord) -> None:
    """Replace the server's record, whole or not at all."""
    _publish(path(place, record.token), asdict(record))


def remove(place: Path, token: str) -> None:
    """Forget the server."""
    for file in (path(place, token), _request(place, token), _proof(place, token)):
        with contextlib.suppress(FileNotFoundError):
            file.unlink()


def records(place: Path) -> Iterator[ServerRecord]:
    """All servers whose keepers live."""
    return (record for record in _written(place) if processes.alive(record.keeper))


def _written(place: Path) -> Iterator[ServerRecord]:
    for file in sorted(place.glob("*.server.json")):
        if (record := read(place, file.name.removesuffix(".server.json"))) is not None:
            yield record


def forget_others(place: Path, uuids: Collection[str]) -> None:
    """Remove records that name any of these GPUs: for who holds their leases, and knows that no other server does."""
    for record in _written(place):
        if set(record.uuids) & set(uuids):
            remove(place, record.token)


def ask_restart(place: Path, token: str, epoch: int, why: str) -> None:
    """Ask the keeper to start the server anew, if its epoch is still `epoch`."""
    _publish(_request(place, token), {"epoch": epoch, "why": why, "at": time.time()})


def take_request(place: Path, token: str) -> tuple[int, str] | None:
    """The epoch and reason of a restart that was asked for; the request is taken away."""
    file = _request(place, token)
    try:
        asked = json.loads(file.read_text())
        found = int(asked["epoch"]), str(asked["why"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        found = None
    with contextlib.suppress(FileNotFoundError):
        file.unlink()
    return found


def note_proven(place: Path, token: str, epoch: int) -> None:
    """Note that the server has answered a first prompt in this epoch."""
    with contextlib.suppress(OSError):  # it is asked once more then
        _publish(_proof(place, token), epoch)


def proven(place: Path, token: str) -> int | None:
    """The last epoch in which the server is known to have answered a first prompt, or None."""
    try:
        return int(json.loads(_proof(place, token).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _request(place: Path, token: str) -> Path:
    return place / f"{token}.restart.json"


def _proof(place: Path, token: str) -> Path:
    return place / f"{token}.proven.json"


def _publish(file: Path, value: Any) -> None:
    draft = file.with_name(f"{file.name}.{os.getpid()}.part")
    draft.write_text(json.dumps(value) + "\n")
    draft.replace(file)


def candidate_ports(first: int) -> list[int]:
    """Ports a server may get, spaced so that what it derives from its own collides with no other server."""
    return [port for number in range(PORT_RANGE) if (port := first + number * PORT_STEP) + PORT_STEP < 65536]


def bindable(port: int) -> bool:
    """Whether a server could bind this port of 127.0.0.1 now, connections that wind down included."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def take_port(lock_dir: Path, first: int, tried: set[int]) -> tuple[int, int]:
    """A port and the open lock that keeps other keepers off it while its server loads, which takes a minute.

    Ports in `tried` come last: a server that is started anew on its old port was seen to hang. Raises OSError when
    none is left.
    """
    ports = candidate_ports(first)
    for port in sorted(ports, key=lambda port: (port in tried, port)):
        handle = leases.try_lock(lock_dir / f"port-{port}.port")
        if handle is None:
            continue
        if bindable(port):
            return port, handle
        os.close(handle)
    raise OSError(f"none of the {len(ports)} ports from {first} on is free")
