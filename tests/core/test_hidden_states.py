"""The hidden-state shard: rows come back as they went, a damaged file is one sentence, the bytes are always the same."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from draftmill.errors import UserError
from draftmill.hidden_states import HiddenShard, write_shard
from tests.core.conftest import is_one_sentence
from tests.core.objects import make_rows, write_both
from tests.tiny import ROOT


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 3), st.integers(1, 4), st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_rows_come_back_whole_and_cut(tmp_path_factory, lengths, taps, width, limit):
    path = tmp_path_factory.getbasetemp() / "round.safetensors"
    rows = make_rows(lengths, taps, width)
    write_shard(path, rows, {"stage": "extract"})
    shard = HiddenShard(path)
    assert (len(shard), shard.shape, shard.provenance) == (len(rows), (sum(lengths), taps, width), {"stage": "extract"})
    assert shard.keys == [row.key for row in rows]
    assert shard.offsets.tolist() == [sum(lengths[:end]) for end in range(len(lengths) + 1)]
    for number, row in enumerate(rows):
        for cut, found in ((None, shard.row(number)), (limit, shard.row(number, limit))):
            assert found.key == row.key
            assert torch.equal(found.input_ids, row.input_ids[:cut])
            assert torch.equal(found.loss_mask, row.loss_mask[:cut])
            assert torch.equal(found.hidden, row.hidden[:cut])


def test_types_in_the_file_are_the_contract(tmp_path):
    write_shard(tmp_path / "x", make_rows([2, 1]), {})
    row = HiddenShard(tmp_path / "x").row(0)
    assert (row.input_ids.dtype, row.loss_mask.dtype, row.hidden.dtype) == (torch.int32, torch.uint8, torch.bfloat16)
    assert HiddenShard(tmp_path / "x").offsets.dtype == torch.int64


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_never_published(tmp_path, value):
    rows = make_rows([2, 2])
    rows[1].hidden[1, 1, 2] = value
    with pytest.raises(ValueError, match="not finite"):
        write_shard(tmp_path / "x", rows, {})
    assert list(tmp_path.iterdir()) == []


def test_a_shard_without_rows_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one row"):
        write_shard(tmp_path / "x", [], {})


@pytest.mark.parametrize("cut", [0, 4, 8, 100, -1])
def test_a_torn_file_is_one_sentence(tmp_path, cut):
    path = tmp_path / "x.safetensors"
    write_shard(path, make_rows([3, 4]), {})
    path.write_bytes(path.read_bytes()[:cut])
    refused(path)


def test_a_file_that_is_none_of_ours_is_one_sentence(tmp_path):
    refused(tmp_path / "absent")
    refused(tmp_path)
    (tmp_path / "text").write_text("hello, this is no tensor file at all")
    refused(tmp_path / "text")
    save_file({"hidden": torch.zeros(1)}, tmp_path / "plain")
    refused(tmp_path / "plain")
    save_file({"hidden": torch.zeros(1)}, tmp_path / "foreign", metadata={"draftmill": '{"state": 1}'})
    refused(tmp_path / "foreign")
    whole = {name: torch.zeros(1) for name in ("offsets", "input_ids", "loss_mask", "hidden")}
    for metadata in ('{"rows": [[1]], "provenance": {}}', "[]", '{"rows": 3}', "{}"):
        save_file(whole, tmp_path / "foreign", metadata={"draftmill": metadata})
        refused(tmp_path / "foreign")


def refused(path):
    with pytest.raises(UserError, match="is not a readable hidden-state shard") as caught:
        HiddenShard(path)
    assert str(path) in str(caught.value)
    assert is_one_sentence(caught.value)


def test_two_processes_write_the_same_bytes(tmp_path):
    """Provenance has many keys and each format a header of its own: neither may depend on the hash seed."""
    write_both(tmp_path / "here")
    script = "import sys, pathlib; from tests.core.objects import write_both; write_both(pathlib.Path(sys.argv[1]))"
    seed = "7" if os.environ.get("PYTHONHASHSEED") != "7" else "8"
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "there")],
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": seed},
    )
    for name in ("x.safetensors", "x.parquet"):
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes()
