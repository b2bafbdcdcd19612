"""The extract stage: what is in a shard, and a canary that refuses states and tokens which do not belong together."""

import pytest
import torch

from draftmill.errors import UserError
from draftmill.hidden_states import HiddenShard
from draftmill.stages import extract as room
from draftmill.stages.extract import token_fit
from draftmill.target.model import Tapped
from tests.core.conftest import is_one_sentence
from tests.extract.conftest import VOCABULARY, alone, answered, completion, ids_of, make_model

TAPS = [0, 2]
DISAGREES = "computed alone disagrees with the packed states or with its own tokens"


@pytest.fixture(scope="module")
def rows(model):
    """Rows of one token and of many, each answered by the model itself at temperature 1."""
    sizes = [(5, 12), (1, 20), (30, 34), (4, 1), (9, 16), (3, 15)]
    made = []
    for number, (prompt, output) in enumerate(sizes):
        ids = ids_of(prompt, number)
        made.append(completion(number, ids, answered(model, ids, output, 1.0, number)))
    return [*made, completion(6, [], [7], origin="imported"), completion(7, ids_of(4), ids_of(6), origin="imported")]


@pytest.mark.parametrize(
    ("batch_tokens", "forwards"),
    [
        (1, 8),  # every row is longer than a batch, or alone in one
        (30, 5),  # one row is longer than a batch
        (64, 3),  # the longest row fills one batch, the last batch is left over
        (999, 1),
    ],
)
def test_a_shard_holds_every_row_whatever_the_packs(model, rows, stage, configure, monkeypatch, batch_tokens, forwards):
    tapped = Tapped(model, TAPS)
    seen = []
    real = tapped.states
    monkeypatch.setattr(tapped, "states", lambda given: seen.append(len(given)) or real(given))
    canaries = stage.run(configure(batch_tokens=batch_tokens), tapped, rows)
    assert (len(seen), sum(seen)) == (forwards, len(rows))
    assert all(canary.agrees for canary in canaries)
    shard = HiddenShard(stage.hidden)
    assert [(key.prompt_id, key.sample, key.source) for key in shard.keys] == [(f"p{n}", 0, "chat") for n in range(8)]
    assert shard.provenance == {"stage": "extract"}
    for number, row in enumerate(rows):
        ids = [*row["prompt_ids"], *row["output_ids"]]
        found = shard.row(number)
        assert found.input_ids.tolist() == ids
        assert found.loss_mask.tolist() == [0] * len(row["prompt_ids"]) + [1] * len(row["output_ids"])
        torch.testing.assert_close(found.hidden.float(), alone(model, ids, TAPS), atol=1e-3, rtol=1e-2)
    assert (stage.beat.total, stage.beat.rows, stage.beat.tokens) == (8, 8, shard.shape[0])


def test_the_same_completions_give_the_same_bytes(model, rows, stage, configure):
    stage.run(configure(), Tapped(model, TAPS), rows)
    first = stage.hidden.read_bytes()
    stage.hidden.unlink()
    stage.run(configure(), Tapped(model, TAPS), rows)
    assert stage.hidden.read_bytes() == first


def test_a_mask_that_came_with_a_row_is_kept(model, stage, configure):
    row = completion(0, [1, 2], [3, 4, 5], origin="imported", loss_mask=[True, False, True])
    stage.run(configure(), Tapped(model, TAPS), [row])
    assert HiddenShard(stage.hidden).row(0).loss_mask.tolist() == [0, 0, 1, 0, 1]


def test_completions_without_rows_are_one_sentence(model, stage, configure):
    with pytest.raises(UserError) as caught:
        stage.run(configure(), Tapped(model, TAPS), [])
    assert str(caught.value) == (
        f"{stage.completions} holds no row, so there are no hidden states to extract; see its rejected file."
    )
    assert not stage.hidden.exists()


def refused(stage, config, tapped, rows):
    with pytest.raises(UserError, match=DISAGREES) as caught:
        stage.run(config, tapped, rows)
    assert is_one_sentence(caught.value)
    assert not stage.hidden.exists()
    assert stage.beat.ended == "failed", "the store is told"
    return str(caught.value)


def test_states_that_are_not_finite_are_one_sentence(rows, stage, configure):
    broken = make_model()
    broken.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match="hidden states that are not finite for row 0: its weights are damaged"):
        stage.run(configure(), Tapped(broken, TAPS), rows)
    assert not stage.hidden.exists()


def test_greedy_rows_pass_and_sampled_ones_are_not_taken_for_greedy(model, rows, stage, configure):
    greedy = [completion(n, ids_of(5, n), answered(model, ids_of(5, n), 12, 0.0)) for n in range(4)]
    canaries = stage.run(configure(temperature=0.0), Tapped(model, TAPS), greedy)
    assert {canary.fit for canary in canaries} == {1.0}
    stage.hidden.unlink()
    assert "fit 0" in refused(stage, configure(temperature=0.0), Tapped(model, TAPS), rows[:1])


