"""The model: who sees whom, the two forwards agree, and the reference package computes the same."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftmill.drafter.contract import checkpoint_config, tensor_shapes
from draftmill.drafter.masks import block_mask, row_mask
from draftmill.drafter.model import ContextCache, Drafter, block_ids

WIDTH, TAPS, SIZE = 32, 3, 4


def visible(anchor_q, slot_q, key, own_block, window):
    """The rule in words: (position, is_context) of a key against a query of a block."""
    position, is_context = key
    query = anchor_q + slot_q
    if is_context:
        return position < anchor_q and (window is None or query - position < window)
    return own_block and (window is None or 0 <= query - position < window)


@given(
    anchors=st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2), min_size=1, max_size=2),
    size=st.integers(2, 4),
    window=st.none() | st.integers(1, 12),
)
@settings(max_examples=60, deadline=None)
def test_the_mask_is_the_rule(anchors, size, window):
    tokens = 10
    mask = row_mask(torch.tensor(anchors), tokens, size, window)
    for row, anchor_row in enumerate(anchors):
        for q in range(2 * size):
            block, slot = divmod(q, size)
            for k in range(tokens):
                assert mask[row, 0, q, k] == visible(anchor_row[block], slot, (k, True), False, window)
            for k in range(2 * size):
                other, key_slot = divmod(k, size)
                key = (anchor_row[other] + key_slot, False)
                assert mask[row, 0, q, tokens + k] == visible(anchor_row[block], slot, key, other == block, window)


@pytest.mark.parametrize("window", [1, 2, 3, 7, 20])
def test_the_mask_of_one_block_is_that_of_training(window):
    start, size = 6, 4
    training = row_mask(torch.tensor([[start]]), start, size, window)
    assert torch.equal(block_mask(start, size, window, torch.device("cpu")), training)


def batch(rows=2, tokens=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    anchors = torch.tensor([[3, 4, 8], [2, 7, 10]])[:rows]
    return SimpleNamespace(
        taps=torch.randn(rows, tokens, TAPS, WIDTH, generator=generator),
        blocks=torch.randn(rows, 3, SIZE, WIDTH, generator=generator),
        anchors=anchors,
    )


SHAPES = [{}, {"sliding_layers": 3, "sliding_window": 5}, {"sliding_layers": 2, "sliding_window": 3}]


@pytest.mark.parametrize("shape", SHAPES)
@given(data=st.data())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_block_sees_its_anchors_future_another_block_or_another_row(shape, make_drafter, data):
    drafter = make_drafter(**shape)
    given_ = batch()
    before = drafter(given_.taps, given_.blocks, given_.anchors)
    row, block = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 2))
    anchor = int(given_.anchors[row, block])
    noise = 100 * torch.randn(1000)
    # Everything that this block may not see is replaced: later and equal positions, other blocks, the other row.
    given_.taps[row, anchor:] = noise[0]
    given_.taps[1 - row] = noise[1]
    own = given_.blocks[row, block].clone()
    given_.blocks[:] = noise[2]
    given_.blocks[row, block] = own
    after = drafter(given_.taps, given_.blocks, given_.anchors)
    assert torch.equal(before[row, block], after[row, block])
    assert not torch.equal(before[1 - row], after[1 - row])


def test_a_block_does_see_its_last_context_token_and_all_its_slots(make_drafter):
    drafter, given_ = make_drafter(), batch()
    before = drafter(given_.taps, given_.blocks, given_.anchors)
    anchor = int(given_.anchors[0, 1])
    given_.taps[0, anchor - 1] += 1
    seen = drafter(given_.taps, given_.blocks, given_.anchors)
    assert (before[0, 1] != seen[0, 1]).any(-1).all()
    given_ = batch()
    given_.blocks[0, 1, -1] += 1
    seen = drafter(given_.taps, given_.blocks, given_.anchors)
    assert (before[0, 1] != seen[0, 1]).any(-1).all()


def test_sliding_layers_are_causal_in_the_block_and_end_at_the_window(make_drafter):
    """With one layer the receptive field is the mask itself, so its edges can be seen in the output."""
    window = 5
    drafter = make_drafter(layers=1, sliding_layers=1, sliding_window=window)
    given_ = batch()
    before = drafter(given_.taps, given_.blocks, given_.anchors)
    anchor = int(given_.anchors[0, 2])
    for position in range(anchor):
        changed = batch()
        changed.taps[0, position] += 1
        after = drafter(changed.taps, changed.blocks, changed.anchors)
        for slot in range(SIZE):
            differs = bool((after[0, 2, slot] != before[0, 2, slot]).any())
            assert differs == (anchor + slot - position < window)
    for changed_slot in range(SIZE):
        changed = batch()
        changed.blocks[0, 2, changed_slot] += 1
        after = drafter(changed.taps, changed.blocks, changed.anchors)
        for slot in range(changed_slot):
            assert torch.equal(after[0, 2, slot], before[0, 2, slot])


@pytest.mark.parametrize("shape", SHAPES)
def test_decoding_computes_what_training_computes(make_drafter, shape):
    drafter, given_ = make_drafter(**shape), batch()
    trained = drafter(given_.taps, given_.blocks, given_.anchors)
    cache = ContextCache(drafter.shape.num_layers)
    for number, anchor in enumerate(given_.anchors[1].tolist()):
        drafter.extend(cache, given_.taps[1, cache.length : anchor])
        proposed = drafter.propose(cache, given_.blocks[1, number])
        torch.testing.assert_close(proposed, trained[1, number], atol=1e-5, rtol=1e-5)


def test_a_block_without_context_is_refused(make_drafter):
    drafter = make_drafter()
    with pytest.raises(ValueError, match="one token of context"):
        drafter.propose(ContextCache(3), torch.zeros(SIZE, WIDTH))


def test_padding_anchors_and_padded_rows_change_nothing_and_stay_finite(make_drafter):
    drafter, given_ = make_drafter(), batch()
    alone = drafter(given_.taps[:1, :9], given_.blocks[:1], given_.anchors[:1])
    anchors = torch.cat([given_.anchors[:1], torch.zeros(1, 2, dtype=torch.int64)], 1)
    blocks = torch.cat([given_.blocks[:1], torch.zeros(1, 2, SIZE, WIDTH)], 1)
    padded = drafter(given_.taps[:1], blocks, anchors)
    torch.testing.assert_close(padded[:, :3], alone, atol=1e-5, rtol=1e-5)
    assert torch.isfinite(padded).all()


def test_block_ids_are_the_anchor_and_masks(make_shape):
    assert block_ids(torch.tensor([[5, 6]]), make_shape()).tolist() == [[[5, 7, 7, 7], [6, 7, 7, 7]]]


def test_names_and_shapes_are_the_contracts(make_drafter):
    drafter = make_drafter()
    found = {name: tuple(value.shape) for name, value in drafter.state_dict().items()}
    assert found == tensor_shapes(drafter.shape)


def test_a_cast_to_bfloat16_rounds_no_rotary_frequency(make_drafter):
    drafter = make_drafter()
    far = torch.tensor([100_003])
    exact = drafter.rotary(far, torch.float32)
    drafter.to(torch.bfloat16)
    assert torch.equal(drafter.rotary(far, torch.float32)[0], exact[0])


@pytest.mark.parametrize("shape", [*SHAPES, {"layers": 1}, {"heads": 8, "kv_heads": 2, "head_dim": 16}])
def test_the_reference_package_computes_the_same(make_drafter, target_config, shape):
    dflash = pytest.importorskip("dflash.model")
    from transformers import Qwen3Config

    drafter = make_drafter(**shape)
    reference = dflash.DFlashDraftModel(Qwen3Config(**checkpoint_config(drafter.shape, target_config))).eval()
    reference.load_state_dict(drafter.state_dict(), strict=True)
    given_, head = batch(rows=1), torch.randn(50, WIDTH)
    for number, anchor in enumerate(given_.anchors[0].tolist()):
        theirs = reference(
            position_ids=torch.arange(anchor + SIZE)[None],
            noise_embedding=given_.blocks[:, number],
            target_hidden=given_.taps[:, :anchor].flatten(-2),
        )
        ours = drafter(given_.taps, given_.blocks, given_.anchors)[:, number]
        torch.testing.assert_close(ours @ head.T, theirs @ head.T, atol=1e-4, rtol=0)


def test_fresh_logits_have_unit_deviation_whatever_the_heads_scale(make_shape):
    for scale in (0.01, 1.0, 30.0):
        head = scale * torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(1))
        drafter, given_ = Drafter(make_shape()).initialize(0, head), batch()
        logits = drafter(given_.taps, given_.blocks, given_.anchors) @ head.T
        assert 0.7 < float(logits.detach().std()) < 1.4
