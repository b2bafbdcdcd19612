"""Looks at a server: what a server that goes away looks like, which of several are there, and a load that is too high."""

import contextlib
import os
import socket
import threading

import pytest

from draftmill.config import parse
from draftmill.engines import server_checks
from draftmill.engines.server_checks import NotYet, ask, check_urls, crowded, prove
from draftmill.errors import UserError
from tests.sglang.servers import OwnServer, start
from tests.tiny import config_values

NOWHERE = "http://127.0.0.1:9"
EXPECTED = {"model": "model", "revision": None, "context": 512, "kv_tokens": 512}


def config(**sglang):
    generate = {"engine": "sglang", "sglang": sglang}
    return parse(config_values(target={"model": "model", "context_length": 512}, generate=generate))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    server = OwnServer(tmp_path_factory.mktemp("small") / "record")
    yield server
    server.kill()


@contextlib.contextmanager
def dying(reply):
    """A server that sends `reply` to whoever asks and is gone in the middle of it."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        over = threading.Event()

        def work():
            while not over.is_set():
                end, _ = listening.accept()
                with end:
                    end.recv(65536)
                    end.sendall(reply)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        yield url
        over.set()
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", listening.getsockname()[1])).close()
        thread.join(10)


TORN = b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{"


@pytest.mark.parametrize("reply", [TORN, b"", TORN[:25], b"nonsense\r\n\r\n"])
def test_a_server_that_dies_in_the_middle_of_a_reply_is_not_there_yet(reply):
    with dying(reply) as url, pytest.raises(NotYet):
        prove(url, EXPECTED, first=True)


@pytest.mark.parametrize("reply", [TORN, b"", b"nonsense\r\n\r\n"])
def test_a_torn_reply_is_none(reply):
    with dying(reply) as url, pytest.raises(NotYet):
        ask(f"{url}/server_info")


def test_only_the_first_proof_asks_for_an_answer(small):
    server = OwnServer(small.record, "--mode", "500")
    try:
        assert prove(server.url, EXPECTED, first=False).running == 512
        with pytest.raises(NotYet):
            prove(server.url, EXPECTED, first=True)
    finally:
        server.kill()
    assert prove(small.url, EXPECTED, first=True).kv_tokens == 10**6


def test_a_server_that_is_away_is_left_to_later_jobs_while_another_answers(small):
    said = []
    assert check_urls(config(), [NOWHERE, small.url], patience_s=600, say=said.append) == [small.url]
    assert len(said) == 1
    assert f"{NOWHERE}/server_info cannot be reached" in said[0]


def test_a_server_that_serves_something_else_is_refused_whatever_the_others_do(small):
    other = OwnServer(small.record, "--model", "other/one")
    try:
        with pytest.raises(UserError, match=r"serves other/one, but target\.model is model"):
            check_urls(config(), [NOWHERE, small.url, other.url], patience_s=600)
    finally:
        other.kill()


def test_when_no_server_answers_they_are_waited_for(tmp_path, monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    looks, made = [], []

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            made.append(start(tmp_path / "record", port=port)[0])

    monkeypatch.setattr(server_checks.time, "sleep", sleep)
    said, url = [], f"http://127.0.0.1:{port}"
    try:
        assert check_urls(config(), [NOWHERE, url], patience_s=600, say=said.append) == [url]
    finally:
        for process in made:
            process.kill()
            process.wait()
    assert len(looks) == 3
    assert "waiting up to 600 s" in said[0]


def test_when_none_comes_in_time_the_job_ends():
    with pytest.raises(UserError, match=r"urls: http://127.0.0.1:9/server_info cannot be reached .*: start it"):
        check_urls(config(), [NOWHERE], patience_s=0.1)


def test_a_load_far_above_what_the_server_runs_is_said(small):
    assert crowded(512, 512) == crowded(512, 400) == crowded(512, 0) == ""
    assert "in_flight is 512 and the server runs at most 80" in crowded(512, 80)
    said = []
    check_urls(config(in_flight=2000), [small.url], patience_s=0, say=said.append)
    assert ["runs at most 512" in words for words in said] == [True]


def test_a_process_without_a_file_left_says_nothing_of_a_server(small, monkeypatch):
    """It would be restarted for what the client lacks."""
    import asyncio
    import errno

    from draftmill.engines.sglang_wire import Wire

    def none_left(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def work():
        wire = Wire(small.url)
        try:
            monkeypatch.setattr(socket, "socket", none_left)
            return await wire.reachable()
        finally:
            monkeypatch.undo()
            await wire.close()

    assert asyncio.run(work()) is True


def test_a_server_s_first_canary_is_waited_for_as_long_as_any_other(monkeypatch):
    """A server of several that others keep busy had a minute, and the job ended."""
    import asyncio
    from types import SimpleNamespace

    from draftmill.engines.sglang_api import FixedServer
    from draftmill.engines.sglang_watch import Asking, Watched

    asking = Asking(config(patience_seconds=500.0).generate.sglang, (7,), lambda request, result: result, (1, 2), 16)
    patience = []

    async def work():
        watched = Watched(FixedServer(NOWHERE), asking, SimpleNamespace(changed=lambda: None))

        async def silent():
            return False

        async def wait(reason, patience_s):
            patience.append(patience_s)

        monkeypatch.setattr(watched, "_open", silent)
        monkeypatch.setattr(watched, "_bring_back", wait)
        await watched._begin()
        await watched.close()

    asyncio.run(work())
    assert patience == [500.0]