@pytest.mark.parametrize("shift", [-1, 1])
def test_tokens_held_against_the_logits_of_a_neighbour_are_refused(model, rows, stage, configure, monkeypatch, shift):
    tapped = Tapped(model, TAPS)
    real = tapped.states_and_logits

    def off_by_one(row):
        states, logits = real(row)
        return states, logits.roll(shift, 0)

    monkeypatch.setattr(tapped, "states_and_logits", off_by_one)
    assert "fit -" in refused(stage, configure(), tapped, rows[:6])


def test_tokens_of_another_row_are_refused(model, rows, stage, configure):
    mixed = [{**row, "output_ids": rows[(n + 1) % 6]["output_ids"]} for n, row in enumerate(rows[:6])]
    refused(stage, configure(), Tapped(model, TAPS), mixed)


def test_tokens_of_other_weights_are_refused(model, rows, stage, configure):
    other = make_model(model.config.model_type, seed=11)
    refused(stage, configure(), Tapped(other, TAPS), rows)


def spoil(tapped, monkeypatch, change):
    real = tapped.states
    monkeypatch.setattr(tapped, "states", lambda given: change(real(given)))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda states: states[1:] + states[:1], id="another row's"),
        pytest.param(lambda states: [state.roll(1, 0) for state in states], id="shifted by a token"),
        pytest.param(lambda states: [state.flip(1) for state in states], id="taps exchanged"),
        pytest.param(lambda states: [torch.zeros_like(state) for state in states], id="zeros"),
    ],
)
def test_states_that_are_not_the_rows_own_are_refused(model, rows, stage, configure, monkeypatch, change):
    same_length = [completion(n, ids_of(5, n), ids_of(9, n + 20), origin="imported") for n in range(6)]
    tapped = Tapped(model, TAPS)
    spoil(tapped, monkeypatch, change)
    refused(stage, configure(), tapped, same_length)


def test_rows_that_see_each_other_are_refused(model, rows, stage, configure, monkeypatch):
    tapped = Tapped(model, TAPS)

    def leaking(given):
        """One causal sequence over all rows, as if positions were not restarted."""
        whole = tapped.states_and_logits([token for row in given for token in row])[0]
        return list(whole.split([len(row) for row in given]))

    monkeypatch.setattr(tapped, "states", leaking)
    refused(stage, configure(batch_tokens=999), tapped, rows[:6])


def test_imported_rows_have_no_fit(model, rows, stage, configure):
    canaries = stage.run(configure(canary_rows=8), Tapped(model, TAPS), rows)
    assert [canary.fit is None for canary in canaries] == [row["origin"] == "imported" for row in rows]


# The statistic ---------------------------------------------------------------------------------------------------------


def drawn(logits, temperature, seed):
    p = torch.softmax(logits / temperature, -1)
    return torch.multinomial(p, 1, generator=torch.Generator().manual_seed(seed))[:, 0]


def logits_of(tokens, peak, seed=0):
    """Random logits with one preferred token each, from flat to very peaked."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, VOCABULARY, generator=generator)
    return logits.scatter_add(
        1, torch.randint(0, VOCABULARY, (tokens, 1), generator=generator), torch.full((tokens, 1), peak)
    )


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("peak", [0.0, 4.0, 9.0, 14.0])
@pytest.mark.parametrize("tokens", [1, 4, 40])
def test_honest_samples_are_hardly_ever_unlikely(tokens, peak, temperature):
    """The bound itself: the mean of exp(-fit) is 1, so no more than exp(-t) of the fits may lie below -t."""
    logits = logits_of(tokens, peak)
    fits = torch.tensor([token_fit(logits, drawn(logits, temperature, seed), temperature) for seed in range(300)])
    assert fits.min() > -10
    for least in (1.0, 2.0, 3.0):
        assert (fits < -least).float().mean() <= torch.exp(torch.tensor(-least)) + 0.03


def test_a_filter_raises_the_fit():
    logits = logits_of(40, 4.0)
    kept = torch.where(logits >= logits.topk(5, -1).values[:, -1:], logits, -torch.inf)
    pairs = [
        (token_fit(logits, drawn(kept, 1.0, s), 1.0), token_fit(logits, drawn(logits, 1.0, s), 1.0)) for s in range(50)
    ]
    assert min(filtered for filtered, _ in pairs) > 0
    assert sum(filtered for filtered, _ in pairs) > sum(plain for _, plain in pairs)


def test_tokens_of_another_position_do_not_fit():
    logits = logits_of(40, 9.0)
    for seed in range(20):
        tokens = drawn(logits, 1.0, seed)
        assert token_fit(logits[1:], tokens[:-1], 1.0) < 5 * room._LEAST_ODDS
        assert token_fit(logits[:-1], tokens[1:], 1.0) < 5 * room._LEAST_ODDS


def test_the_greedy_share_counts_best_tokens_and_near_ties():
    logits = torch.zeros(4, 6)
    logits[range(4), [1, 2, 3, 4]] = 8.0
    assert token_fit(logits, torch.tensor([1, 2, 3, 4]), 0.0) == 1.0
    assert token_fit(logits, torch.tensor([1, 2, 3, 5]), 0.0) == 0.75
    logits[3, 5] = 7.9
    assert token_fit(logits, torch.tensor([1, 2, 3, 5]), 0.0) == 1.0
    logits[3, 5] = 7.5
    assert token_fit(logits, torch.tensor([1, 2, 3, 5]), 0.0) == 0.75
