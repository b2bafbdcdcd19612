"""A store that goes away, is slow, overloaded or lets credentials expire, through a proxy before a real S3 service."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from draftmill.build_claims import claims_of
from draftmill.errors import UserError
from draftmill.store.claims import Claim, Holder
from draftmill.store.journal import Journal
from draftmill.store.s3 import S3Store, client_of, renew
from draftmill.store.settings import S3Settings
from tests.chaos.proxy import Proxy
from tests.s3.weed import Weed

KEY = "claims/generate/a.json"


@pytest.fixture
def proxy(weed: Weed, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    for name, value in weed.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    found = Proxy(weed.port)
    yield found
    found.close()


def store_through(proxy: Proxy, weed: Weed, wait_s: float = 60.0) -> S3Store:
    settings = S3Settings(endpoint_url=proxy.endpoint, path_style=True, retries=1, wait_s=wait_s)
    return S3Store(weed.url(f"outage-{secrets.token_hex(4)}"), settings)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["down", "overloaded", "expired"])
def test_every_request_waits_until_the_store_is_back(proxy, weed, tmp_path, mode, capfd):
    store = store_through(proxy, weed)
    journal = Journal(store, "journal/generate/a")
    journal.append([{"row": 0}])
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100_000)
    requests: list[Callable[[], object]] = [
        lambda: store.put("a", b"1"),
        lambda: store.create("b", b"2"),
        lambda: store.get("a"),
        store.list,
        lambda: store.publish("c", path),
        lambda: journal.append([{"row": 1}]),
        lambda: store.info("a"),
        lambda: store.fetch("c", tmp_path / "copy"),
        lambda: store.replace("a", b"3", b"1"),
        lambda: store.delete("b"),
    ]
    for request in requests:
        proxy.mode = mode
        back = proxy.back_once_refused()
        request()
        back.join()
    assert sorted(store.list()) == ["a", "c", *sorted(store.list("journal/"))]
    assert store.get("a") == b"3"
    assert (tmp_path / "copy").read_bytes() == path.read_bytes()
    assert [row["row"] for row in Journal(store, "journal/generate/a").rows()] == [0, 1]
    said = capfd.readouterr().err
    assert ("the credentials have expired" if mode == "expired" else "does not answer") in said
    assert "answers again after" in said


def test_a_store_that_is_down_at_the_start_is_waited_for(proxy, weed):
    proxy.mode = "down"
    store = store_through(proxy, weed)
    back = proxy.back_once_refused()
    assert store.list() == {}
    back.join()


def test_a_slow_store_is_only_slow(proxy, weed, tmp_path):
    store = store_through(proxy, weed)
    path = tmp_path / "file"
    path.write_bytes(secrets.token_bytes(200_000))
    with proxy.outage("slow"):
        store.publish("a", path)
        assert store.get("a") == path.read_bytes()


@pytest.mark.parametrize(
    ("mode", "kind", "words"),
    [
        ("down", "late", "does not answer at http://127.0.0.1"),
        ("overloaded", "late", "(503 SlowDown)"),
        ("expired", "expired", "the credentials have expired: renew them and give the same command again"),
    ],
)
def test_when_patience_ends_one_sentence_says_what_to_do(proxy, weed, mode, kind, words):
    store = store_through(proxy, weed, wait_s=0.5)
    with proxy.outage(mode), pytest.raises(UserError) as caught:
        store.put("a", b"1")
    assert caught.value.kind == kind
    assert words in str(caught.value)
    assert str(caught.value).endswith("nothing finished is lost.")
    assert "\n" not in str(caught.value)


def test_renewed_credentials_are_signed_with_from_then_on(proxy, weed, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "outdated")
    store = store_through(proxy, weed, wait_s=0.0)
    with pytest.raises(UserError, match="refuses these credentials"):
        store.put("a", b"1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", weed.environment["AWS_SECRET_ACCESS_KEY"])
    monkeypatch.setenv("AWS_SESSION_TOKEN", "new")
    held = client_of(store.settings)
    renew(store.settings)
    monkeypatch.delenv("AWS_SESSION_TOKEN")
    assert client_of(store.settings) is held
    signing = held._request_signer._credentials.get_frozen_credentials()
    assert (signing.secret_key, signing.token) == (weed.environment["AWS_SECRET_ACCESS_KEY"], "new")


# Claims on S3 ---------------------------------------------------------------------------------------------------------


def test_a_claim_on_s3_is_held_alone_and_gone_afterwards(proxy, weed):
    store = store_through(proxy, weed)
    order: list[str] = []
    first, second = (replace(claims_of(store, name), look_s=0.05, say=order.append) for name in ("1", "2"))
    done: list[int] = []

    def follow() -> None:
        with second.claimed(KEY, lambda: bool(done)) as todo:
            order.append(f"second {todo}")

    with first.claimed(KEY, lambda: bool(done)) as todo:
        assert todo
        thread = threading.Thread(target=follow)
        thread.start()
        end = time.monotonic() + 60
        while not order and time.monotonic() < end:
            time.sleep(0.01)
        done.append(1)
    thread.join(60)
    assert order[1:] == ["second False"]
    assert "works on this job: waiting for it" in order[0]
    assert store.list() == {}


def test_of_many_that_take_over_on_s3_one_succeeds(proxy, weed):
    store = store_through(proxy, weed)
    left = Claim("owner", Holder(1, 1, "boot", "ns"), "host", "run", 0.0).encode()
    store.put(KEY, left)
    won: list[int] = []

    def race(number: int) -> None:
        if store.replace(KEY, str(number).encode(), left):
            won.append(number)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(won) == 1
    assert store.get(KEY) == str(won[0]).encode()
    assert not store.replace("claims/none", b"x", b"y")
