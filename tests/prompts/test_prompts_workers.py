"""Several processes make what one makes, and end when they should."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill import config
from draftmill.errors import UserError
from draftmill.gpu import processes
from draftmill.prompts import examine as examine_module
from draftmill.prompts import workers as workers_module
from draftmill.prompts.examine import Source
from draftmill.prompts.files import find
from draftmill.prompts.record import Rules
from draftmill.prompts.scan import scan
from draftmill.prompts.workers import Workers, with_workers
from draftmill.store.local import LocalStore


class Inline:
    """Takes tasks one by one in this process: spans without processes."""

    def map(self, work, tasks):
        return map(work, tasks)


@pytest.fixture
def pool():
    workers = Workers(2)
    yield workers
    workers.close()


LINES = st.sampled_from(
    [b"", b"  ", b"\r", b"{", b"[]", b'{"prompt": "x\xff"}', b'{"prompt": ""}', b'{"a": 1}', b"\xef\xbb\xbf{}"]
) | st.builds(lambda n, more: b'{"prompt": "%d%s"}' % (n, b"y" * more), st.integers(0, 25), st.integers(0, 30))


def outcome(sources, settings_, limit, workers):
    """All that a scan says, or the sentence it raises."""

    def count(record):
        if "7" in record["messages"][0]["content"]:
            raise UserError("The template refuses sevens.")
        return 9 if "8" in record["messages"][0]["content"] else 1

    try:
        found = scan(sources, settings_, limit, count, None, workers)
    except UserError as error:
        return str(error)
    return found.ids, found.origin, found.positions, found.sizes, found.shards, found.counts


@settings(max_examples=100, deadline=None)
@given(
    files=st.lists(st.lists(LINES, max_size=25), min_size=1, max_size=3),
    ended=st.booleans(),
    span=st.integers(1, 200),
    most=st.none() | st.integers(1, 20),
    limit=st.sampled_from([8, 100_000]),
)
def test_spans_of_any_size_give_what_one_stream_gives(tmp_path_factory, files, ended, span, most, limit):
    folder = tmp_path_factory.mktemp("spans")
    for number, lines in enumerate(files):
        (folder / f"{number}.jsonl").write_bytes(b"\n".join(lines) + (b"\n" if ended or not lines else b""))
    prompts = config.PromptsConfig(sources=[{"path": "x"}], shard_rows=5, held_out=0.3, max_prompts=most)
    try:
        sources = [Source(file, Rules()) for file in find(str(folder))]
    except UserError:  # an empty file
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examine_module, "_SPAN_BYTES", span)
        assert outcome(sources, prompts, limit, Inline()) == outcome(sources, prompts, limit, None)


def test_a_pool_makes_the_same_index_and_the_same_bytes(build, data, tmp_path, monkeypatch):
    paths = [data.prompts("a.jsonl", 300), data.lines("b.jsonl", [{"prompt": f"b{n}"} for n in range(90)])]
    alone = build(*paths, store=LocalStore(tmp_path / "alone"))
    monkeypatch.setattr(workers_module, "WORTH_BYTES", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(examine_module, "_SPAN_BYTES", 1000)
    used = []
    real = Workers.map
    monkeypatch.setattr(Workers, "map", lambda self, work, tasks: used.append(work.__name__) or real(self, work, tasks))
    heard = []
    shared = build(*paths, store=LocalStore(tmp_path / "shared"), progress=lambda *step: heard.append(step))
    assert used == ["examine", "examine", "write_shard"]
    assert shared == alone
    size = sum(path.stat().st_size for path in paths)
    assert [step for step in heard if step[0] == "reading"][-1] == ("reading", size, size)
    written = [
        {file.relative_to(root): file.read_bytes() for file in root.rglob("*") if file.is_file()}
        for root in (tmp_path / "alone", tmp_path / "shared")
    ]
    assert written[0] == written[1]


def test_mixed_formats_keep_their_order(build, data, monkeypatch, tmp_path):
    """Files that cannot be cut are read by the process itself, in their turn."""
    (data.folder / "m.csv").write_text("prompt\n" + "".join(f"row {n}\n" for n in range(60)))
    data.prompts("a.jsonl", 60), data.prompts("z.jsonl", 60, 60)
    alone = build(data.folder, store=LocalStore(tmp_path / "alone"))
    monkeypatch.setattr(workers_module, "WORTH_BYTES", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert build(data.folder, store=LocalStore(tmp_path / "shared")) == alone
    assert LocalStore(tmp_path / "shared").list().keys() == LocalStore(tmp_path / "alone").list().keys()


def _modules(_):
    return sorted(set(sys.modules) & {"torch", "transformers", "snakemake"})


def test_workers_load_nothing_heavy(pool):
    assert list(pool.map(_modules, range(2))) == [[], []]


def _square(number):
    return number * number


def test_results_come_in_order_and_tasks_are_drawn_late(pool):
    drawn = []

    def tasks():
        for number in range(30):
            drawn.append(number)
            yield number

    results = pool.map(_square, tasks())
    assert next(results) == 0
    assert len(drawn) == 4
    assert list(results) == [number * number for number in range(1, 30)]


def _refuse(number):
    raise UserError(f"Number {number} is refused.")


def test_a_mistake_found_by_a_worker_is_the_same_sentence(pool):
    with pytest.raises(UserError, match=r"^Number 3 is refused\.$"):
        list(pool.map(_refuse, [3]))


def _die(_):
    os.kill(os.getpid(), signal.SIGKILL)


def test_work_is_done_alone_where_workers_die(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    tried = []

    def work(workers):
        tried.append(workers)
        return "alone" if workers is None else list(workers.map(_die, [1, 2]))

    assert with_workers(workers_module.WORTH_BYTES, work) == "alone"
    assert [workers is None for workers in tried] == [False, True]


def _linger(folder):
    (folder / "begun").touch()
    time.sleep(20)
    (folder / "ended").touch()


def test_work_that_is_given_up_waits_for_no_worker(monkeypatch, tmp_path):
    """As Ctrl-C gives it up while a worker waits for a source on an S3 that is away."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})

    def work(workers):
        workers._pool.submit(_linger, tmp_path)
        deadline = time.monotonic() + 60
        while not (tmp_path / "begun").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        with_workers(workers_module.WORTH_BYTES, work)
    assert not (tmp_path / "ended").exists()


def test_little_work_starts_no_process(monkeypatch):
    monkeypatch.setattr(workers_module, "Workers", None)
    assert with_workers(workers_module.WORTH_BYTES - 1, lambda workers: workers) is None
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert with_workers(workers_module.WORTH_BYTES, lambda workers: workers) is None


_ORPHANS = """
import os, time
from draftmill.prompts.workers import Workers
from tests.prompts.test_prompts_workers import _pid
print(sorted(set(Workers(2).map(_pid, range(20)))), flush=True)
time.sleep(600)
"""


def _pid(_):
    time.sleep(0.05)  # so that one worker cannot do all
    return os.getpid()


def test_workers_end_with_a_killed_build():
    root = Path(__file__).parents[2]
    parent = subprocess.Popen([sys.executable, "-c", _ORPHANS], stdout=subprocess.PIPE, text=True, cwd=root)
    pids = [int(pid) for pid in parent.stdout.readline().strip("[]\n").split(",")]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while any(processes.identify(pid) is not None for pid in pids):
        assert time.monotonic() < deadline, "a worker outlives its build"
        time.sleep(0.05)
