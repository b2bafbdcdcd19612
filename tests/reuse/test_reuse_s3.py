"""Index, history and reuse in a bucket."""

import pytest

from draftmill import layout
from draftmill.prompts.index import kin, load
from tests.reuse.conftest import Shop, fresh
from tests.s3.fixtures import s3_environment, s3_store, weed  # noqa: F401 - fixtures

pytestmark = pytest.mark.slow


def test_an_edit_in_a_bucket_is_one_request(tmp_path, s3_store):  # noqa: F811 - the fixture
    shop = Shop(tmp_path, s3_store)
    shop.write([f"question {number}" for number in range(40)])
    before = shop.index()
    assert {layout.HISTORY, layout.KIN, layout.INDEX} <= set(s3_store.list("prompts/"))
    for shard in before.shards:
        shop.generate(shard.name)
    shop.write([f"question {number}" for number in range(39)])
    after = shop.index()
    assert load(s3_store) == after
    new = fresh(before, after)
    assert new
    assert all(kin(after, s3_store)[name] for name in new)
    assert [shop.generate(name) for name in new] == [[]] * len(new)
