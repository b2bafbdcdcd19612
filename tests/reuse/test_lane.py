"""The process that asks servers takes rows over too, before it sends any."""

from draftmill.config import parse
from draftmill.prompts.index import kin
from draftmill.stages.asking import Target
from draftmill.stages.reuse import old_shards
from draftmill.stages.rows import Ledger, RowRules
from draftmill.stages.shards import Shards, journal_of
from tests.reuse.conftest import STOP, fresh


def test_a_shard_comes_to_the_lane_with_the_rows_of_its_forerunner(shop, built):
    before = built()
    shop.write([f"question {number}" for number in range(58)])
    after = shop.index()
    config = parse({**shop.config().model_dump(mode="json"), "generate": {"max_new_tokens": 24}})
    target = Target(shop.tokenizer, RowRules(config.generate, frozenset({STOP}), 260), 512)
    for name in fresh(before, after):
        assert old_shards(kin(after, shop.store), name)
        shards = Shards(config, target, shop.store, shop.gen)
        asked = shards.read(name, coming=False)
        assert {item.key for item in asked} == (answered := set(journalled(config, shop, name)))
        shards.read(name, coming=False)
        assert set(journalled(config, shop, name)) == answered


def journalled(config, shop, name):
    ledger = Ledger(config.generate, journal_of(shop.store, name, shop.gen))
    ledger.load()
    return ledger.answers
