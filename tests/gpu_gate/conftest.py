"""A host with GPUs that are not there: a compiled NVML, a scripted nvidia-smi, one file that says what they show."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from draftmill.gpu.policy import GatePolicy

HERE = Path(__file__).parent
GIB, MIB = 1 << 30, 1 << 20


def uuid_of(index: int) -> str:
    return f"GPU-{index:08x}-0000-4000-8000-00000000000{index:x}"


@dataclass(frozen=True)
class Gpu:
    uuid: str
    name: str = "Fake-H200"
    total: int = 143_771 * MIB
    reserved: int = 615 * MIB
    used: int = 0
    utilization: int = 0
    ecc: int = 0
    mode: int = 0
    mig: int = 0
    persistence: int = 1
    pending: int = 0
    failed: int = 0
    retire: int = 0
    recovery: int = 0

    def line(self) -> str:
        values = [getattr(self, name) for name in self.__dataclass_fields__]
        return "gpu " + " ".join(str(value) for value in values)


@dataclass
class Host:
    """What the fake shows; every change is written at once, whole or not at all."""

    path: Path
    gpus: list[Gpu] = field(default_factory=list)
    processes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def write(self) -> None:
        lines = [*(gpu.line() for gpu in self.gpus), *self.processes, *self.faults]
        draft = self.path.with_suffix(".part")
        draft.write_text("\n".join(lines) + "\n")
        draft.replace(self.path)

    def show(self, count: int) -> None:
        self.gpus = [Gpu(uuid_of(index)) for index in range(count)]
        self.processes, self.faults = [], []
        self.write()

    def set(self, index: int, **values: object) -> None:
        self.gpus[index] = replace(self.gpus[index], **values)
        self.write()

    def process(self, index: int, pid: int, size: int, kind: str = "c") -> None:
        self.processes.append(f"proc {index} {pid} {size} {kind}")
        self.write()

    def fault(self, line: str) -> None:
        self.faults.append(line)
        self.write()

    def heal(self) -> None:
        self.processes, self.faults = [], []
        self.write()

    @property
    def uuids(self) -> tuple[str, ...]:
        return tuple(gpu.uuid for gpu in self.gpus)


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with libnvidia-ml.so.1 and nvidia-smi."""
    folder = tmp_path_factory.mktemp("driver")
    library = folder / "libnvidia-ml.so.1"
    source = str(HERE / "fake_nvml.c")
    subprocess.run(["cc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", library, source], check=True)
    program = folder / "nvidia-smi"
    shutil.copy(HERE / "fake_nvidia_smi.sh", program)
    program.chmod(0o755)
    return folder


@pytest.fixture
def host(fake_driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Two idle GPUs; the environment of this process and its children shows them."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_driver))
    monkeypatch.setenv("PATH", f"{fake_driver}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_NVML_STATE", str(tmp_path / "host.txt"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    shown = Host(tmp_path / "host.txt")
    shown.show(2)
    return shown


@pytest.fixture
def policy(tmp_path: Path) -> GatePolicy:
    """The default limits on a clock that suits tests."""
    return GatePolicy(
        lock_dir=str(tmp_path / "leases"),
        poll_s=0.05,
        wait_s=0.0,
        probe_timeout_s=20,
        server_stop_s=10,
        pid_namespace="same",
        min_shm_free_gib=0,
    )


@pytest.fixture
def spawn() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start Python programs that are ended with the test, each in a process group of its own."""
    begun: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: str, **options: object) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **options,
        )
        begun.append(process)
        return process

    yield start
    for process in begun:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=10)
        if process.stdout:
            process.stdout.close()
