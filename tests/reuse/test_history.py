"""The history of the index: which shards share prompts, kept small, and safe to lose or to write twice."""

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill import layout
from draftmill.prompts import history
from draftmill.prompts.history import extended, keys_of, kin_of, load_kin, publish
from draftmill.prompts.index import kin, load
from draftmill.store.local import LocalStore
from tests.reuse.conftest import fresh

PROMPTS = [bytes([number]) * 16 for number in range(40)]
SHARDS = st.dictionaries(
    st.sampled_from([f"{number:012x}" for number in range(8)]),
    st.lists(st.sampled_from(PROMPTS), max_size=12, unique=True),
)


def spread(ranges):
    return [row for start, stop in ranges for row in range(start, stop)]


@settings(deadline=None)
@given(SHARDS)
def test_kin_are_the_shards_that_share_prompts_and_the_rows_that_they_share(shards):
    found = kin_of({name: keys_of(ids) for name, ids in shards.items()})
    expected = {}
    for name, ids in shards.items():
        for other, others in shards.items():
            rows = [row for row, prompt in enumerate(ids) if prompt in others and other != name]
            if rows:
                expected.setdefault(name, {})[other] = rows
    assert {name: {o: spread(r) for o, r in others.items()} for name, others in found.items()} == expected
    for others in found.values():
        for ranges in others.values():
            assert all(stop < start for (_, stop), (start, _) in pairwise(ranges))


@settings(deadline=None)
@given(SHARDS, SHARDS)
def test_the_store_gives_back_what_was_published(tmp_path_factory, one, two):
    store = LocalStore(tmp_path_factory.mktemp("store"))
    old = {name: keys_of(ids) for name, ids in one.items() if ids}
    publish(store, old, kin_of(old))
    assert load_kin(store) == kin_of(old)
    current = {name: keys_of(ids) for name, ids in two.items() if ids}
    members = extended(store, current)
    assert list(members)[: len(current)] == list(current)
    retired = list(members)[len(current) :]
    assert retired == [name for name in old if name not in current][: len(retired)]
    assert all(np.array_equal(members[name], old[name]) for name in retired)
    rows = sum(len(keys) for keys in current.values())
    assert sum(len(members[name]) for name in retired) <= 2 * rows


def test_an_index_that_was_made_anew_knows_its_kin_and_the_store_says_the_same(shop):
    shop.write([f"question {number}" for number in range(60)])
    before = shop.index()
    assert kin(before, shop.store) == {}
    shop.write([f"question {number}" for number in range(1, 60)])
    planned = shop.index(write=False)
    assert load_kin(shop.store) == {}
    made = shop.index()
    assert made.kin == planned.kin != {}
    again = shop.index()
    assert again.kin is None
    assert kin(again, shop.store) == made.kin
    assert load(shop.store) == made
    for name in fresh(before, made):
        assert set(made.kin[name]) <= {shard.name for shard in before.shards} - {shard.name for shard in made.shards}


def test_a_build_killed_before_its_index_makes_the_same_objects(shop, monkeypatch):
    shop.write([f"question {number}" for number in range(60)])
    shop.index()
    shop.write([f"question {number}" for number in range(60, 0, -1)])
    put = LocalStore.put

    def dying(self, key, data):
        if key == layout.INDEX:
            raise KeyboardInterrupt
        put(self, key, data)

    monkeypatch.setattr(LocalStore, "put", dying)
    with pytest.raises(KeyboardInterrupt):
        shop.index()
    half = {key: shop.store.get(key) for key in (layout.HISTORY, layout.KIN)}
    monkeypatch.setattr(LocalStore, "put", put)
    shop.index()
    assert {key: shop.store.get(key) for key in half} == half


def test_the_history_does_not_grow_with_every_edit(shop):
    generator = random.Random(3)
    texts = [f"question {number}" for number in range(60)]
    sizes = []
    for edit in range(25):
        texts[generator.randrange(60)] = f"edit {edit}"
        shop.write(texts)
        shop.index()
        members = history._load(shop.store)
        assert sum(map(len, members.values())) <= 3 * 60
        sizes.append(len(members))
    assert max(sizes[15:]) <= max(sizes[:15]) + 3
    shards = {shard.name for shard in load(shop.store).shards}
    assert shards <= set(history._load(shop.store))


@pytest.mark.parametrize("harm", [b"", b"PAR1 and no more", b"{"])
def test_a_damaged_history_is_none_and_is_mended_by_the_next_index(shop, harm):
    shop.write([f"question {number}" for number in range(60)])
    shop.index()
    shop.store.put(layout.HISTORY, harm)
    shop.store.put(layout.KIN, harm)
    assert load_kin(shop.store) == {}
    shop.write([f"question {number}" for number in range(61)])
    after = shop.index()
    assert after.kin == {}
    assert set(history._load(shop.store)) == {shard.name for shard in after.shards}
