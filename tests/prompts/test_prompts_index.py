"""The index: what is counted, what is rebuilt when, and that the same prompts are the same bytes."""

import json
import os
import subprocess
import sys
from itertools import accumulate

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftmill import digests as digests_module
from draftmill import layout
from draftmill.errors import UserError
from draftmill.prompts import index as index_module
from draftmill.prompts import read as read_module
from draftmill.prompts import scan as scan_module
from draftmill.prompts.index import Index, ShardEntry, load
from draftmill.prompts.record import Rules, parse
from draftmill.prompts.shard import is_held_out
from draftmill.schemas import PROMPTS, read_provenance, read_rows
from draftmill.store.local import LocalStore


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "store")


@pytest.fixture
def scans(monkeypatch):
    """How often the sources were read."""
    calls = []
    real = scan_module.scan
    monkeypatch.setattr(index_module, "scan", lambda *given: calls.append(1) or real(*given))
    return calls


def rows_of(store, shards):
    return [row for shard in shards for row in read_rows(store.path(layout.prompts(shard.name)), PROMPTS)]


def names(index):
    return [shard.name for shard in index.shards]


def test_rows_are_conserved_and_in_order(build, data, store):
    records = [*[{"prompt": f"q{n}"} for n in range(200)], {"prompt": "q7"}, {"prompt": "q7"}, {}]
    index = build(data.lines("a.jsonl", records), max_bad=0.1)
    assert load(store) == index
    counts = index.counts
    assert (counts.read, counts.duplicates, counts.bad["no_prompt"].count) == (203, 2, 1)
    assert counts.train + counts.held_out == 200
    assert counts.train == sum(shard.rows for shard in index.train)
    assert counts.held_out == sum(shard.rows for shard in index.held_out)
    assert index.train + index.held_out == index.shards
    train, held_out = rows_of(store, index.train), rows_of(store, index.held_out)
    order = [int(json.loads(row["record"])["messages"][0]["content"][1:]) for row in train]
    assert order == sorted(order)
    assert len({row["prompt_id"] for row in train + held_out}) == 200
    assert sum(shard.bytes for shard in index.shards) == sum(len(row["record"].encode()) for row in train + held_out)
    assert {row["source"] for row in train} == {"a"}


def test_the_split_does_not_depend_on_other_prompts(build, data, store):
    alone = rows_of(store, build(data.prompts("a.jsonl", 60)).held_out)
    more = rows_of(store, build(data.prompts("b.jsonl", 500, start=1000), data.folder / "a.jsonl").held_out)
    assert {row["prompt_id"] for row in alone} <= {row["prompt_id"] for row in more}


def test_max_prompts_counts_what_lies_beyond(build, data):
    counts = build(data.prompts("a.jsonl", 100), data.prompts("b.jsonl", 10, start=95), max_prompts=98).counts
    assert (counts.read, counts.train + counts.held_out, counts.beyond_max_prompts) == (110, 98, 12)


def test_unchanged_sources_are_not_read_and_a_touch_changes_nothing(build, data, tmp_path, scans):
    path = data.prompts("a.jsonl", 60)
    os.utime(path, (1e9, 1e9))
    first = build(path)
    objects = {file: file.read_bytes() for file in (tmp_path / "store").rglob("*") if file.is_file()}
    os.utime(path)
    assert build(path) == build(path, write=False) == first
    assert len(scans) == 1
    assert objects == {file: file.read_bytes() for file in (tmp_path / "store").rglob("*") if file.is_file()}


def test_a_digest_is_taken_once_and_never_remembered_too_early(build, data, tmp_path, monkeypatch):
    taken = []
    real = digests_module.digest_file
    monkeypatch.setattr(digests_module, "digest_file", lambda path: taken.append(path) or real(path))
    path = data.prompts("a.jsonl", 60)
    build(path)
    build(path)
    assert len(taken) == 2
    monkeypatch.setattr(index_module, "SETTLED_S", 0.0)
    build(path)
    build(path)
    assert len(taken) == 3
    (tmp_path / ".draftmill" / index_module.DIGESTS).write_text("broken")
    build(path)
    assert len(taken) == 4


def test_looking_writes_nothing(build, data, tmp_path):
    path = data.prompts("a.jsonl", 60)
    before = sorted(tmp_path.rglob("*"))
    looked = build(path, write=False)
    assert sorted(tmp_path.rglob("*")) == before
    assert build(path) == looked


