"""The keeper on a disk that is full: its server is neither ended for that nor left behind."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from draftmill.engines import server_record
from draftmill.engines.server_record import Plan
from draftmill.gpu import lease
from draftmill.gpu.policy import GatePolicy
from tests.gpu_gate.conftest import Host, fake_driver, host, policy, uuid_of
from tests.sglang.fake_gpus import Driver, living
from tests.tiny import ROOT
from tests.waiting import until

__all__ = ["fake_driver", "host", "policy"]
TOKEN = "f" * 12
# Weighs at every look, and says when.
KEEPER = """
import time
from draftmill.engines import keeper
weigh, keeper._WEIGH_S = keeper._resident, 0.0
def resident(pid):
    print(time.monotonic(), flush=True)
    return weigh(pid)
keeper._resident = resident
keeper.main()
"""


class Kept:
    """A keeper of a stand-in, and the disk that its record and its log are on."""

    def __init__(self, folder: Path, policy: GatePolicy) -> None:
        self.program, self.log = folder / "stand_in.py", folder / "server.log"
        self.program.write_text(Path(__file__).with_name("stand_in.py").read_text())
        locks = lease.lock_dir(policy.lock_dir)
        self.place = server_record.folder(locks)
        # A job that uses the server, as long as the test does.
        self._slot = lease.try_lock(lease.slot_path(locks, uuid_of(0)))
        assert self._slot is not None
        plan = Plan(
            token=TOKEN, spec="spec", uuids=(uuid_of(0),), folder=str(self.place), lock_dir=str(locks),
            command=(sys.executable, str(self.program), "{port}", "model"),
            environment={"CUDA_VISIBLE_DEVICES": uuid_of(0)}, log=str(self.log), first_port=42000, idle_s=60.0,
            stop_s=5.0, max_used_mib=policy.max_used_mib, probe_timeout_s=20.0,
        )  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-c", KEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip
        assert self.process.stdin is not None
        with self.process.stdin as pipe:
            pipe.write(json.dumps(asdict(plan)))

    def fill_the_disk(self) -> None:
        """From now on neither the record nor the log can be written."""
        draft = self.place / f"{TOKEN}.server.json.{self.process.pid}.part"
        until(lambda: _linked(draft), "a moment between two writes")
        self.log.rename(self.log.with_suffix(".before"))
        self.log.symlink_to("/dev/full")

    def weighed(self, times: int) -> None:
        """Wait until the server was weighed so many times more."""
        assert self.process.stdout is not None
        now, seen = time.monotonic(), 0
        while seen < times:
            line = self.process.stdout.readline()
            assert line, "the keeper is gone"
            seen += float(line) > now


def _linked(draft: Path) -> bool:
    try:
        draft.symlink_to("/dev/full")
    except FileExistsError:
        return False
    return True


@pytest.fixture
def kept(host: Host, policy: GatePolicy, tmp_path: Path) -> Iterator[Kept]:
    found = Kept(tmp_path, policy)
    with Driver(host, str(found.program)):
        yield found
        found.process.kill()
        found.process.wait()
        until(lambda: not living(str(found.program)), "the end of the server")


def test_a_server_lives_on_when_its_weight_cannot_be_noted(kept: Kept) -> None:
    until(lambda: _record(kept) is not None, "the server")
    kept.fill_the_disk()
    kept.weighed(3)
    assert kept.process.poll() is None
    assert living(str(kept.program))


def test_a_server_is_ended_and_forgotten_although_the_disk_is_full(kept: Kept) -> None:
    until(lambda: _record(kept) is not None, "the server")
    kept.fill_the_disk()
    kept.process.terminate()
    assert kept.process.wait(60) == 0
    assert not living(str(kept.program))
    assert not server_record.path(kept.place, TOKEN).exists()


def _record(kept: Kept) -> Any:
    return server_record.read(kept.place, TOKEN)
