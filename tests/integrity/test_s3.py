"""The same on a real S3 service: nothing here knows where objects lie."""

import pytest

from draftmill.catalog import identify
from draftmill.graph import Graph
from draftmill.integrity import gc, reader
from draftmill.integrity.adopt import Adoption
from draftmill.integrity.quarantine import quarantine
from draftmill.integrity.reach import reached
from draftmill.integrity.reader import Reader
from draftmill.integrity.verify import Options, verify
from draftmill.store.s3 import S3Store
from tests.integrity.stores import Toy
from tests.s3.fixtures import s3_environment, s3_store, weed  # noqa: F401 - fixtures

pytestmark = pytest.mark.slow


@pytest.fixture
def remote(toy: Toy, s3_store: S3Store) -> S3Store:  # noqa: F811
    for key in toy.store.list():
        s3_store.publish(key, toy.path(key))
    return s3_store


def found(store: S3Store, **options):
    return {(finding.key, finding.what) for finding in verify(Reader(store), Options(**options)).findings}


def spoil(store: S3Store, key: str) -> bytes:
    """Other bytes of the same length under the digest that the object had, as a failing disk would leave them."""
    data, metadata = bytearray(store.get(key)), {"sha256": store.info(key).sha256}
    data[-1] ^= 1
    store.client.put_object(Bucket=store.bucket, Key=store.prefix + key, Body=bytes(data), Metadata=metadata)
    return bytes(data)


def test_a_sound_store_is_clean(remote):
    assert found(remote) == set()
    assert found(remote, deep=True) == set()


def test_damage_is_found_and_moved(toy, remote):
    key = toy.graph.hidden(toy.graph.train[0])
    data = spoil(remote, key)
    assert (key, "digest") in found(remote, deep=True)
    look = Reader(remote)
    moved = quarantine(look, verify(look, Options(deep=True)).findings)
    assert moved.keys == [key]
    assert remote.get(f"quarantine/0001/{key}") == data
    assert remote.info(key) is None
    assert found(remote, deep=True) == set()


def test_large_objects_are_held_against_their_digests_alone(toy, remote, monkeypatch):
    key = toy.graph.hidden(toy.graph.train[0])
    most = remote.info(key).size - 1
    monkeypatch.setattr(reader, "FETCH_BYTES", most)
    spoil(remote, key)
    verdict = verify(Reader(remote))
    assert verdict.findings == []
    assert verdict.unopened == sum(info.size > most for info in remote.list().values())
    assert (key, "digest") in found(remote, deep=True)


def test_of_a_large_object_the_header_is_read_at_least(toy, remote, monkeypatch):
    one, other = (toy.graph.hidden(shard) for shard in toy.graph.train[:2])
    monkeypatch.setattr(reader, "FETCH_BYTES", 0)
    remote.put(one, remote.get(other))
    assert (one, "name") in found(remote)


def test_an_object_that_another_build_published_is_no_damage(toy, remote):
    """Its own digest fits, the record is that of the build that came second."""
    key = toy.graph.evaluation()
    remote.put(key, remote.get(key) + b"\n")
    assert found(remote, deep=True) == {(key, "record of another")}


def test_large_provenance_is_read_from_the_header(toy, remote):
    for key in (toy.graph.hidden(toy.graph.train[0]), toy.graph.drafter(0, "resume/trainer.safetensors")):
        assert Reader(remote).provenance(key) == Reader(toy.store).provenance(key)


def test_sweeping_and_unfinished_uploads(toy, remote):
    graph = Graph(toy.config, toy.graph.index, toy.graph.specs, toy.graph.present)
    remote.client.create_multipart_upload(Bucket=remote.bucket, Key=f"{remote.prefix}eval/x")
    remote.put("eval/0123456789ab.json", b"{}")
    waste = gc.waste(remote, remote.list(), reached([graph], remote), before=2e10)
    assert waste.keys == ["eval/0123456789ab.json"]
    gc.remove(remote, waste)
    assert remote.info("eval/0123456789ab.json") is None
    assert len(remote.remove_unfinished(0.0, dry=True)) == 1
    assert len(remote.remove_unfinished(0.0)) == 1
    assert remote.remove_unfinished(0.0, dry=True) == []
    assert found(remote, deep=True) == set()


@pytest.mark.parametrize("data", [b"", b"short", bytes([8, *bytes(7)])], ids=len)
def test_objects_too_short_for_a_header_end_no_sweep_and_no_adoption(toy, remote, data):
    """Under the names of other settings, so that what they were made from is asked of themselves."""
    fp, short = "0123456789ab", []
    for key in (toy.graph.hidden(toy.graph.train[0]), toy.graph.completions(toy.graph.train[0])):
        entry = identify(key)
        short.append(key.replace(entry.fp, fp))
        remote.put(short[-1], data)
        assert Reader(remote).provenance(short[-1]) == {}
    graph = Graph(toy.config, toy.graph.index, toy.graph.specs, toy.graph.present)
    assert Adoption(Reader(remote)).plan([graph]).jobs == []
    assert gc.waste(remote, remote.list(), reached([graph], remote), before=2e10).keys == sorted(short)


def test_objects_are_relabelled(toy, remote, monkeypatch):
    from draftmill import adoption, specs

    now = {**specs.SPEC_VERSIONS, "extract": 2}
    monkeypatch.setattr(specs, "SPEC_VERSIONS", now)
    monkeypatch.setattr(adoption, "STEPS", {**adoption.STEPS, ("extract", 1): adoption.Step("A test.", lambda old: "")})
    later = Toy.open(toy.store.root.parent)
    graph = Graph(later.config, later.graph.index, later.graph.specs, frozenset(remote.list()))
    taking = Adoption(Reader(remote), now)
    plan = taking.plan([graph])
    for job in plan.jobs:
        taking.take_over(job)
    assert [job.stage for job in plan.jobs] == ["extract"] * len(graph.shards) + ["pilot", "train", "evaluate"]
    assert found(remote, deep=True) == set()