def test_a_lost_shard_is_written_again_the_same(build, data, store):
    path = data.prompts("a.jsonl", 80)
    index = build(path)
    lost = store.path(layout.prompts(index.train[1].name))
    content = lost.read_bytes()
    lost.unlink()
    build(path, write=False)
    assert not lost.exists()
    assert build(path) == index
    assert lost.read_bytes() == content


def test_the_same_prompts_elsewhere_are_the_same_bytes(build, data, tmp_path):
    path = data.prompts("a.jsonl", 80)
    build(path, store=LocalStore(tmp_path / "one"))
    build(path, store=LocalStore(tmp_path / "two"))
    contents = [
        {file.relative_to(root): file.read_bytes() for file in root.rglob("*") if file.is_file()}
        for root in (tmp_path / "one", tmp_path / "two")
    ]
    assert contents[0] == contents[1]
    assert len(contents[0]) > 5


def test_a_shard_carries_its_provenance_and_nothing_of_other_settings(build, data, store):
    index = build(data.prompts("a.jsonl", 80))
    shard = index.train[0]
    provenance = read_provenance(store.path(layout.prompts(shard.name)))
    assert {"stage": "prompts", "shard": shard.name}.items() <= provenance.items()
    assert "sources" not in provenance


@pytest.mark.parametrize("edit", ["edit", "insert", "delete", "append"])
def test_one_prompt_edited_writes_few_shards(build, data, store, edit):
    path = data.prompts("a.jsonl", 400)
    before = build(path)
    lines = path.read_text().splitlines(keepends=True)
    fresh = '{"prompt": "something new"}\n'
    place = len(lines) if edit == "append" else 200
    lines[place : place + (edit in ("edit", "delete"))] = [] if edit == "delete" else [fresh]
    path.write_text("".join(lines))
    after = build(path)
    # An edit takes a prompt from one split and may give one to the other.
    for split in ("train", "held_out"):
        old, new = ([s.name for s in getattr(index, split)] for index in (before, after))
        assert len(set(old) - set(new)) <= 3
        assert len(set(new) - set(old)) <= 3
    assert names(before) != names(after)
    assert all(store.path(layout.prompts(name)).exists() for name in names(after))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    count=st.integers(20, 90),
    first=st.integers(0, 10**6),
    kind=st.sampled_from(["edit", "insert", "delete", "append"]),
    place=st.floats(0, 0.999),
    width=st.integers(1, 3),
    rows=st.sampled_from([4, 9, 15]),
)
def test_edits_of_prompts_change_their_shards_and_at_most_a_neighbour_on_each_side(
    build, data, count, first, kind, place, width, rows
):
    """In each split: what is gone lies in shards that held an edited prompt, or next to one that did or would."""
    texts = [f"question {number}" for number in range(first, first + count)]
    start = count if kind == "append" else int(place * count)
    cut = [] if kind in ("insert", "append") else texts[start : start + width]
    put = [] if kind == "delete" else [f"new {first} {number}" for number in range(width)]
    edited = [*texts[:start], *put, *texts[start + len(cut) :]]

    def shards(lines):
        path = data.lines("a.jsonl", [{"prompt": text} for text in lines])
        try:
            return build(path, write=False, shard_rows=rows, held_out=0.3).shards
        except UserError:  # too few prompts for two splits
            return None

    before, after = shards(texts), shards(edited)
    if before is None or after is None:
        return
    for split in ("train", "held_out"):
        assert_local(of(before, split), of(after, split), texts, start, len(cut), split)
        assert_local(of(after, split), of(before, split), edited, start, len(put), split)


def of(shards, split):
    return [shard for shard in shards if shard.split == split]


def assert_local(shards, others, texts, start, width, split):
    """Shards that are gone are neighbours of those around the edited places, counted in their own split."""
    here = [is_held_out(parse({"prompt": text}, Rules()).id, 0.3) == (split == "held_out") for text in texts]
    first, last = sum(here[:start]), sum(here[: start + width])
    ends = list(accumulate(shard.rows for shard in shards))
    touched = {n for n, end in enumerate(ends) if end - shards[n].rows <= last and first <= end}
    known = {shard.name for shard in others}
    gone = {number for number, shard in enumerate(shards) if shard.name not in known}
    assert gone <= {number + step for number in touched for step in (-1, 0, 1)}


