"""Rows and batches: what is trained on, in which order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftmill.drafter.data import Rows, split_steps
from draftmill.errors import UserError
from draftmill.hidden_states import HiddenRow, RowKey, write_shard


def test_rows_without_an_anchor_are_left_out_and_counted(tmp_path):
    def row(name, mask):
        length = len(mask)
        return HiddenRow(
            RowKey(name, 0, "s"), torch.arange(length), torch.tensor(mask), torch.ones(length, 3, 32).bfloat16()
        )

    path = tmp_path / "rows.safetensors"
    write_shard(
        path, [row("none", [0, 0]), row("one", [0, 1]), row("two", [0, 1, 1]), row("late", [0] * 9 + [1, 1])], {}
    )
    assert (len(Rows([path], 3, 32, 99)), Rows([path], 3, 32, 99).skipped) == (2, 2)
    # The late row's answer lies past the longest length.
    assert (len(Rows([path], 3, 32, 9)), Rows([path], 3, 32, 9).skipped) == (1, 3)


def test_a_shard_of_other_taps_or_width_is_refused(make_shard):
    path = make_shard("a", 2)
    with pytest.raises(UserError, match="holds 3 taps of width 32, but the drafter reads 2 of width 32"):
        Rows([path], 2, 32, 99)


def test_a_batch_is_the_rows_padded(make_shard):
    rows = Rows([make_shard("a", 3), make_shard("b", 2, seed=5)], 3, 32, 99)
    batch = rows.batch([1, 4], anchors=4, seed=0, epoch=0)
    assert batch.input_ids.shape == (2, 16)
    assert batch.loss_mask.sum(1).tolist() == [13, 13]
    assert batch.anchors.shape == (2, 4)
    assert batch.valid.all()
    # States end at the last anchor, and are those of the tokens.
    assert batch.taps.shape == (2, int(batch.anchors.max()), 3, 32)
    alone = rows.batch([4], anchors=4, seed=0, epoch=0)
    assert torch.equal(alone.anchors[0], batch.anchors[1])
    assert torch.equal(alone.taps[0], batch.taps[1, : alone.taps.shape[1]])


def test_anchors_change_with_the_epoch_and_with_nothing_else(make_shard):
    rows = Rows([make_shard("a", 4)], 3, 32, 99)
    first, again, other = (rows.batch([0, 1, 2, 3], 4, 0, epoch).anchors for epoch in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_an_epoch_has_every_row_once_in_its_own_order(make_shard):
    rows = Rows([make_shard("a", 9)], 3, 32, 99)
    assert sorted(rows.shuffled(0, 0)) == list(range(9))
    assert rows.shuffled(0, 0) == rows.shuffled(0, 0)
    assert rows.shuffled(0, 0) != rows.shuffled(0, 1)
    assert rows.shuffled(0, 0) != rows.shuffled(1, 0)


@given(count=st.integers(1, 40), size=st.integers(1, 9), ranks=st.integers(1, 4))
def test_ranks_share_every_step_without_loss(count, size, ranks):
    alone = list(split_steps(range(count), size))
    shares = [list(split_steps(range(count), size, rank, ranks)) for rank in range(ranks)]
    assert {len(share) for share in shares} == {len(alone)}
    for number, step in enumerate(alone):
        assert sorted(row for share in shares for row in share[number]) == step
