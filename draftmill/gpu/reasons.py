"""The vocabulary of refusals: every reason that the gate can give, what it weighs, and what a person can do about it.

A reason is `busy` when the GPU is proven not to be usable now, and `unknown` when freedom could not be proven. A
`passing` reason may go away by itself, so waiting for it makes sense. docs/gpu-gate.md prints this table and a test
holds the two together.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Kind:
    """How one reason code counts; `number` says what the reason's value measures."""

    weighs: Literal["busy", "unknown"]
    passing: bool
    number: str
    meaning: str
    remedy: str


_RESET = "reset the GPU or reboot the host, and report the card if it returns"
_LOST = "see `dmesg` for Xid 79; reset the GPU or reboot the host"
_DRIVER = "see that the driver is loaded and matches its library (`nvidia-smi` names the fault); a reboot settles most"

KINDS: dict[str, Kind] = {
    "memory_held": Kind("busy", True, "MiB used", "memory is used and a process is listed", "end that process or wait"),
    "memory_held_no_visible_process": Kind(
        "busy",
        True,
        "MiB used",
        "memory is used and no process is listed: another container, a dying process, or a wedged driver",
        "look from the host (`fuser -v /dev/nvidia*`), or reset the GPU if nobody holds it",
    ),
    "compute_process": Kind("busy", True, "pid", "a compute process is on the GPU", "end that process or wait"),
    "graphics_process": Kind("busy", True, "pid", "a display process is there", "move the display, or allow_graphics"),
    "mps_process": Kind("busy", True, "pid", "a process uses the GPU through MPS", "stop MPS, or allow_mps"),
    "memory_not_settled": Kind("busy", True, "MiB between samples", "memory still moves", "wait"),
    "foreign_memory_after_launch": Kind(
        "busy", True, "MiB not ours", "memory rose after our start and is not ours", "find who else starts jobs there"
    ),
    "foreign_process_after_launch": Kind(
        "busy", True, "pid", "a process that is not ours came while ours started", "find who else starts jobs there"
    ),
    "leased": Kind("busy", True, "holder's pid", "a living run of draftmill holds the GPU", "wait for that run"),
    "lease_orphaned": Kind(
        "busy", True, "dead holder's pid", "a dead run's child still holds its lease", "run `draftmill reclaim`"
    ),
    "server_will_not_leave": Kind(
        "busy", True, "server's pid", "a server of ours did not end when asked", "run `draftmill reclaim`"
    ),
    "paused": Kind("busy", True, "1", "`draftmill gpus pause` took the GPU out", "`draftmill gpus resume UUID`"),
    "ecc_errors": Kind("busy", False, "errors", "uncorrected ECC errors since the driver loaded", _RESET),
    "remap_pending": Kind("busy", False, "1", "memory rows wait to be remapped", _RESET),
    "remap_failed": Kind("busy", False, "1", "remapping memory rows failed", "replace the card"),
    "retire_pending": Kind("busy", False, "1", "memory pages wait to be retired", _RESET),
    "recovery_action": Kind("busy", False, "NVML action", "the driver asks for a recovery action", _RESET),
    "compute_mode": Kind(
        "busy",
        False,
        "NVML mode",
        "the compute mode is exclusive or prohibited",
        "`nvidia-smi -c 0`, or allow_exclusive",
    ),
    "mig_enabled": Kind("busy", False, "1", "the GPU is partitioned by MIG", "switch MIG off, or allow_mig"),
    "shm_low": Kind("busy", False, "MiB free", "/dev/shm is nearly full", "`draftmill reclaim`, or a larger /dev/shm"),
    "port_taken": Kind("busy", True, "port", "a port that the run needs is taken", "end its owner or change the port"),
    "too_few_gpus": Kind(
        "unknown",
        False,
        "GPUs visible",
        "fewer GPUs are visible than asked for",
        "see CUDA_VISIBLE_DEVICES and the driver",
    ),
    "gpu_missing": Kind("unknown", False, "GPUs reported", "a requested GPU is not reported", _LOST),
    "visible_devices_unclear": Kind(
        "unknown",
        False,
        "entry number",
        "an entry of CUDA_VISIBLE_DEVICES names no GPU for certain",
        "name the GPUs by their full UUIDs",
    ),
    "nvml_error": Kind("unknown", False, "NVML code", "NVML could not be read at all", _DRIVER),
    "fact_unreadable": Kind("unknown", False, "NVML code", "a needed fact of this GPU is not readable", _DRIVER),
    "fact_missing": Kind("unknown", False, "missing facts", "a needed fact is absent without a reason", _DRIVER),
    "probe_hung": Kind("unknown", True, "seconds", "the driver did not answer in time", "see `dmesg`; perhaps reboot"),
    "probe_garbled": Kind("unknown", True, "bytes", "the reading arrived broken", "try again"),
    "probe_failed": Kind("unknown", False, "exit code", "the probe could not run", "install nvidia-ml-py"),
    "second_sensor_missing": Kind(
        "unknown", False, "0", "nvidia-smi is required and absent", "install it, or second_sensor: prefer"
    ),
    "second_sensor_failed": Kind("unknown", True, "exit code", "nvidia-smi failed", _DRIVER),
    "second_sensor_hung": Kind("unknown", True, "seconds", "nvidia-smi did not answer in time", _DRIVER),
    "second_sensor_garbled": Kind("unknown", True, "bytes", "nvidia-smi's output is cut off or mixed up", "try again"),
    "sensors_disagree": Kind(
        "unknown", True, "MiB apart", "NVML and nvidia-smi report different facts", "try again; sensor_tolerance_mib"
    ),
}
