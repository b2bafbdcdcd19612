"""`draftmill bench generate`: what is drawn, what the whole set is, and whose server is measured."""

import json
from types import SimpleNamespace

import pytest

from draftmill import layout
from draftmill.config import parse
from draftmill.errors import UserError
from draftmill.prompts.record import identify
from draftmill.schemas import PROMPTS, write_rows
from draftmill.stages import bench_generate
from draftmill.store.local import LocalStore
from tests.sglang.servers import OwnServer
from tests.sglang.test_process import target
from tests.tiny import config_values, prompt_texts

__all__ = ["target"]


@pytest.fixture
def place(tmp_path, target):
    """A store with shards of prompts, a part of which brings its answer."""
    store = LocalStore(tmp_path / "store")
    shards = []
    for number, (rows, answered) in enumerate([(20, 20), (20, 0), (20, 10)]):
        name, texts = f"{number:012x}", prompt_texts(rows, seed=number)
        records = [{"messages": [{"role": "user", "content": text}]} for text in texts]
        records = [{**one, "answer": "Yes."} if at < answered else one for at, one in enumerate(records)]
        found = [identify(record) for record in records]
        table = [{"prompt_id": p.prompt_id, "source": "chat", "record": p.text} for p in found]
        write_rows(store.path(layout.prompts(name)), PROMPTS, table, {})
        shards.append(SimpleNamespace(name=name, rows=rows))
    values = config_values(
        target={"model": str(target)}, generate={"engine": "sglang", "samples": 3, "sglang": {"in_flight": 4}}
    )
    return SimpleNamespace(store=store, index=SimpleNamespace(shards=shards), config=parse(values), folder=tmp_path)


def test_rows_that_bring_their_answer_are_not_priced(place):
    sample = bench_generate.draw(place.config, place.index, place.store, 1000, place.folder)
    assert sample.rows == 3 * 30, "half of sixty prompts is asked, three times each"
    assert len(sample.requests) == 3 * 30
    assert len({request.key for request in sample.requests}) == 3 * 30


def test_the_server_that_was_named_is_the_one_that_is_looked_at(place, tmp_path):
    """Any model at --url was measured without a word."""
    other = OwnServer(tmp_path / "record", "--model", "other/one", "--context", "4096")
    how = {"prompts": 8, "loads": [2], "gpus": 1, "keep": False, "folder": tmp_path, "say": print}
    try:
        with pytest.raises(UserError, match=r"serves other/one, but target\.model is"):
            bench_generate.run(place.config, place.index, place.store, "identity", url=other.url, **how)
    finally:
        other.kill()
    with pytest.raises(UserError, match="cannot be reached"):
        bench_generate.run(place.config, place.index, place.store, "identity", url=other.url, **how)


@pytest.mark.slow
def test_a_server_at_a_url_is_measured(place, tmp_path, target):
    server = OwnServer(
        tmp_path / "record", "--model", str(target), "--vocabulary", "1000000", "--token-seconds", "0.001"
    )
    said = []
    try:
        found, outlook, rows = bench_generate.run(
            place.config, place.index, place.store, "identity", url=server.url, prompts=60, loads=[2, 4], gpus=2, keep=False,
            folder=tmp_path, say=said.append,
        )  # fmt: skip
    finally:
        server.kill()
    assert [one.in_flight for one in found] == [2, 4]
    assert rows == 90
    assert outlook.tokens.value == pytest.approx(90 * found[-1].tokens_a_row.value) or outlook.in_flight == 2
    assert json.loads(bench_generate.record(found, outlook, rows))["rows"] == 90


def test_more_rows_in_flight_than_files_may_be_open_are_refused(place, tmp_path, monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    with pytest.raises(UserError, match="5256 open files are needed and the limit is 4096"):
        bench_generate.run(
            place.config, place.index, place.store, "identity", url="http://127.0.0.1:9", prompts=60, loads=[5000], gpus=1,
            keep=False, folder=tmp_path, say=print,
        )  # fmt: skip
