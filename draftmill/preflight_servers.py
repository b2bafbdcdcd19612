"""Room on this host for as many servers as there will be, looked at before the first one starts.

A host that is short is found out after hours otherwise: the third server dies of SIGBUS in a full /dev/shm, or the
kernel kills one of four when the host's memory is gone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

from draftmill.config import Config
from draftmill.engines.open_files import check_files, files_needed
from draftmill.engines.server_record import bindable, candidate_ports
from draftmill.errors import UserError
from draftmill.memory import available_memory, memory_limit

_MIB, _GIB = 2**20, 2**30
# Resident memory of SGLang's three processes beside the weights, which are mapped and can be dropped.
_SERVER_BYTES, _RANK_BYTES = 8 * _GIB, 4 * _GIB
# One small file a start, and NCCL's buffers where several GPUs serve together.
_SHM_BYTES, _NCCL_BYTES = 8 * _MIB, 128 * _MIB


@dataclass(frozen=True, slots=True)
class ServerNeeds:
    """What a build takes of the host at the same time: its own servers, their bytes and ports, open files of who asks."""

    servers: int
    memory: int
    shared_memory: int
    files: int


def server_needs(config: Config, gpus: int) -> ServerNeeds:
    """The needs of a build that may use `gpus` GPUs; only open files when somebody else runs its servers."""
    sglang = config.generate.sglang
    if config.generate.engine != "sglang" or (config.device == "cpu" and not sglang.urls):
        return ServerNeeds(0, 0, 0, 0)
    if sglang.urls:
        return ServerNeeds(0, 0, 0, files_needed(len(sglang.urls), sglang.in_flight))
    servers, each = max(gpus // sglang.server.gpus, 1), sglang.server.gpus
    return ServerNeeds(
        servers=servers,
        memory=servers * (_SERVER_BYTES + (each - 1) * _RANK_BYTES),
        shared_memory=servers * (_SHM_BYTES + (each * _NCCL_BYTES if each > 1 else 0)),
        files=files_needed(servers, sglang.in_flight),
    )


def check_host(config: Config, gpus: int) -> None:
    """Raise UserError for the first thing this host lacks: SGLang, memory, /dev/shm, ports, open files."""
    need = server_needs(config, gpus)
    check_files(need.files)
    if not need.servers:
        return
    _check_installed(config)
    _check_memory(need)
    _check_shared_memory(need)
    _check_ports(config, need)


def _check_installed(config: Config) -> None:
    server = config.generate.sglang.server
    if server.command is not None:
        return
    python = server.python or sys.executable
    look = "import importlib.util, sys; sys.exit(3 * (importlib.util.find_spec('sglang') is None))"
    try:
        found = subprocess.run(
            [python, "-c", look], env={**os.environ, **server.environment}, capture_output=True, timeout=60, check=False
        ).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"generate.sglang.server.python: {python} cannot be run ({error}).") from None
    if found != 0:
        raise UserError(
            f"generate.sglang.server: SGLang is not installed for {python}: install envs/gpu.txt, or set python and "
            "environment to where it is."
        )


def _check_memory(need: ServerNeeds) -> None:
    limit, available = memory_limit(), available_memory()
    if limit is not None and need.memory > limit:
        raise UserError(
            f"resources gpu: {need.servers} SGLang servers may hold {need.memory / _GIB:.0f} GiB of host memory but this "
            f"process's control group is limited to {limit / _GIB:.0f} GiB: raise it, or build with fewer GPUs."
        )
    if available is not None and need.memory > available:
        print(
            f"draftmill: {need.servers} SGLang servers may hold {need.memory / _GIB:.0f} GiB of host memory and "
            f"{available / _GIB:.0f} GiB are available now: stop what else runs, or build with fewer GPUs.",
            file=sys.stderr,
        )


def _check_shared_memory(need: ServerNeeds) -> None:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return
    if need.shared_memory > free:
        raise UserError(
            f"/dev/shm has {free // _MIB} MiB free and {need.servers} SGLang servers need {need.shared_memory // _MIB} MiB: "
            "run `draftmill reclaim`, or give the container a larger one (docker run --shm-size)."
        )


def _check_ports(config: Config, need: ServerNeeds) -> None:
    first = config.generate.sglang.server.first_port
    free = sum(bindable(port) for port in candidate_ports(first))
    if free < need.servers:
        raise UserError(
            f"generate.sglang.server.first_port: only {free} of the ports from {first} on are free and {need.servers} "
            "servers need one each: choose another range."
        )
