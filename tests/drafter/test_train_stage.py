"""The train stage: it learns, it resumes to the same bytes, it stretches over windows and ranks."""

import json
import multiprocessing
import os
import signal

import pytest
import torch

from draftmill.config import TrainConfig
from draftmill.drafter.checkpoint import load_drafter, load_trainer
from draftmill.drafter.conformance import check
from draftmill.drafter.data import Rows
from draftmill.drafter.model import Drafter
from draftmill.drafter.optimizer import MasterAdamW
from draftmill.drafter.trainer import Trainer
from draftmill.errors import UserError
from draftmill.stages.train import train_window

CPU = torch.device("cpu")
FILES = ("config.json", "model.safetensors", "resume/trainer.safetensors", "train.json")


@pytest.fixture
def head():
    return torch.randn(50, 32, generator=torch.Generator().manual_seed(4))


@pytest.fixture
def job(tmp_path, make_shard, make_shape, target_config, head):
    """Arguments of a short run over one window of ten rows."""
    return {
        "hidden": [make_shard("a", 6), make_shard("b", 4, seed=1)],
        "held_out": [make_shard("h", 4, seed=2)],
        "previous": None,
        "output": tmp_path / "out",
        "journal": tmp_path / "journal",
        "shape": make_shape(layers=2),
        "target": target_config,
        "embed": head,
        "head": head,
        "config": TrainConfig(epochs=3, anchors=3, batch_rows=4, save_every=2, learning_rate=2e-3),
        "device": CPU,
        "provenance": {"fingerprint": "f"},
    }


def bytes_of(folder):
    return {name: (folder / name).read_bytes() for name in FILES}


def test_the_outputs_are_complete_and_keep_the_contract(job):
    result = train_window(**job)
    found = [path for path in job["output"].rglob("*") if path.is_file()]
    assert sorted(str(path.relative_to(job["output"])) for path in found) == sorted(FILES)
    # Engines load every *.safetensors of the folder as weights.
    assert [path.name for path in job["output"].glob("*.safetensors")] == ["model.safetensors"]
    assert check(job["output"], job["target"]) == []
    assert not job["journal"].exists()
    assert json.loads((job["output"] / "train.json").read_text()) == json.loads(json.dumps(result))
    assert (result["rows"], result["held_out_rows"], result["steps"]) == (10, 4, 9)
    assert [point["step"] for point in result["curve"]] == list(range(1, 10))
    assert [epoch["step"] for epoch in result["epochs"]] == [3, 6, 9]
    assert len(result["epochs"][0]["held_out"]["accuracy_by_position"]) == 3
    assert result["epochs"][-1]["train"]["loss"] < result["epochs"][0]["train"]["loss"]


def test_running_twice_gives_equal_bytes_and_another_seed_does_not(job, tmp_path):
    train_window(**job)
    train_window(**{**job, "output": tmp_path / "again"})
    assert bytes_of(tmp_path / "again") == bytes_of(job["output"])
    train_window(**{**job, "output": tmp_path / "other", "config": job["config"].model_copy(update={"seed": 1})})
    assert bytes_of(tmp_path / "other")["model.safetensors"] != bytes_of(job["output"])["model.safetensors"]


def _die_at(step, job):
    def progress(done, _steps, _facts):
        if done == step:
            os.kill(os.getpid(), signal.SIGKILL)

    train_window(**job, progress=progress)


def kill_at(step, job):
    process = multiprocessing.get_context("fork").Process(target=_die_at, args=(step, job))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL


def test_a_killed_run_goes_on_to_the_same_bytes(job, tmp_path):
    train_window(**{**job, "output": tmp_path / "whole"})
    # Before the first save, between saves, and in the last epoch.
    for step, saved in ((1, None), (5, 4), (8, 6)):
        kill_at(step, job)
        journal = job["journal"] / "resume/trainer.safetensors"
        assert (load_trainer(journal)[1]["log"]["step"] if journal.exists() else None) == saved
        assert not job["output"].exists()
    seen = []
    train_window(**job, progress=lambda done, steps, _facts: seen.append((done, steps)))
    assert seen == [(7, 9), (8, 9), (9, 9)]
    assert bytes_of(job["output"]) == bytes_of(tmp_path / "whole")


