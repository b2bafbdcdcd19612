"""The order in which servers take up shards, and Snakemake's preference for the same order."""

import pytest

from draftmill.graph import Graph
from tests.core.builds import HELD_OUT, TRAIN, configuration, make_index, specs_of

SGLANG = {"engine": "sglang", "sglang": {"urls": ["http://localhost:1"]}}


def graph(present=(), **changes):
    config, index = configuration(**{"generate": SGLANG, **changes}), make_index()
    specs = specs_of(config, index)
    made = Graph(config, index, specs, frozenset())
    keys = [key for shard in present for key in made.outputs("generate", shard)]
    return Graph(config, index, specs, frozenset(keys))


def test_shards_come_in_index_order_behind_the_pilot():
    found = graph(pilot=2)
    order = sorted([*TRAIN, *HELD_OUT], key=lambda shard: -found.turn("generate", shard))
    assert order == [TRAIN[2], *(shard for shard in (*TRAIN, *HELD_OUT) if shard != TRAIN[2])]
    assert all(0 < found.turn("generate", shard) <= 1 for shard in order)
    assert found.coming(TRAIN[0]) == [TRAIN[2], *TRAIN[1:2], *TRAIN[3:], *HELD_OUT]


def test_nothing_is_begun_beside_the_pilot_and_nothing_that_is_finished():
    assert graph().coming(TRAIN[0]) == []
    assert graph(present=TRAIN[:2]).coming(TRAIN[2]) == [*TRAIN[3:], *HELD_OUT]


@pytest.mark.parametrize("stage", ["extract", "train", "evaluate"])
def test_other_stages_have_no_turn(stage):
    assert graph().turn(stage, "0") == 0
    assert graph(generate={}).turn("generate", TRAIN[0]) == 0
