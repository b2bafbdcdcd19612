"""Reading everything that a verdict rests on, both sensors at the same time."""

import contextlib
import socket
from collections.abc import Iterable
from typing import Literal

from draftmill.gpu import processes, shm
from draftmill.gpu.policy import GatePolicy
from draftmill.gpu.probe import Device, PendingProbe
from draftmill.gpu.record import ShmRecord
from draftmill.gpu.smi import PendingSecond
from draftmill.gpu.verdict import Facts, Person


def sense(uuids: tuple[str, ...], policy: GatePolicy) -> Facts:
    """The facts about `uuids`, within probe_timeout_s seconds and a little."""
    first = PendingProbe(policy.probe_timeout_s)
    second = PendingSecond(uuids, policy.probe_timeout_s, off=policy.second_sensor == "off")
    room = _shared_memory(policy)
    ports = {str(port): port_state(port) for port in policy.ports}
    read, witness = first.result(), second.result()
    return Facts(read, witness, room, ports, _people(read.devices, policy))


def _shared_memory(policy: GatePolicy) -> ShmRecord:
    seen = shm.look()
    if policy.stale_shm != "clean":
        return seen
    own = processes.own_pids(policy.pid_namespace)
    stale = [file for file in seen.leftovers if shm.provably_left(file, own)]
    return shm.look() if [file for file in stale if shm.remove(file)] else seen


def port_state(port: int) -> Literal["free", "taken"]:
    """Whether a server could bind the port on 127.0.0.1 now (connections that wind down do not count)."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return "taken"
    return "free"


def _people(devices: Iterable[Device], policy: GatePolicy) -> dict[int, Person]:
    listed = [p for d in devices for group in (d.compute, d.graphics, d.mps) for p in group or ()]
    return {raw.pid: person(raw.pid, policy) for raw in listed}


def person(pid: int, policy: GatePolicy) -> Person:
    """Who a listed pid is here. In a container the number may be the host's and fit a stranger by chance."""
    if processes.stat(pid) is None or not believable(pid, policy):
        return Person(believed=False)
    return Person(True, processes.user_name(processes.owner(pid)), processes.command(pid))


def believable(pid: int, policy: GatePolicy) -> bool:
    """Whether a pid that the driver names may be taken for the process of that pid here."""
    if policy.pid_namespace == "auto" and not processes.in_initial_namespace():
        return processes.uses_nvidia(pid)
    return policy.pid_namespace != "foreign"
