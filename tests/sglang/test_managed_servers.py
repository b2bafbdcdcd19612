"""The life of a managed server, with the real gate on a fake driver and a stand-in for SGLang."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftmill.config import Config, SglangConfig, parse
from draftmill.engines import server, server_record
from draftmill.engines.server import ManagedServer, ServerGone
from draftmill.engines.sglang_pool import Listener, Pool
from draftmill.engines.sglang_watch import Asking
from draftmill.errors import UserError
from draftmill.gpu import gate, lease, processes, reclaim
from draftmill.gpu.policy import GatePolicy
from tests.gpu_gate.conftest import Host, fake_driver, host, policy, uuid_of
from tests.sglang.fake_gpus import Driver, living
from tests.tiny import config_values
from tests.waiting import until

pytestmark = pytest.mark.slow

__all__ = ["fake_driver", "host", "policy"]
STAND_IN = Path(__file__).with_name("stand_in.py")


class Place:
    """A configuration, its gate and the stand-in's orders; jobs are taken as a job of a build takes them."""

    def __init__(self, folder: Path, policy: GatePolicy) -> None:
        self.folder, self.policy = folder, policy
        # The stand-in's name holds the test's folder, so that the driver and the sweep see only this test's.
        self.program = folder / "stand_in.py"
        self.program.write_text(STAND_IN.read_text())
        self.orders = folder / "orders.json"
        self.server: dict[str, Any] = {
            "command": [sys.executable, str(self.program), "{port}", "{model}"],
            "environment": {"STAND_IN_HOW": str(self.orders)},
            "idle_seconds": 60,
            "stop_seconds": 5,
            "start_seconds": 30,
        }

    def order(self, **how: Any) -> None:
        self.orders.write_text(json.dumps(how))

    def config(self, **changes: Any) -> Config:
        sglang = {"server": {**self.server, **changes}}
        values = config_values(
            device="cuda",
            target={"model": "target", "context_length": 512},
            generate={"engine": "sglang", "sglang": sglang},
            gate=self.policy.model_dump(),
        )
        return parse(values)

    def take(self, config: Config, run_id: str = "run-1", **more: Any) -> Any:
        spec = server.wanted(config, "model-1").spec
        how = {"gpus": 1, "stage": "generate", "shard": "s1", "server_spec": spec, **more}
        return gate.lease(config.gate, "cuda", run_id=run_id, **how)

    def job(self, config: Config, **more: Any) -> ManagedServer:
        """One job that opens its server and ends."""
        with self.take(config, **more) as held:
            return server.open_server(config, held, "model-1")

    def starts(self) -> int:
        return sum(log.read_text().count("[keeper] epoch ") for log in (self.folder / "logs/servers").glob("*.log"))

    def records(self) -> list[server_record.ServerRecord]:
        return list(server_record.records(server_record.folder(lease.lock_dir(self.policy.lock_dir))))

    def logs(self) -> str:
        return "".join(log.read_text() for log in (self.folder / "logs/servers").glob("*.log"))

    def gone(self) -> bool:
        return not living(str(self.program)) and not self.records()