def test_a_journal_of_another_job_is_not_taken_over(job, tmp_path):
    kill_at(5, {**job, "provenance": {"fingerprint": "other"}})
    seen = []
    train_window(**job, progress=lambda done, *_: seen.append(done))
    assert seen[0] == 1


def test_windows_continue_the_optimiser_and_the_schedule(job, tmp_path):
    first = train_window(**{**job, "span": (0.0, 0.5), "output": tmp_path / "w0"})
    second = train_window(**{**job, "span": (0.5, 1.0), "output": tmp_path / "w1", "previous": tmp_path / "w0"})
    assert (second["steps_before"], second["steps"]) == (9, 9)
    rates = [point["learning_rate"] for part in (first, second) for point in part["curve"]]
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert rates[9] == pytest.approx(1e-3, rel=0.1)
    assert second["epochs"][0]["train"]["loss"] < first["epochs"][-1]["train"]["loss"]
    steps = load_trainer(tmp_path / "w1" / "resume/trainer.safetensors")[0]["step.fc.weight"]
    assert steps == 18


def test_rows_that_cannot_be_trained_on_are_one_sentence(job):
    with pytest.raises(UserError, match=r"None of the 10 rows .* train.max_length = 4 tokens"):
        train_window(**{**job, "config": job["config"].model_copy(update={"max_length": 4})})


def trainer_for(shape, head, **settings):
    config = TrainConfig(**{"anchors": 4, "batch_rows": 8, **settings})
    return Trainer(Drafter(shape).initialize(0), head, head, config, CPU)


@pytest.mark.parametrize("loss", ["cross_entropy", "dpace"])
def test_gradients_reach_every_tensor(make_shard, make_shape, head, loss):
    trainer = trainer_for(make_shape(sliding_layers=1, sliding_window=6), head, loss=loss)
    rows = Rows([make_shard("a", 8)], 3, 32, 99)
    before = {name: value.detach().clone() for name, value in trainer.drafter.named_parameters()}
    trainer.step(rows, range(8), 0, 1e-3)
    unchanged = [name for name, value in trainer.drafter.named_parameters() if torch.equal(value, before[name])]
    assert unchanged == []


@pytest.mark.parametrize("loss", ["cross_entropy", "dpace"])
def test_one_batch_is_overfitted(make_shard, make_shape, head, loss):
    trainer = trainer_for(make_shape(layers=2), head, loss=loss)
    rows = Rows([make_shard("a", 4)], 3, 32, 99)
    scores = [trainer.step(rows, range(4), 0, 3e-3).summary() for _ in range(120)]
    assert scores[0]["accuracy"] < 0.3
    assert scores[-1]["accuracy"] == 1.0
    assert scores[-1]["loss"] < 0.02
    assert scores[-1]["accepted"] == pytest.approx(sum(trainer_room(rows)) / scores[-1]["blocks"])


def trainer_room(rows):
    """How many slots each block of the overfitted batch could fill."""
    batch = rows.batch(range(4), 4, 0, 0)
    ends = batch.loss_mask.shape[1] - batch.loss_mask.flip(1).int().argmax(1)
    return [min(3, int(end) - 1 - int(a)) for end, row in zip(ends, batch.anchors, strict=True) for a in row]


def test_a_rule_that_generalises_is_learned(make_shard, make_shape, head):
    trainer = trainer_for(make_shape(layers=2), head)
    rows, unseen = Rows([make_shard("a", 64)], 3, 32, 99), Rows([make_shard("h", 8, seed=9)], 3, 32, 99)
    fresh = trainer.held_out(unseen).summary()
    for epoch in range(12):
        for start in range(0, 64, 8):
            trainer.step(rows, range(start, start + 8), epoch, 3e-3)
    trained = trainer.held_out(unseen).summary()
    assert trained["accepted"] > fresh["accepted"] + 1.5
    assert trainer.held_out(unseen).summary() == trained


