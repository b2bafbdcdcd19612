"""Preflight: what a build needs, reckoned by hand, and each shortage in its exact sentence."""

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from draftmill import memory
from draftmill.canonical import canonical_json
from draftmill.config import Config
from draftmill.errors import UserError
from draftmill.graph import Graph
from draftmill.memory import available_memory, memory_limit
from draftmill.preflight import Needs, needs, preflight, tokens_a_row, weight_bytes
from draftmill.store.local import LocalStore
from tests.core.builds import SIZES, TARGET, configuration, make_index, specs_of

GIB = 2**30
MIB = 2**20
SMALL = Needs(completions=GIB, hidden=2 * GIB, memory=3 * GIB)
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TARGET))
    with (folder / "model.safetensors").open("wb") as stream:
        stream.truncate(5 * MIB)
    return folder


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A host with the given free disk, available memory and limit of the control group."""

    def make(disk: int = 1000 * GIB, available: int = 1000 * GIB, limit: str = "max") -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, disk))
        (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {available // 1024} kB\n")
        (tmp_path / "groups/job").mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups/job/memory.max").write_text(f"{limit}\n")
        (tmp_path / "own").write_text("0::/job\n")
        monkeypatch.setattr(memory, "_MEMORY", tmp_path / "meminfo")
        monkeypatch.setattr(memory, "_GROUPS", tmp_path / "groups")
        monkeypatch.setattr(memory, "_OWN_GROUPS", tmp_path / "own")

    make()
    return make


def config_of(folder: Path, **changes) -> Config:
    return configuration({"target": {"model": str(folder)}}, **changes)


def graph_of(config: Config, present: frozenset[str] = frozenset()) -> Graph:
    return Graph(config, make_index(), specs_of(config), present)


def refusal(need: Needs, config: Config, store: LocalStore) -> str:
    with pytest.raises(UserError) as caught:
        preflight(need, config, store)
    return str(caught.value)


def test_needs_by_hand(target, store):
    # 100 bytes a prompt and 24 tokens an answer; 158 prompts; 2 taps of width 32 in two bytes.
    graph = graph_of(config_of(target, generate={"max_new_tokens": 24, "samples": 3}))
    tokens = 100 + 24
    found = needs(graph, store)
    assert found.completions == 158 * 3 * tokens * 12
    assert found.hidden == 158 * 3 * tokens * 2 * 32 * 2
    assert found.memory == 2 * 50 * 3 * tokens * 2 * 32 * 2 + 2 * 5 * MIB + GIB
    assert found.disk == found.completions + found.hidden + 256 * MIB


def test_a_row_is_never_longer_than_the_context(target, store):
    assert tokens_a_row(graph_of(config_of(target, target={"context_length": 110})), store) == 110
    assert tokens_a_row(graph_of(config_of(target, generate={"max_new_tokens": 4000})), store) == 512


def test_windows_bound_what_is_there_at_once_and_held_out_states_stay(target, store):
    def hidden(**settings):
        config = config_of(target, hidden={"policy": "window", **settings})
        return needs(graph_of(config), store).hidden // (124 * 2 * 32 * 2)

    assert hidden(window_shards=1, window_lead=0) == 50 + 8
    assert hidden(window_shards=1, window_lead=1) == 50 + 40 + 8
    assert hidden(window_shards=2, window_lead=0) == 50 + 40 + 8
    assert hidden(window_shards=9, window_lead=3) == 158


def test_what_is_there_is_not_needed_again(target, store):
    graph = graph_of(config_of(target))
    everything = frozenset(
        key for shard in SIZES for stage in ("generate", "extract") for key in graph.outputs(stage, shard)
    )
    found = needs(graph_of(graph.config, everything), store)
    assert (found.completions, found.hidden) == (0, 0)


def test_the_pilot_of_these_settings_is_used_with_a_margin_and_no_other(target, store):
    graph = graph_of(config_of(target))
    store.put(graph.pilot(), canonical_json({"tokens": 400, "rows": 10}).encode())
    assert tokens_a_row(graph, store) == 1.25 * 40
    other = graph_of(config_of(target, generate={"max_new_tokens": 200}))
    assert tokens_a_row(other, store) == 300
    store.put(graph.pilot(), canonical_json({"tokens": 4000, "rows": 10}).encode())
    assert tokens_a_row(graph, store) == 124


def test_a_damaged_pilot_is_one_sentence(target, store):
    graph = graph_of(config_of(target))
    store.put(graph.pilot(), b"{")
    with pytest.raises(UserError) as caught:
        tokens_a_row(graph, store)
    assert str(caught.value) == (f"{store.path(graph.pilot())} is no readable pilot record: delete it and build again.")


def test_weights_count_in_the_arithmetic_of_the_job(target):
    assert weight_bytes(config_of(target)) == 2 * 5 * MIB
    assert weight_bytes(config_of(target, target={"dtype": "bfloat16"})) == 5 * MIB
    assert weight_bytes(config_of(target, device="cuda")) == 0
    assert weight_bytes(configuration()) == 0


def test_a_host_with_enough_says_nothing_and_the_store_is_left_empty(target, store, host, capsys):
    preflight(SMALL, config_of(target), store)
    assert capsys.readouterr() == ("", "")
    assert list(store.root.iterdir()) == []


def test_a_store_that_cannot_be_written(target, tmp_path, host):
    (tmp_path / "file").write_text("")
    url = tmp_path / "file/store"
    assert refusal(SMALL, config_of(target), LocalStore(url)) == (
        f"store: {url} cannot be written (Not a directory): choose another folder."
    )
    (tmp_path / "store").write_text("")
    assert refusal(SMALL, config_of(target), LocalStore(tmp_path / "store")) == (
        f"store: {tmp_path / 'store'} cannot be written (Not a directory): choose another folder."
    )


def test_a_target_without_weights(target, store, host):
    (target / "model.safetensors").unlink()
    assert refusal(SMALL, config_of(target), store) == (
        f"target.model: the folder {target} holds no *.safetensors: copy or convert the weights."
    )


def test_too_little_disk(target, store, host):
    host(disk=3 * GIB)
    assert refusal(SMALL, config_of(target), store) == (
        f"store: the build may write 3.2 GiB (2.0 GiB of it hidden states) but {store.url} has 3.0 GiB free: free some, "
        "take fewer prompts or taps, or set hidden.policy to window."
    )
    host(disk=SMALL.disk)
    preflight(SMALL, config_of(target), store)


def test_more_states_than_the_budget(target, store, host):
    config = config_of(target, hidden={"budget_gib": 1.5})
    assert refusal(SMALL, config, store) == (
        "hidden.budget_gib: the hidden states to come may take 2.0 GiB, over the budget of 1.5 GiB: raise it, or set "
        "hidden.policy to window or smaller windows."
    )
    preflight(SMALL, config_of(target, hidden={"budget_gib": 2}), store)


def test_more_memory_than_the_control_group_may_take_is_refused(target, store, host):
    host(limit=str(2 * GIB))
    assert refusal(SMALL, config_of(target), store) == (
        "prompts.shard_rows: one job may hold 3.0 GiB in memory but this process's control group is limited to 2.0 GiB: "
        "make shards smaller or raise the limit."
    )


def test_memory_that_is_only_not_available_now_is_a_warning(target, store, host, capsys):
    """Some virtual machines are given memory as they use it; their MemTotal is no bound either."""
    host(available=2 * GIB)
    preflight(SMALL, config_of(target), store)
    assert capsys.readouterr().err == (
        "draftmill: one job may hold 3.0 GiB in memory and this host has 2.0 GiB available now: if it can be given no "
        "more, make prompts.shard_rows smaller or stop what else runs.\n"
    )


def test_the_least_limit_of_nested_control_groups_counts(tmp_path, host):
    assert memory_limit() is None
    groups = tmp_path / "groups"
    (groups / "job/step").mkdir()
    (tmp_path / "own").write_text("0::/job/step\n")
    (groups / "job/step/memory.max").write_text("900\n")
    (groups / "job/memory.max").write_text("700\n")
    assert memory_limit() == 700
    (groups / "memory.max").write_text("500\n")
    assert memory_limit() == 500


def test_control_groups_of_the_first_version(tmp_path, host):
    (tmp_path / "own").write_text("9:cpu,cpuacct:/x\n8:memory:/docker/abc\n1:name=systemd:/x\n")
    assert memory_limit() is None
    (tmp_path / "groups/memory").mkdir()
    (tmp_path / "groups/memory/memory.limit_in_bytes").write_text("4096\n")
    assert memory_limit() == 4096


def test_a_kernel_that_does_not_say(tmp_path, host):
    (tmp_path / "meminfo").write_text("MemTotal: 1 kB\n")
    assert available_memory() is None
    for name in ("meminfo", "own"):
        (tmp_path / name).unlink()
    assert (available_memory(), memory_limit()) == (None, None)


def test_this_host_says_something():
    assert (available_memory() or 0) > 0


def test_builds_that_try_one_store_at_the_same_time_do_not_disturb_each_other(target, store, host):
    """In containers two builds may have the same pid, as they have here."""
    config, others = config_of(target), []

    class Shared(LocalStore):
        def create(self, key, data):
            if not others:
                others.append(key)
                preflight(SMALL, config, LocalStore(self.root))
            return super().create(key, data)

    preflight(SMALL, config, Shared(store.root))
    assert others
    assert store.list() == {}
