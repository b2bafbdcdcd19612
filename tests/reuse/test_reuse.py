"""A shard with edited prompts asks the engine for these alone."""

import pytest

from draftmill import layout
from draftmill.engines.base import Result
from draftmill.prompts.index import kin
from draftmill.schemas import COMPLETIONS, write_rows
from draftmill.stages.generate import RowRules
from draftmill.stages.reuse import old_shards, reusable_rows
from tests.reuse.conftest import STOP, fresh


def texts(count=60, **edits):
    found = [f"question {number}" for number in range(count)]
    for place, text in edits.items():
        found[int(place.removeprefix("at"))] = text
    return found


def edited(shop, before, place=30, text="something new"):
    """The index after one edit that stays in one train shard, and the names of its fresh shards."""
    for place_ in range(place, 60):
        shop.write(texts(**{f"at{place_}": text}))
        after = shop.index(write=False)
        new = fresh(before, after)
        if len(new) == 1 and after.counts.held_out == before.counts.held_out:
            return shop.index(), new
    raise AssertionError("no such edit")


def promised(shop, index, name):
    """How many prompts of a shard the kin say are answered by the same settings elsewhere."""
    kin_of_shard, present = kin(index, shop.store).get(name, {}), shop.store.list()
    there = [ranges for old, ranges in kin_of_shard.items() if layout.completions(old, shop.gen) in present]
    return len({row for ranges in there for start, stop in ranges for row in range(start, stop)})


def rows_of(index, name):
    return next(shard.rows for shard in index.shards if shard.name == name)


def test_one_edited_prompt_is_the_one_row_that_the_engine_is_asked_for(shop, built):
    before = built()
    shop.engine.tag = 2
    after, (new,) = edited(shop, before)
    assert promised(shop, after, new) == rows_of(after, new) - 1
    asked = shop.generate(new)
    assert len(asked) == 1
    rows = shop.rows(new)
    assert len(rows) == rows_of(after, new)
    (old,) = old_shards(kin(after, shop.store), new)
    was = {row["prompt_id"]: row for row in shop.rows(old)}
    for row in rows:
        assert row == was[row["prompt_id"]] if row["prompt_id"] != asked[0] else row["output_ids"][0] == 2


def test_a_plan_in_memory_counts_what_the_build_will_take(shop, built):
    before = built()
    shop.write(texts(at30="something new"))
    planned = shop.index(write=False)
    counts = {name: promised(shop, planned, name) for name in fresh(before, planned)}
    made = shop.index()
    assert made == planned
    for name, count in counts.items():
        assert count == promised(shop, made, name)
        assert len(shop.generate(name)) == rows_of(made, name) - count


def test_rows_come_from_every_shard_that_has_some(shop, built):
    """Other shard sizes: new shards are put together from several old ones, and nothing is generated at all."""
    before = built(150)
    after = shop.index(shard_rows=21)
    new = fresh(before, after)
    assert any(len(old_shards(kin(after, shop.store), name)) > 1 for name in new)
    assert sum(len(shop.generate(name)) for name in new) == 0


def test_a_renamed_source_keeps_its_rows_under_the_new_name(shop, built):
    before = built()
    after = shop.index(sources=[{"path": str(shop.folder / "a.jsonl"), "name": "renamed"}])
    new = fresh(before, after)
    assert len(new) == len(after.shards)
    assert sum(len(shop.generate(name)) for name in new) == 0
    assert {row["source"] for row in shop.rows(new[0])} == {"renamed"}


def test_an_index_that_was_never_generated_is_looked_through(shop, built):
    before = built()
    edited(shop, before)
    shop.write(texts(at30="something else", at31="and more"))
    after = shop.index()
    asked = [prompt for name in fresh(before, after) for prompt in shop.generate(name)]
    assert len(asked) == 2


def test_an_edit_taken_back_costs_nothing_and_rows_are_found_both_ways(shop, built):
    before = built()
    after, (new,) = edited(shop, before)
    (old,) = old_shards(kin(after, shop.store), new)
    assert len(shop.generate(new)) == 1
    shop.write(texts())
    again = shop.index()
    assert again == before
    shop.store.delete(layout.completions(old, shop.gen))
    assert promised(shop, again, old) == rows_of(again, old) - 1
    assert len(shop.generate(old)) == 1


def test_another_fingerprint_takes_nothing(shop, built):
    before = built()
    after, (new,) = edited(shop, before)
    shop.gen = "b" * 12
    assert promised(shop, after, new) == 0
    assert len(shop.generate(new)) == rows_of(after, new)


