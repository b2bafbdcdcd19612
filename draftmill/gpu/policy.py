"""Every knob of the GPU gate, with its default and the reason for it.

One frozen model, printed whole into each verdict record, so that a verdict can be judged later by the limits it was
given under. It is the `gate:` section of the workflow's config.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

SecondSensor = Literal["require", "prefer", "off"]


class GatePolicy(BaseModel):
    """What counts as free, how long to wait for it, and where the leases lie. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sentinel: Literal["rule", "in_job"] = Field(
        default="rule",
        description="Where the first proof is made: a sentinel rule before each GPU job, or only inside the job "
        "(in_job: for Slurm and Kubernetes, where the sentinel would probe another host).",
    )
    max_used_mib: int = Field(
        default=256,
        ge=0,
        description="Most memory (NVML v2 `used`, MiB) that a free GPU may hold. A bare CUDA context takes about "
        "500 MiB, so a lower limit also catches a holder whose process is not visible.",
    )
    idle_mib: int = Field(
        default=64,
        ge=0,
        description="At or under this level (MiB) one clean sample proves a GPU idle; above it the memory must settle.",
    )
    settle_samples: int = Field(
        default=3, ge=1, description="Clean samples in a row that are needed once a sample was not at the idle level."
    )
    poll_s: float = Field(
        default=1.0, gt=0, description="Seconds between two samples and between two tries to get a lease."
    )
    wait_s: float = Field(
        default=120.0,
        ge=0,
        description="Seconds to wait for a GPU that is held by somebody else or whose memory lingers. Waiting for "
        "living leases of this lock_dir, or for a paused GPU, is not limited.",
    )
    probe_timeout_s: float = Field(
        default=10.0,
        gt=0,
        description="Deadline in seconds of one reading of a sensor; a hung driver is then `unknown`.",
    )
    verdict_ttl_s: float = Field(default=60.0, gt=0, description="Seconds for which a verdict may be relied on.")
    expected_uuids: tuple[str, ...] = Field(
        default=(),
        description="If given, only these GPUs (full UUIDs) are used, and `draftmill gate` wants all of them.",
    )
    allow_graphics: bool = Field(
        default=False, description="Tolerate display processes (Xorg and the like) up to allow_graphics_mib."
    )
    allow_graphics_mib: int = Field(
        default=512,
        ge=0,
        description="MiB that tolerated display processes may add to max_used_mib, if allow_graphics.",
    )
    allow_mps: bool = Field(default=False, description="Tolerate processes that use the GPU through MPS.")
    allow_mig: bool = Field(default=False, description="Tolerate a GPU that is partitioned by MIG.")
    allow_exclusive: bool = Field(
        default=False, description="Tolerate an exclusive compute mode; engines of several processes fail in it."
    )
    max_ecc_uncorrected: int = Field(
        default=0,
        ge=0,
        description="Most uncorrected ECC errors since the last driver load that a healthy GPU may have.",
    )
    second_sensor: SecondSensor = Field(
        default="prefer",
        description="nvidia-smi as the second witness: require (its absence is unknown), prefer (used if installed; "
        "if installed it must answer whole and agree), off.",
    )
    sensor_tolerance_mib: int = Field(default=256, ge=0, description="MiB by which the two sensors may differ.")
    pid_namespace: Literal["auto", "same", "foreign"] = Field(
        default="auto",
        description="Whether pids that come from outside (NVML, names in /dev/shm) are pids of this process's "
        "namespace. auto: on the host itself they are; in a container NVML's pid is believed only if that process has "
        "an NVIDIA device open, and a file's creator never.",
    )
    attest_slack_mib: int = Field(
        default=1024,
        ge=0,
        description="MiB that may rise after a launch beyond what our own processes are seen to hold.",
    )
    stale_shm: Literal["report", "clean"] = Field(
        default="report",
        description="Leftovers of dead engines in /dev/shm: name them in the verdict, or also remove those whose "
        "creator is provably dead and ours.",
    )
    min_shm_free_gib: float = Field(
        default=0.03,
        ge=0,
        description="Least free space in /dev/shm (GiB), without which an engine dies of SIGBUS; 0: not checked. The "
        "default passes a container's usual 64 MiB and refuses a full one.",
    )
    ports: tuple[int, ...] = Field(
        default=(), description="TCP ports of 127.0.0.1 that must be free, such as a server's."
    )
    server_stop_s: float = Field(
        default=60.0,
        ge=0,
        description="Seconds that a server of ours gets between SIGTERM and SIGKILL when asked to leave.",
    )
    lock_dir: str | None = Field(
        default=None,
        description="Folder of the leases, on a local disk, the same for everybody on the host. Default: "
        "/run/lock/draftmill where /run/lock is open to all users, else /var/tmp/draftmill.",
    )
