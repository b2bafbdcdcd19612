"""Read NVML and print one JSON document; run as a program of its own, never imported by the gate.

A call into a broken driver may never return and Python cannot interrupt a ctypes call, so the reading happens in a
child process which the gate can leave behind. The document names its number of devices and the digest of their facts:
half a document, or one with foreign text inside, cannot pass. Each fact that could not be read is null, with NVML's
error code under `errors`; nothing is decided here.

Usage: python -P probe_child.py [--list]      (--list: identities only)
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import pynvml as nvml

_KMSG_LIMIT = 200_000


def main() -> int:
    """Print the document; returns the exit status."""
    report = _take_over_stdout()
    document = _document(only_list="--list" in sys.argv[1:])
    os.write(report, json.dumps(document).encode() + b"\n")
    return 0


def _take_over_stdout() -> int:
    # A library that prints to stdout would land inside the document.
    report = os.dup(1)
    os.dup2(2, 1)
    return report


def _document(only_list: bool) -> dict[str, Any]:
    binding = f"nvidia-ml-py {_binding_version()}"
    try:
        nvml.nvmlInit()
        count = int(nvml.nvmlDeviceGetCount())
    except nvml.NVMLError as error:
        return {"schema": "gpu-probe/1", "binding": binding, "error": _error(error)}
    read = _identity if only_list else _facts
    gpus = [read(index) for index in range(count)]
    driver: dict[str, Any] = {"errors": {}}
    _read(driver, "driver", nvml.nvmlSystemGetDriverVersion)
    return {
        "schema": "gpu-probe/1",
        "binding": binding,
        "driver": driver["driver"],
        "devices_reported": count,
        "gpus": gpus,
        "sha256": hashlib.sha256(json.dumps(gpus, sort_keys=True).encode()).hexdigest(),
    }


def _binding_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("nvidia-ml-py")
    except PackageNotFoundError:
        return "of unknown version"


def _error(error: Any) -> dict[str, Any]:
    return {"code": int(error.value), "name": type(error).__name__.removeprefix("NVMLError_")}


def _read(into: dict[str, Any], field: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    into[field] = None
    try:
        into[field] = call(*args, **kwargs)
    except nvml.NVMLError as error:
        into["errors"][field] = _error(error)
    except UnicodeDecodeError:
        into["errors"][field] = {"code": -1, "name": "UnreadableText"}


def _identity(index: int) -> dict[str, Any]:
    gpu: dict[str, Any] = {"index": index, "uuid": None, "name": None, "pci": None, "errors": {}}
    holder: dict[str, Any] = {"errors": gpu["errors"]}
    _read(holder, "handle", nvml.nvmlDeviceGetHandleByIndex, index)
    if holder["handle"] is not None:
        _read(gpu, "uuid", nvml.nvmlDeviceGetUUID, holder["handle"])
        _read(gpu, "name", nvml.nvmlDeviceGetName, holder["handle"])
        _read(gpu, "pci", _pci, holder["handle"])
    return gpu


def _facts(index: int) -> dict[str, Any]:
    gpu = _identity(index)
    if "handle" in gpu["errors"]:
        return gpu
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    _read(gpu, "mem", _memory, handle)
    _read(gpu, "compute", _processes, nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    _read(gpu, "graphics", _processes, nvml.nvmlDeviceGetGraphicsRunningProcesses, handle)
    _read(gpu, "mps", _processes, nvml.nvmlDeviceGetMPSComputeRunningProcesses, handle)
    _read(gpu, "utilization", lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu))
    _read(gpu, "compute_mode", lambda: int(nvml.nvmlDeviceGetComputeMode(handle)))
    _read(gpu, "mig", lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0]))
    _read(gpu, "persistence", lambda: bool(nvml.nvmlDeviceGetPersistenceMode(handle)))
    _health(gpu, handle)
    return gpu


def _health(gpu: dict[str, Any], handle: Any) -> None:
    uncorrected, volatile = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    _read(gpu, "ecc_uncorrected", lambda: int(nvml.nvmlDeviceGetTotalEccErrors(handle, uncorrected, volatile)))
    _read(gpu, "remapped", lambda: [bool(x) for x in nvml.nvmlDeviceGetRemappedRows(handle)[2:4]])
    _read(gpu, "retire_pending", lambda: bool(nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle)))
    _read(gpu, "recovery_action", _recovery_action, handle)
    _read(gpu, "clocks_event_reasons", lambda: int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)))
    gpu["xid"] = _xid(gpu["pci"])


def _memory(handle: Any) -> dict[str, Any]:
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        return {"version": 2, "total": memory.total, "reserved": memory.reserved, "used": memory.used}
    except (nvml.NVMLError_FunctionNotFound, nvml.NVMLError_ArgumentVersionMismatch):
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return {"version": 1, "total": memory.total, "reserved": None, "used": memory.used}


def _processes(call: Callable[[Any], Any], handle: Any) -> list[dict[str, Any]]:
    return [{"pid": int(p.pid), "bytes": p.usedGpuMemory} for p in call(handle)]


def _pci(handle: Any) -> str:
    bus = nvml.nvmlDeviceGetPciInfo(handle).busId
    return bus.decode() if isinstance(bus, bytes) else str(bus)


def _recovery_action(handle: Any) -> int:
    value = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])[0]
    if value.nvmlReturn != nvml.NVML_SUCCESS:
        raise nvml.NVMLError(value.nvmlReturn)
    return int(value.value.uiVal)


def _xid(pci: str | None) -> list[int] | None:
    """Xid numbers of this device in the kernel's log since boot, or None where the log may not be read."""
    if pci is None:
        return None
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return sorted(_xids_in(log, pci.lower()[-10:-2]))
    finally:
        os.close(log)


def _xids_in(log: int, bus: str) -> set[int]:
    found: set[int] = set()
    for _ in range(_KMSG_LIMIT):
        try:
            line = os.read(log, 8192).decode(errors="replace").lower()
        except BrokenPipeError:
            continue
        except OSError:
            break
        if "nvrm: xid" in line and bus in line and (number := line.partition("):")[2].split(",")[0].strip()).isdigit():
            found.add(int(number))
    return found


if __name__ == "__main__":
    sys.exit(main())