@pytest.fixture
def place(host: Host, policy: GatePolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.chdir(tmp_path)
    made = Place(tmp_path, policy)
    with Driver(host, str(made.program)):
        yield made
        server.end_servers(policy)
        until(lambda: not living(str(made.program)), "the end of all servers")


def test_started_once_for_many_shards(place: Place) -> None:
    config = place.config()
    handles = [place.job(config, shard=f"s{number}") for number in range(4)]
    assert place.starts() == 1
    assert {handle.url for handle in handles} == {handles[0].url}
    assert {handle.epoch for handle in handles} == {handles[0].epoch}
    assert handles[0].uuid == uuid_of(0)
    assert handles[0].kv_tokens == 100_000
    assert handles[0].alive()
    assert handles[0].state == "ready"


@pytest.mark.slow
def test_two_lanes_have_two_servers_on_ports_apart(place: Place) -> None:
    config = place.config()
    with place.take(config) as first, place.take(config, shard="s2") as second:
        one, two = (server.open_server(config, held, "model-1") for held in (first, second))
    assert {one.uuid, two.uuid} == {uuid_of(0), uuid_of(1)}
    ports = sorted(int(handle.url.rpartition(":")[2]) for handle in (one, two))
    assert ports[1] - ports[0] >= server_record.PORT_STEP
    assert place.job(config, shard="s3").url in (one.url, two.url)


@pytest.mark.slow
def test_one_server_of_two_gpus(place: Place) -> None:
    config = place.config(gpus=2)
    handle = place.job(config, gpus=2)
    assert handle.uuid == f"{uuid_of(0)}+{uuid_of(1)}"
    (record,) = place.records()
    assert record.server is not None
    shown = (Path("/proc") / str(record.server.pid) / "environ").read_bytes().split(b"\0")
    assert b"CUDA_VISIBLE_DEVICES=0,1" in shown, "SGLang with several GPUs takes the devices for numbers"
    assert place.job(config, gpus=2, shard="s2").url == handle.url


def test_sampling_is_no_part_of_the_spec_and_flags_are(place: Place) -> None:
    config = place.config()
    first = server.wanted(config, "model-1").spec
    warmer = config.model_copy(update={"generate": config.generate.model_copy(update={"temperature": 0.1})})
    assert server.wanted(warmer, "model-1").spec == first
    assert server.wanted(config, "model-2").spec != first
    plain = place.config(command=None)
    flagged = place.config(command=None, flags={"mem-fraction-static": 0.5})
    assert server.wanted(plain, "model-1").spec != server.wanted(flagged, "model-1").spec


@pytest.mark.slow
def test_another_spec_starts_another_server(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", uuid_of(0))
    first = place.job(place.config())
    second = place.job(place.config(environment={**place.server["environment"], "CHANGED": "yes"}))
    assert place.starts() == 2
    assert not first.alive()
    assert first.state == "gone"
    assert second.alive()
    assert len(living(str(place.program))) == 1


def test_another_stage_gets_the_gpu_free(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", uuid_of(0))
    handle = place.job(place.config())
    with gate.lease(place.policy, "cuda", gpus=1, run_id="run-1", stage="extract", shard="s1") as held:
        assert held.verdict.verdict == "free"
        assert not handle.alive()
        assert place.gone()
    assert "its memory is free" in place.logs()
    with pytest.raises(ServerGone, match="is gone"):
        handle.restart("late")


def test_it_ends_when_idle(place: Place) -> None:
    handle = place.job(place.config(idle_seconds=1.0))
    assert handle.alive()
    until(place.gone, "the end of an idle server")
    assert "not used for 1 s" in place.logs()
    path = lease.device_path(lease.lock_dir(place.policy.lock_dir), uuid_of(0))
    until(lambda: not lease.is_held(path), "the end of its lease")


@pytest.mark.slow
def test_it_does_not_end_while_a_job_holds_it(place: Place) -> None:
    config = place.config(idle_seconds=0.5)
    with place.take(config) as held:
        handle = server.open_server(config, held, "model-1")
        end = time.monotonic() + 2
        until(lambda: time.monotonic() > end, "two seconds")
        assert handle.alive()
    until(place.gone, "the end of an idle server")


@pytest.mark.slow
def test_the_end_of_a_run_ends_its_servers_and_no_others(place: Place) -> None:
    config = place.config()
    with place.take(config, run_id="run-1") as one, place.take(config, run_id="run-2", shard="s2") as two:
        first, second = (server.open_server(config, held, "model-1") for held in (one, two))
        assert server.end_servers(place.policy, "run-1") == 0, "a job uses it"
    assert server.end_servers(place.policy, "run-1") == 1
    assert not first.alive()
    assert second.alive()
    # A server belongs to the run that used it last.
    place.job(config, run_id="run-3", gpus=1)
    assert server.end_servers(place.policy, "run-2") == 0
    assert server.end_servers(place.policy, "run-3") == 1


def test_a_restart_is_a_new_epoch_on_another_port(place: Place) -> None:
    config = place.config()
    with place.take(config) as held:
        old = server.open_server(config, held, "model-1")
        new = old.restart("it said !!!!")
        assert new.epoch > old.epoch
        assert new.url != old.url
        assert not old.alive()
        assert new.alive()
        assert held.attest()[uuid_of(0)]["state"] == "ours"
        again = old.restart("a second witness of the same fault")
        assert again.epoch == new.epoch, "two who see one fault cause one restart"
    assert server.attach(old.reference()).epoch == new.epoch
    assert json.loads(json.dumps(old.reference()))["kind"] == "managed"
    assert place.starts() == 2
    assert "it said !!!!" in place.logs()


@pytest.mark.slow
def test_restarts_are_used_up(place: Place) -> None:
    config = place.config(max_restarts=1)
    with place.take(config) as held:
        handle = server.open_server(config, held, "model-1").restart("once")
        with pytest.raises(UserError, match=r"restarted 1 times within an hour and is sick again \(twice\)"):
            handle.restart("twice")


def test_a_killed_server_comes_back_when_asked(place: Place) -> None:
    config = place.config()
    with place.take(config) as held:
        handle = server.open_server(config, held, "model-1")
        (record,) = place.records()
        assert record.server is not None
        processes.signal_process(record.server, signal.SIGKILL)
        until(lambda: handle.state == "dead", "the keeper to notice")
        assert not handle.alive()
        assert handle.restart("connection refused").alive()


@pytest.mark.slow
def test_a_server_that_died_between_two_jobs_is_started_again(place: Place) -> None:
    config = place.config()
    first = place.job(config)
    (record,) = place.records()
    assert record.server is not None
    processes.signal_process(record.server, signal.SIGKILL)
    until(lambda: first.state == "dead", "the keeper to notice")
    second = place.job(config, shard="s2")
    assert second.alive()
    assert (second.token, second.epoch > first.epoch) == (first.token, True)


@pytest.mark.slow
def test_a_job_killed_before_the_hand_over_leaves_no_lease_behind(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = place.config()
    job = os.fork()
    if job == 0:
        monkeypatch.setattr(gate.Lease, "hand_over", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        try:
            place.job(config)
        finally:
            os._exit(0)
    os.waitpid(job, 0)
    path = lease.device_path(lease.lock_dir(place.policy.lock_dir), uuid_of(0))
    until(lambda: not lease.is_held(path), "the keeper to see that it holds nothing")
    assert place.gone()


@pytest.mark.slow
def test_a_killed_server_that_nobody_uses_is_left(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftmill.engines import keeper

    # The keeper is another process; what matters here is that the limit is there at all and short.
    assert keeper._DEAD_S <= 60
    place.job(place.config(idle_seconds=3.0))
    (record,) = place.records()
    assert record.server is not None
    processes.signal_process(record.server, signal.SIGKILL)
    until(place.gone, "the keeper's end")


def test_a_killed_keeper_takes_its_server_along(place: Place) -> None:
    handle = place.job(place.config())
    (record,) = place.records()
    processes.signal_process(record.keeper, signal.SIGKILL)
    until(lambda: not living(str(place.program)), "the end of the server")
    assert handle.state == "gone"
    folder = lease.lock_dir(place.policy.lock_dir)
    until(lambda: not lease.is_held(lease.device_path(folder, uuid_of(0))), "the end of the lease")
    assert not place.records(), "what the killed keeper wrote is believed no more"
    fresh = place.job(place.config(), shard="s2")
    assert fresh.alive()
    folder = server_record.folder(lease.lock_dir(place.policy.lock_dir))
    assert [file.name for file in folder.glob("*.server.json")] == [f"{fresh.token}.server.json"]
    assert not reclaim.find(place.policy).processes


def test_the_end_of_the_log_is_in_the_error(place: Place) -> None:
    place.order(die="Loaded weights leave no GPU memory for the KV cache")
    with pytest.raises(UserError) as failed:
        place.job(place.config())
    text = str(failed.value)
    assert "did not start (it ended by itself with status 1)" in text
    assert "| Loaded weights leave no GPU memory" in text
    assert "logs/servers/" in text
    until(place.gone, "the keeper's end")


@pytest.mark.slow
def test_a_server_that_never_answers_is_given_up_at_its_deadline(place: Place) -> None:
    place.order(mute=True)
    with pytest.raises(UserError, match=r"after 6 s .* does not|after 6 s .*replies 500"):
        place.job(place.config(start_seconds=6))
    until(place.gone, "the keeper's end")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"model": "elsewhere/other"}, "serves elsewhere/other, but target.model is target"),
        ({"context": 128}, "takes rows of 128 tokens, but the configuration means 512"),
        ({"kv_tokens": 300}, "has a KV cache of 300 tokens, less than 512"),
    ],
)
def test_a_server_that_is_not_what_it_should_be_is_refused(place: Place, how: dict[str, Any], says: str) -> None:
    place.order(**how)
    with pytest.raises(UserError, match=says):
        place.job(place.config())
    until(place.gone, "the keeper's end")


def test_a_server_that_is_full_of_rows_is_asked_for_none_by_the_next_job(place: Place) -> None:
    """A prompt would wait behind thousands of rows, and the server would be ended as one that does not answer."""
    place.order(full=1)
    config = place.config(start_seconds=20)
    first = place.job(config)
    second = place.job(config, shard="s2")
    assert (second.url, second.epoch, second.kv_tokens) == (first.url, first.epoch, 100_000)
    assert second.alive()
    assert place.starts() == 1


def test_each_epoch_is_proven_by_a_first_answer(place: Place) -> None:
    place.order(full=1)
    folder = server_record.folder(lease.lock_dir(place.policy.lock_dir))
    config = place.config()
    with place.take(config) as held:
        old = server.open_server(config, held, "model-1")
        assert server_record.proven(folder, old.token) == old.epoch
        new = old.restart("it is sick")
    assert server_record.proven(folder, new.token) == new.epoch > old.epoch
    server.end_servers(place.policy)
    until(place.gone, "the end of the server")
    assert server_record.proven(folder, new.token) is None


def test_a_lane_that_finds_its_server_loading_waits_for_it(place: Place) -> None:
    """As after the death of the lane that had asked for a restart: another one would end what is half loaded."""
    with place.take(config := place.config()) as held:
        old = server.open_server(config, held, "model-1")
        place.order(delay=3)
        server_record.ask_restart(Path(old.place), old.token, old.epoch, "it was sick")
        until(lambda: place.starts() == 2 and old.state == "restarting", "the restart")
        loading = server.attach(old.reference())
        assert server_record.proven(Path(old.place), old.token) == old.epoch < loading.epoch
        found = asyncio.run(_states_of(loading))
        assert found == ["starting", "serving"]
        assert server_record.proven(Path(old.place), old.token) == loading.epoch
    assert place.starts() == 2
    (record,) = place.records()
    assert [why for _, why in record.restarts] == ["it was sick"]


async def _states_of(handle: ManagedServer) -> list[str]:
    """The states that a server goes through in a lane until it serves or is lost."""
    over = asyncio.Event()
    listener = Listener(changed=over.set, lost=lambda uuid, error: over.set())
    pool = Pool(Asking(SglangConfig(), (7,), lambda _, found: found, (1, 2, 3), 16), listener)
    pool.add(handle)
    (watched,) = pool.servers.values()
    states = [watched.state]
    try:
        await asyncio.wait_for(over.wait(), 60)
        return [*states, watched.state]
    finally:
        await pool.close()


def test_a_record_that_cannot_be_read_now_is_no_dead_server(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as when this process is out of open files: a healthy server would be restarted for it."""
    handle = place.job(place.config())
    monkeypatch.setattr(server_record, "read", lambda *_: None)
    assert handle.alive()
    server_record.path(Path(handle.place), handle.token).unlink()
    assert not handle.alive()


@pytest.mark.slow
def test_a_job_killed_during_the_start_costs_no_second_start(place: Place) -> None:
    place.order(delay=3)
    config = place.config()
    job = os.fork()
    if job == 0:
        try:
            place.job(config)
        finally:
            os._exit(0)
    until(lambda: bool(place.records()), "the keeper's record")
    until(lambda: lease.current(lease.lock_dir(place.policy.lock_dir), uuid_of(0)) is not None, "the lease")
    folder = lease.lock_dir(place.policy.lock_dir)
    until(
        lambda: (r := lease.read_record(lease.device_path(folder, uuid_of(0)))) is not None and r.kind == "server",
        "the keeper to hold the lease",
    )
    os.kill(job, signal.SIGKILL)
    os.waitpid(job, 0)
    assert place.job(config, shard="s2").alive()
    assert place.starts() == 1


def test_a_server_at_a_url_must_be_the_one_meant(place: Place, tmp_path: Path) -> None:
    ports = [port for port in server_record.candidate_ports(41000) if server_record.bindable(port)][:2]
    url = f"http://127.0.0.1:{ports[0]}"
    process = subprocess.Popen([sys.executable, str(place.program), str(ports[0]), "org/model"])
    config = place.config()

    def of(model: str, **target: Any) -> Config:
        sglang = config.generate.sglang.model_copy(update={"urls": [url]})
        generate = config.generate.model_copy(update={"sglang": sglang})
        section = config.target.model_copy(update={"model": model, **target})
        return config.model_copy(update={"generate": generate, "target": section})

    try:
        until(lambda: not server_record.bindable(ports[0]), "the server")
        from draftmill.engines.server_checks import check_urls

        until(lambda: _answers(url), "an answer")
        check_urls(of("org/model"), [url], patience_s=0)
        with pytest.raises(UserError, match=r"serves org/model, but target.model is org/other"):
            check_urls(of("org/other"), [url], patience_s=0)
        with pytest.raises(UserError, match=r"revision unknown .* start it with --revision abc"):
            check_urls(of("org/model", revision="abc"), [url], patience_s=0)
        with pytest.raises(UserError, match=r"takes rows of 512 tokens, but the configuration means 4096"):
            check_urls(of("org/model", context_length=4096), [url], patience_s=0)
    finally:
        process.kill()
        process.wait()
    with pytest.raises(UserError, match="cannot be reached"):
        check_urls(of("org/model"), [url], patience_s=0)


def _answers(url: str) -> bool:
    from draftmill.engines.server_checks import NotYet, ask

    try:
        return bool(ask(f"{url}/server_info"))
    except NotYet:
        return False