def test_an_edit_back_is_the_first_index_again(build, data):
    path = data.prompts("a.jsonl", 100)
    content = path.read_bytes()
    before = build(path)
    path.write_bytes(content.replace(b"question 50", b"question fifty"))
    assert build(path) != before
    path.write_bytes(content)
    assert build(path) == before


@pytest.mark.parametrize(
    ("change", "rebuilt"),
    [
        ({"system": "Be brief."}, True),
        ({"shard_rows": 20}, True),
        ({"held_out": 0.2}, True),
        ({"max_prompts": 50}, True),
        ({"limit": 99_999}, True),
        ({"tokenizer": "another"}, True),
        ({"max_bad": 0.5}, False),
    ],
)
def test_what_makes_a_new_index(build, data, scans, change, rebuilt):
    path = data.prompts("a.jsonl", 80)
    build(path)
    build(path, **change)
    assert len(scans) == 1 + rebuilt


def test_only_missing_shards_are_read_a_second_time(build, data, store, monkeypatch):
    path = data.prompts("a.jsonl", 400)
    index = build(path)
    store.path(layout.prompts(index.train[3].name)).unlink()
    again = []
    real = read_module.read_at
    monkeypatch.setattr(
        "draftmill.prompts.write.read_at", lambda file, at, field: again.append(len(at)) or real(file, at, field)
    )
    build(path)
    assert again == [index.train[3].rows]


def test_a_source_that_changes_while_it_is_read_is_noticed(build, data, tmp_path):
    path = data.prompts("a.jsonl", 80)

    heard = []

    def meddle(*step):
        heard.append(step)
        if len(heard) == 1:
            path.write_bytes(path.read_bytes() + b'{"prompt": "late"}\n')

    with pytest.raises(UserError) as caught:
        build(path, progress=meddle)
    assert str(caught.value) == f"{path} changed while it was read: run again when it is complete."
    assert load(LocalStore(tmp_path / "store")) is None


def test_progress_ends_at_the_total(build, data):
    heard = []
    index = build(
        data.prompts("a.jsonl", 80), data.prompts("b.jsonl", 80, 80), progress=lambda *step: heard.append(step)
    )
    last = {phase: (done, total) for phase, done, total in heard}
    assert last["reading"][0] == last["reading"][1] > 0
    assert last["writing"] == (index.counts.train + index.counts.held_out,) * 2


def test_answers_make_records_with_answers(build, data, store):
    path = data.lines("a.jsonl", [data.chat(f"q{n}", f"a{n}") for n in range(40)])
    index = build({"path": str(path), "answers": "keep", "name": "mine"})
    row = rows_of(store, index.train)[0]
    assert row["source"] == "mine"
    assert json.loads(row["record"])["answer"]["role"] == "assistant"


def test_a_store_without_paths_gets_whole_objects(build, data, tmp_path):
    class Remote:
        """An object store: keys and bytes only."""

        url = "memory"

        def __init__(self):
            self.objects = {}
            self.list = lambda prefix="": {key: None for key in self.objects if key.startswith(prefix)}
            self.get = self.objects.__getitem__
            self.put = self.objects.__setitem__
            self.publish = lambda key, path: self.put(key, path.read_bytes())

    path = data.prompts("a.jsonl", 60)
    remote, local = Remote(), LocalStore(tmp_path / "local")
    assert build(path, store=remote) == build(path, store=local) == load(remote)
    assert remote.objects == {key: local.get(key) for key in local.list()}
    assert list(remote.objects)[-1] == layout.INDEX


def test_an_unreadable_or_old_index(build, data, store):
    assert load(store) is None
    store.put(layout.INDEX, b"{")
    with pytest.raises(UserError, match=r"^prompts/index.json in .+ is not readable: delete it and build again\.$"):
        load(store)
    store.put(layout.INDEX, b'{"version": 0}')
    assert load(store) is None
    assert isinstance(build(data.prompts("a.jsonl", 60)), Index)


def test_shard_names_never_change(build, data):
    """A change here loses everything that was built on these shards: raise INDEX_VERSION and say so."""
    index = build(data.prompts("a.jsonl", 30))
    assert ShardEntry("25bf9a9f0cdb", 11, "train", 585) == index.shards[0]


def test_prompts_import_without_torch():
    code = (
        "import sys, draftmill.prompts.index; print({'torch', 'transformers', 'boto3', 'snakemake'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
