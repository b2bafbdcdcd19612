"""The same over the real Snakefile: its jobs are recorded, its store is sound, and only damage is built again."""

import pytest

from draftmill.catalog import OBJECTS, identify
from draftmill.integrity.quarantine import quarantine
from draftmill.integrity.reader import Reader
from draftmill.integrity.verify import Options, verify
from draftmill.store.local import LocalStore
from tests.integrity.damage import flip
from tests.integrity.stores import read_records

pytestmark = pytest.mark.slow


def objects(store: LocalStore) -> dict[str, bytes]:
    keys = [key for key in store.list() if (entry := identify(key)) and entry.kind in OBJECTS]
    return {key: store.get(key) for key in keys}


def test_a_build_is_recorded_sound_and_repaired_by_what_was_damaged_alone(copy_of_built):
    project = copy_of_built()
    store = LocalStore(project.folder / "build")
    verdict = verify(Reader(store), Options(deep=True))
    assert verdict.findings == []
    whole = objects(store)
    made = {key for record in read_records(store) for key in record.outputs}
    assert made == {key for key in whole if not key.startswith("prompts/")}
    assert all(record.run and record.finished >= record.started > 0 for record in read_records(store))
    spoilt = sorted(key for key in whole if key.startswith("hidden/"))[0]
    flip(store.path(spoilt), len(whole[spoilt]) - 1)
    reader = Reader(store)
    moved = quarantine(reader, verify(reader, Options(deep=True)).findings)
    assert moved is not None
    assert moved.keys == [spoilt]
    assert project.plan() in ({"extract": 1}, {"extract_held_out": 1})
    project.build()
    assert objects(store) == whole
    assert verify(Reader(store), Options(deep=True)).findings == []