def test_a_step_split_into_several_forwards_has_the_same_gradient(make_shard, make_shape, head):
    rows, grads, tallies = Rows([make_shard("a", 8)], 3, 32, 99), [], []
    for size in (None, 3):
        trainer = trainer_for(make_shape(), head, micro_batch_rows=size)
        kept = []
        trainer.optimizer.step = lambda *_, t=trainer, kept=kept: kept.extend(
            g.clone() for g in t.optimizer.gradients()
        )
        tallies.append(trainer.step(rows, range(8), 0, 0.0))
        grads.append(torch.cat([grad.flatten() for grad in kept]))
    torch.testing.assert_close(grads[0], grads[1], atol=1e-5, rtol=1e-3)
    assert tallies[0].scored == tallies[1].scored
    assert tallies[0].loss == pytest.approx(tallies[1].loss, rel=1e-5)


def test_masters_keep_what_bfloat16_would_swallow():
    module = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.constant_(module.weight, 1.0)
    optimizer = MasterAdamW(module, (0.9, 0.95), 0.0, torch.bfloat16)
    for _ in range(20):
        module.weight.grad = torch.ones_like(module.weight)
        optimizer.step(2e-4, 1e9)
    assert module.weight.dtype == torch.bfloat16
    # Twenty steps of 2e-4: each alone is lost in bfloat16, whose neighbours of 1 are 2^-8 below.
    torch.testing.assert_close(optimizer.state()["master.weight"], torch.full((4, 4), 1 - 4e-3), atol=1e-5, rtol=0)
    assert float(module.weight.detach()[0, 0]) == 1 - 2**-8
    twin = torch.nn.Linear(4, 4, bias=False)
    restored = MasterAdamW(twin, (0.9, 0.95), 0.0, torch.bfloat16)
    restored.load(optimizer.state())
    assert torch.equal(twin.weight, module.weight)
    assert {name: value.tolist() for name, value in restored.state().items()} == {
        name: value.tolist() for name, value in optimizer.state().items()
    }


def test_weight_decay_leaves_norms_alone(make_shape):
    drafter = Drafter(make_shape()).initialize(0)
    optimizer = MasterAdamW(drafter, (0.9, 0.95), 0.5, torch.float32)
    optimizer.gradients()
    before = {name: value.detach().clone() for name, value in drafter.named_parameters()}
    optimizer.step(0.1, 1.0)
    for name, value in drafter.named_parameters():
        assert torch.equal(value, before[name]) == (value.dim() == 1), name


def _rank(rank, ranks, file, job, output):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    train_window(**{**job, "output": output})
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_take_the_steps_of_one(job, tmp_path):
    train_window(**{**job, "output": tmp_path / "one"})
    context = multiprocessing.get_context("fork")
    arguments = [(rank, 2, tmp_path / "meet", job, tmp_path / "two") for rank in range(2)]
    processes = [context.Process(target=_rank, args=args) for args in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    one, two = (json.loads((tmp_path / name / "train.json").read_text()) for name in ("one", "two"))
    for a, b in zip(one["curve"], two["curve"], strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-3)
    assert one["epochs"][-1]["held_out"]["blocks"] == two["epochs"][-1]["held_out"]["blocks"]
    assert load_drafter(tmp_path / "two", torch.float32, CPU).shape == job["shape"]


def test_every_epoch_draws_its_own_blocks(make_shard, make_shape, head):
    rows = Rows([make_shard("a", 8)], 3, 32, 99)
    trainer = trainer_for(make_shape(), head)
    losses = [trainer.step(rows, range(8), epoch, 0.0).loss for epoch in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]


def test_a_diverged_run_is_one_sentence(job):
    job["config"] = job["config"].model_copy(update={"learning_rate": 1e30, "warmup": 0.0})
    with pytest.raises(UserError, match=r"^Training diverged: the loss is (nan|inf) after step \d+ at learning rate "):
        train_window(**job)
    assert not (job["output"] / "model.safetensors").exists()
