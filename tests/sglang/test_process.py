"""Jobs, the lane and a server as processes of their own: shards are done, whoever is killed and how often."""

import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftmill import layout
from draftmill.config import parse
from draftmill.errors import UserError
from draftmill.gpu import processes
from draftmill.job import BUILDER_VARIABLE, RUN_VARIABLE
from draftmill.prompts.record import identify
from draftmill.schemas import COMPLETIONS, PROMPTS, REJECTED, read_rows, write_rows
from draftmill.stages.generate import Outputs
from draftmill.stages.lane_helper import Helper
from draftmill.store.local import LocalStore
from tests.sglang.servers import Phoenix, generated
from tests.sglang.shard_job import GENERATE
from tests.tiny import ROOT, config_values, make_target, prompt_texts

# Thirty were run; every run of the suite does a few.
KILLS = int(os.environ.get("DRAFTMILL_KILLS", "6"))
DEADLINE_S = 500.0
FLUSH_ROWS, IN_FLIGHT = 4, 8


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    make_target(folder, layers=1)
    return folder


class Works:
    """A folder with shards, and jobs that answer them through a lane."""

    def __init__(self, folder, target, server, rows, shards=3, **sglang):
        self.folder, self.server = folder, server
        self.store = LocalStore(folder / "store")
        limits = {"urls": [server.url], "in_flight": IN_FLIGHT, "backoff_seconds": 0.05, "idle_seconds": 3.0, **sglang}
        generate = {"engine": "sglang", "flush_rows": FLUSH_ROWS, "flush_seconds": 0.5, "sglang": limits}
        values = config_values(store="store", target={"model": str(target)}, generate=generate)
        (folder / "config.json").write_text(json.dumps(values))
        self.ids = {}
        for number in range(shards):
            shard = f"{number:012x}"
            found = [identify({"messages": [{"role": "user", "content": t}]}) for t in prompt_texts(rows, seed=number)]
            # Of many made-up texts some come up in two shards, and would count as generated twice.
            found = [prompt for prompt in found if not any(prompt.prompt_id in ids for ids in self.ids.values())]
            self.ids[shard] = {prompt.prompt_id for prompt in found}
            table = [{"prompt_id": p.prompt_id, "source": "chat", "record": p.text} for p in found]
            write_rows(self.store.path(layout.prompts(shard)), PROMPTS, table, {})
        me = processes.myself()
        self.environment = {
            **os.environ,
            RUN_VARIABLE: secrets.token_hex(6),
            BUILDER_VARIABLE: f"{processes.boot_id()} {processes.pid_namespace()} {me.pid} {me.start}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }

    def job(self, shard, **how):
        ahead = [other for other in self.ids if other > shard]
        with (self.folder / "job.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.sglang.shard_job", "config.json", shard, *ahead],
                cwd=self.folder, env=self.environment, stdout=log, stderr=log, **how,
            )  # fmt: skip

    def finished(self, shard):
        return self.store.info(layout.completions(shard, GENERATE)) is not None

    def said(self):
        return "".join(
            (self.folder / name).read_text()[-3000:]
            for name in ("job.log", "lane.log")
            if (self.folder / name).exists()
        )

    def whole(self, *, swept=True):
        """Every prompt of every shard stands in exactly one row of its completions, and no journal is left.

        A job that is killed behind its publication leaves its journal, which a build sweeps: `swept` False allows that.
        """
        for shard, ids in self.ids.items():
            rows = read_rows(self.store.path(layout.completions(shard, GENERATE)), COMPLETIONS)
            assert sorted(row["prompt_id"] for row in rows) == sorted(ids)
            assert read_rows(self.store.path(layout.rejected(shard, GENERATE)), REJECTED) == []
        assert not (swept and self.store.list("journal/"))

    def lanes(self):
        """Pids of this folder's lanes."""
        found = []
        for process in processes.all_processes():
            try:
                words = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
                if b"draftmill.stages.lane_process" in words and os.readlink(f"/proc/{process.pid}/cwd") == str(
                    self.folder
                ):
                    found.append(process.pid)
            except OSError:
                continue
        return found

    def build(self, kill=None, kills=0, rng=None):
        """Run a job for each shard in turn, killing something again and again; how often it was killed."""
        done, end = 0, time.monotonic() + DEADLINE_S
        for shard in self.ids:
            while not self.finished(shard):
                assert time.monotonic() < end, self.said()
                job, due = self.job(shard), time.monotonic() + (rng.uniform(0.05, 2.0) if rng else 1e9)
                while job.poll() is None:
                    assert time.monotonic() < end, self.said()
                    time.sleep(0.01)
                    if done < kills and time.monotonic() > due:
                        done += kill(job)
                        due = time.monotonic() + rng.uniform(0.05, 2.0)
                # A job that loses one lane after another fails in the end, and Snakemake starts it again.
                tired = job.returncode == 1 and "ended 5 times" in self.said()
                assert tired or job.returncode in (0, -signal.SIGKILL), self.said()
        return done


@pytest.fixture
def works(tmp_path, target):
    made = []

    def make(rows, token_seconds, **sglang):
        server = Phoenix(tmp_path / "record", "--token-seconds", str(token_seconds))
        made.append(server)
        return Works(tmp_path, target, server, rows, **sglang)

    yield make
    for server in made:
        server.end()