def change_rows(shop, shard, change):
    path = shop.store.path(layout.completions(shard, shop.gen))
    write_rows(path, COMPLETIONS, [change(dict(row)) for row in shop.rows(shard)], {})


@pytest.mark.parametrize(
    "change",
    [
        {"output_ids": [5, 6, 7]},  # ends with no token that ends an answer
        {"output_ids": []},
        {"output_ids": [999, STOP]},
        {"output_ids": [5] * 40, "finish_reason": "length"},
        {"finish_reason": "abort"},
        {"prompt_ids": [1, 2, 3]},
        {"origin": "imported"},
    ],
)
def test_a_row_that_would_not_be_valid_today_is_generated_again(shop, built, change):
    before = built()
    after, (new,) = edited(shop, before)
    (old,) = old_shards(kin(after, shop.store), new)
    victim = shop.rows(old)[0]["prompt_id"]
    others = {row["prompt_id"] for row in shop.rows(old)[1:]}
    change_rows(shop, old, lambda row: row | (change if row["prompt_id"] == victim else {}))
    asked = shop.generate(new)
    assert not set(asked) & others
    assert len(asked) == 2 or victim not in {row["prompt_id"] for row in shop.rows(new)}


def test_rules_of_today_decide(shop, built):
    _, (new,) = edited(shop, built())
    config = shop.config()
    strict = RowRules(config.generate.model_copy(update={"max_new_tokens": 3}), frozenset({STOP}), 260)
    shop.generate(new, rules=strict, max_new_tokens=3, engine=Short())
    assert all(len(row["output_ids"]) <= 3 for row in shop.rows(new))


class Short:
    """An engine whose answers are short."""

    def run(self, requests, done):
        for request in requests:
            if request.key not in done:
                yield Result(request.key, (1, STOP), "stop")


@pytest.mark.parametrize("harm", ["gone", "damaged", "no history", "broken history"])
def test_without_what_is_needed_everything_is_generated(shop, built, harm):
    before = built()
    after, (new,) = edited(shop, before)
    (old,) = old_shards(kin(after, shop.store), new)
    completions = layout.completions(old, shop.gen)
    if harm == "gone":
        shop.store.delete(completions)
    elif harm == "damaged":
        shop.store.put(completions, shop.store.get(completions)[:200])
    elif harm == "no history":
        shop.store.delete(layout.KIN)
    else:
        shop.store.put(layout.KIN, b"{")
    assert len(shop.generate(new)) == rows_of(after, new)
    assert len(shop.rows(new)) == rows_of(after, new)


def test_taken_rows_are_in_the_journal_of_a_killed_job(shop, built):
    """What was taken stays, even if the old file is gone when the job starts again."""
    before = built()
    after, (new,) = edited(shop, before)

    class Killed(BaseException):
        pass

    class Dying:
        def run(self, requests, done):
            raise Killed
            yield

    with pytest.raises(Killed):
        shop.generate(new, engine=Dying())
    (old,) = old_shards(kin(after, shop.store), new)
    shop.store.delete(layout.completions(old, shop.gen))
    assert len(shop.generate(new)) == 1


def test_every_sample_is_taken(shop, built):
    shop.write(texts())
    before = shop.index()
    for shard in before.shards:
        shop.generate(shard.name, samples=2)
    after, (new,) = edited(shop, before)
    assert len(shop.generate(new, samples=2)) == 2
    keys = {(row["prompt_id"], row["sample"]) for row in shop.rows(new)}
    assert len(keys) == 2 * rows_of(after, new)


def test_only_wanted_rows_are_given(shop, built):
    before = built()
    after, (new,) = edited(shop, before)
    (old,) = old_shards(kin(after, shop.store), new)
    wanted = [(row["prompt_id"], 0) for row in shop.rows(old)]
    found = reusable_rows(shop.store, new, shop.gen, {wanted[0], ("x" * 32, 0)})
    assert set(found) == {wanted[0]}
    assert reusable_rows(shop.store, "0" * 12, shop.gen, set(wanted)) == {}


def test_shards_with_most_of_the_prompts_come_first():
    ranges = {"o1": [[0, 5]], "o2": [[3, 8], [20, 21]], "o3": [[8, 20]]}
    assert old_shards({"s": ranges}, "s") == ["o3", "o2", "o1"]
    assert old_shards({}, "s") == []