@pytest.mark.slow
def test_shards_are_done_one_after_another_through_one_lane_that_ends_when_idle(works, tmp_path):
    here = works(12, 0.001, idle_seconds=10.0)
    here.build()
    here.whole()
    assert set(generated(tmp_path / "record").values()) == {1}
    (lane,) = here.lanes()
    assert processes.wait_until(lambda: not here.lanes(), 60.0)
    assert processes.identify(lane) is None
    beat = json.loads(here.store.get(layout.progress("generate", f"{'0' * 12}-{GENERATE}")))
    assert (beat["state"], beat["done"], beat["useful"], beat["rejected"], beat["retries"]) == ("done", 12, 12, 0, 0)
    assert beat["server"] == {"uuid": here.server.url, "url": here.server.url, "state": "serving", "epoch": 0}
    assert beat["tokens"] > 0
    assert beat["tokens_1m"] > 0


@pytest.mark.slow
def test_sigterm_of_the_lane_flushes_first(works, tmp_path):
    here = works(24, 0.004, idle_seconds=60.0)
    job = here.job("0" * 12)
    record = tmp_path / "record"
    assert processes.wait_until(lambda: sum(generated(record).values()) >= 6, 240.0), here.said()
    (lane,) = here.lanes()
    os.kill(lane, signal.SIGTERM)
    assert processes.wait_until(lambda: processes.identify(lane) is None, 30.0)
    assert job.wait(240) == 0, here.said()
    here.build()
    here.whole()
    # What was finished is kept; what was in flight is asked again, and of it only replies under way were generated twice.
    assert sum(generated(record).values()) <= 3 * 24 + IN_FLIGHT
    for lane in here.lanes():
        os.kill(lane, signal.SIGTERM)


def kill_job(here):
    def kill(job):
        job.kill()
        job.wait()
        return 1

    return kill


def kill_server(here):
    def kill(job):
        here.server.kill()
        return 1

    return kill


def kill_lane(here):
    seen = 0

    def kill(job):
        nonlocal seen
        lanes, rows = here.lanes(), sum(generated(here.folder / "record").values())
        # One that has not begun yet has nothing to lose, and starting takes longer than the time between two kills.
        if not lanes or rows <= seen:
            return 0
        for lane in lanes:
            os.kill(lane, signal.SIGKILL)
        seen = sum(generated(here.folder / "record").values())
        return 1

    return kill


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("victim", "rows_a_kill"),
    [
        # The lane goes on without the job, so nothing at all is lost.
        (kill_job, 0),
        # What the server had answered and the reply that was not read yet.
        (kill_server, 1),
        # One flush interval, and what the server had answered while nobody listened.
        (kill_lane, FLUSH_ROWS + IN_FLIGHT),
    ],
)
def test_kills_leave_every_prompt_exactly_once(works, tmp_path, victim, rows_a_kill):
    # Enough that the shards are not done before all kills: a lane answers for up to two seconds between two.
    here = works(10 + 20 * KILLS, 0.006, idle_seconds=60.0)
    done = here.build(victim(here), KILLS, random.Random(f"{victim.__name__} {KILLS}"))
    here.whole(swept=victim is not kill_job)
    counts = generated(tmp_path / "record")
    assert len(counts) == sum(len(ids) for ids in here.ids.values())
    twice = sum(counts.values()) - len(counts)
    print(f"{victim.__name__}: {done} kills, {len(counts)} rows, {twice} generated twice")
    assert done == KILLS, "the shards were done before all kills: give them more rows"
    assert twice <= done * rows_a_kill
    for lane in here.lanes():
        os.kill(lane, signal.SIGTERM)


def test_neither_a_job_nor_the_lane_loads_the_libraries_of_models():
    """Seconds a shard in which nothing is published; the lane's helpers have them."""
    words = "import draftmill.stages.lane_process, draftmill.stages.serving, sys; "
    words += "print({'torch', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "set()"


@pytest.mark.slow
def test_a_helper_that_was_killed_is_started_again(works, tmp_path, monkeypatch):
    here = works(4, 0.001)
    monkeypatch.chdir(tmp_path)
    helper = Helper(parse(json.loads((tmp_path / "config.json").read_text())), GENERATE)
    try:
        assert helper.asking().stop_ids
        helper._process.kill()
        asked = helper.read("0" * 12, False)
        assert {item.key[0] for item in asked} == here.ids["0" * 12]
        assert helper.read("f" * 12, False) is None
        helper._process.kill()
        with pytest.raises(UserError, match="prompts of shard f"):
            helper.write("f" * 12, Outputs(tmp_path / "c", tmp_path / "r"), {})
        with pytest.raises(UserError, match="could not be read or written"):
            helper.write("0" * 12, Outputs(tmp_path / "c", tmp_path / "r"), {})  # no row is answered
        process = helper._process
    finally:
        helper.close()
    assert process.poll() is not None
    assert not (tmp_path / "c").exists()
    with pytest.raises(UserError, match="the lane ends"):
        helper.read("0" * 12, False)


@pytest.mark.slow
def test_a_lane_that_cannot_start_is_said_in_a_sentence(works, tmp_path):
    here = works(4, 0.001)
    (tmp_path / "config.json").write_text(
        re.sub(r'"model": "[^"]+"', '"model": "nowhere"', (tmp_path / "config.json").read_text())
    )
    job = here.job("0" * 12)
    assert job.wait(240) == 1
    assert "target.model" in here.said()
