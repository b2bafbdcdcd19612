"""Claims: one holder at a time, free again when the holder is gone, and never in the way of finished work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.build_claims import others_at_work
from draftmill.store.claims import SKEW_S, Claim, Claims, Holder, vacant
from draftmill.store.local import LocalStore
from tests.waiting import until

KEY = "claims/generate/a.json"
HERE = Holder(1, 1, "boot", "ns")
ELSEWHERE = Holder(2, 2, "other boot", "ns")


class Host:
    """A host whose processes live and die as the test says, with a clock that sleeping moves."""

    def __init__(self, store: LocalStore) -> None:
        self.store, self.now, self.said, self.dead = store, 1000.0, [], set()
        self.on_sleep = lambda: None

    def alive(self, holder: Holder) -> bool | None:
        return None if holder.boot != "boot" else holder.pid not in self.dead

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_sleep()

    def claims(self, me: Holder = HERE, run: str = "me") -> Claims:
        return Claims(
            self.store,
            run,
            me,
            self.alive,
            say=self.said.append,
            clock=lambda: self.now,
            sleep=self.sleep,
        )

    def put(self, claim: Claim) -> None:
        self.store.put(KEY, claim.encode())

    def read(self) -> Claim | None:
        try:
            return Claim.decode(self.store.get(KEY))
        except KeyError:
            return None


@pytest.fixture
def host(tmp_path) -> Host:
    return Host(LocalStore(tmp_path))


def other(expires: float, holder: Holder = ELSEWHERE) -> Claim:
    return Claim("other", holder, "there", "theirs", expires)


def test_a_claim_is_held_inside_and_gone_outside(host):
    done = []
    with host.claims().claimed(KEY, lambda: bool(done)) as todo:
        assert todo
        assert host.read().run == "me"
        done.append(1)
    assert host.read() is None


def test_a_failed_job_keeps_no_claim(host):
    with pytest.raises(ZeroDivisionError), host.claims().claimed(KEY, lambda: False):
        1 / 0  # noqa: B018
    assert host.read() is None


def test_finished_work_is_not_done_again(host):
    with host.claims().claimed(KEY, lambda: True) as todo:
        assert not todo
    assert host.read() is None


def test_a_dead_holder_of_this_host_is_followed_at_once(host):
    host.put(other(host.now + 10_000, replace(HERE, pid=5)))
    host.dead.add(5)
    with host.claims().claimed(KEY, lambda: False) as todo:
        assert todo
    assert host.now == 1000.0


def test_a_living_holder_of_this_host_is_waited_for_however_old_its_claim(host):
    host.put(other(0.0, replace(HERE, pid=5)))
    host.on_sleep = lambda: host.store.delete(KEY) if host.now > 50_000 else None
    with host.claims().claimed(KEY, lambda: host.now > 50_000) as todo:
        assert not todo
    assert host.said[0] == "Another build (there, run theirs) works on this job: waiting for it."


def test_a_renewed_claim_of_another_host_is_waited_for(host):
    host.put(other(host.now))

    def renew() -> None:
        host.put(other(host.now)) if host.now < 5000 else host.store.delete(KEY)

    host.on_sleep = renew
    with host.claims().claimed(KEY, lambda: host.now >= 5000) as todo:
        assert not todo
    assert host.now >= 5000


@pytest.mark.parametrize("skew", [-500.0, 0.0, 500.0])
def test_a_claim_that_nobody_renews_is_taken_over_whatever_its_clock(host, skew):
    host.put(other(host.now + skew))
    with host.claims().claimed(KEY, lambda: False) as todo:
        assert todo
        assert host.read().run == "me"
    assert 100 < host.now - 1000 < 140


def test_time_without_the_store_does_not_age_a_claim(host):
    """An hour of outage between two looks: the holder could not renew either, and gets its whole time again."""
    host.put(other(host.now + 7200))
    jumps = [3600.0]

    def outage() -> None:
        host.now += jumps.pop() if jumps else 0.0

    host.on_sleep = outage
    with host.claims().claimed(KEY, lambda: False) as todo:
        assert todo
    assert 3700 < host.now - 1000 < 3800


def test_only_a_claim_that_ran_out_long_ago_is_free_at_one_look(host):
    assert vacant(other(1.0), host.alive, 1.0 + SKEW_S + 1)
    assert not vacant(other(1.0), host.alive, 1.0 + SKEW_S - 1)


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff", b'{"owner": 1}', b"[" * 200_000])
def test_what_is_no_claim_binds_nobody(host, data):
    host.store.put(KEY, data)
    with host.claims().claimed(KEY, lambda: False) as todo:
        assert todo


WRONG = [
    *({"expires": value} for value in (None, "1", True, [], float("nan"), float("inf"), 10**400)),
    *({name: value} for name in ("owner", "host", "run") for value in (None, 1, ["x"])),
    *({"holder": {name: value}} for name in ("pid", "start") for value in (None, 1.5, True, "1")),
    *({"holder": {name: value}} for name in ("boot", "namespace") for value in (1, False, {})),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: str(wrong)[:40])
def test_fields_of_other_types_make_no_claim(host, wrong):
    value = asdict(other(host.now + 10_000))
    holder = {**value["holder"], **wrong.get("holder", {})}
    host.store.put(KEY, json.dumps({**value, **wrong, "holder": holder}).encode())
    assert host.read() is None
    assert not others_at_work(host.store, [KEY], "me")
    with host.claims().claimed(KEY, lambda: False) as todo:
        assert todo
    assert host.now == 1000.0


def test_a_claim_that_was_taken_over_is_left_to_its_new_holder(host):
    with host.claims().claimed(KEY, lambda: False):
        host.put(other(host.now + 60))
    assert host.read().run == "theirs"


def test_a_rival_is_whoever_else_holds_the_claim_and_keeps_it_up(host):
    rival = host.claims().rival(KEY)
    assert not rival()
    host.store.put(KEY, b"no claim")
    assert not rival()
    host.put(Claim("mine", HERE, "here", "me", host.now))
    assert not rival(), "this process itself"
    host.put(other(host.now + 10_000, replace(HERE, pid=5)))
    assert rival()
    host.dead.add(5)
    assert not rival()
    for _ in range(300):  # of another host, renewed
        host.now += 1
        host.put(other(host.now + 120))
        assert rival()
    held = []
    for _ in range(200):  # and left
        host.now += 1
        held.append(rival())
    assert held.index(False) in range(115, 126)


def test_renewing_moves_the_end_and_stops_when_the_claim_is_another_s(host):
    claims = host.claims()
    mine = claims._mine()
    host.put(mine)
    host.now += 50
    assert claims.renew(KEY, mine)
    assert host.read().expires == host.now + claims.lasts_s
    host.put(other(host.now))
    assert not claims.renew(KEY, mine)
    host.store.delete(KEY)
    assert not claims.renew(KEY, mine)


def test_a_store_that_fails_while_renewing_does_not_fail_the_job(host, monkeypatch):
    claims = replace(host.claims(), lasts_s=0.03)

    def away(*arguments):
        raise ConnectionResetError

    with claims.claimed(KEY, lambda: False):
        monkeypatch.setattr(LocalStore, "get", away)
        until(lambda: any("was not renewed" in text for text in host.said), "the sentence")


def test_what_is_deleted_while_it_is_replaced_does_not_come_back(tmp_path, monkeypatch):
    """A keeper's last renewal has compared and not yet written when the job lets its claim go."""
    store, get = LocalStore(tmp_path), LocalStore.get
    store.put(KEY, b"mine")
    letting_go = threading.Thread(target=store.delete, args=(KEY,))

    def compared(self, key):
        data = get(self, key)
        letting_go.start()
        letting_go.join(0.3)  # it must not get through here, however long it has
        return data

    monkeypatch.setattr(LocalStore, "get", compared)
    assert store.replace(KEY, b"renewed", b"mine")
    letting_go.join()
    assert store.info(KEY) is None


def test_of_many_racers_one_works_at_a_time(tmp_path):
    store, working, most, finished = LocalStore(tmp_path), [0], [0], []
    lock = threading.Lock()

    def race(number: int) -> None:
        me = Holder(number, 1, "boot", "ns")
        claims = Claims(store, str(number), me, lambda holder: True, say=lambda text: None, look_s=0.001)
        with claims.claimed(KEY, lambda: bool(finished)) as todo:
            if todo:
                with lock:
                    working[0] += 1
                    most[0] = max(most[0], working[0])
                finished.append(number)
                with lock:
                    working[0] -= 1

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (most, len(finished)) == ([1], 1)
    assert store.list() == {}


def test_of_many_that_take_over_one_succeeds(tmp_path):
    store = LocalStore(tmp_path)
    old = other(0.0).encode()
    store.put(KEY, old)
    won = []
    threads = [
        threading.Thread(target=lambda n=n: store.replace(KEY, str(n).encode(), old) and won.append(n))
        for n in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(won) == 1
    assert store.get(KEY) == str(won[0]).encode()


def test_the_claim_of_a_killed_process_is_free(tmp_path):
    """A real process that holds a claim for an hour and is killed."""
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from draftmill.build_claims import claims_of\n"
        "from draftmill.store.local import LocalStore\n"
        "claims = claims_of(LocalStore(Path(sys.argv[1])), 'killed')\n"
        f"with claims.claimed({KEY!r}, lambda: False):\n"
        "    print('held', flush=True); time.sleep(3600)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    from draftmill.build_claims import claims_of

    store = LocalStore(tmp_path)
    claims = replace(claims_of(store, "next"), look_s=0.05)
    claim = Claim.decode(store.get(KEY))
    assert claims.alive(claim.holder) is True
    holder.kill()
    holder.wait()
    assert claims.alive(claim.holder) is False
    with claims.claimed(KEY, lambda: False) as todo:
        assert todo
        assert Claim.decode(store.get(KEY)).holder.pid == os.getpid()
    assert claims.alive(replace(claim.holder, boot="another")) is None


def test_sweeping_removes_what_binds_nobody_and_a_run_s_own(host):
    keys = [f"claims/generate/{name}.json" for name in "abcde"]
    held = [
        other(host.now + 60),
        replace(other(host.now + 60), run="me"),
        other(0.0, replace(HERE, pid=9)),
        other(0.0),
    ]
    for key, claim in zip(keys, held, strict=False):
        host.store.put(key, claim.encode())
    host.dead.add(9)
    assert host.claims().sweep(keys, "me") == keys[1:4]
    assert sorted(host.store.list()) == keys[:1]


@pytest.mark.parametrize("sweeper", [replace(HERE, pid=7), replace(ELSEWHERE, pid=7)], ids=["here", "elsewhere"])
@pytest.mark.parametrize("step", ["replace", "delete"])
def test_sweeping_takes_no_claim_from_one_who_came_meanwhile(host, monkeypatch, step, sweeper):
    """Somebody who waits for the vacant claim looks at it between any two steps of the sweep."""
    host.put(other(0.0))
    real, taken = getattr(LocalStore, step), []

    class Waits(Exception):
        pass

    def wait() -> None:
        raise Waits

    def between(store, *arguments):
        monkeypatch.setattr(LocalStore, step, real)
        host.on_sleep = wait
        with suppress(Waits):
            taken.append(host.claims()._wait_for(KEY))
        return real(store, *arguments)

    monkeypatch.setattr(LocalStore, step, between)
    swept = host.claims(sweeper).sweep([KEY])
    assert ([host.read()], swept) == ((taken, []) if taken else ([None], [KEY]))
    assert bool(taken) is (step == "replace")


def test_a_sweep_that_is_killed_half_way_binds_nobody(host, monkeypatch):
    host.put(other(0.0))
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "delete", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            host.claims(replace(HERE, pid=7)).sweep([KEY])
    host.dead.add(7)
    assert host.claims().sweep([KEY]) == [KEY]


texts = st.text(max_size=8)
holders = st.builds(Holder, st.integers(), st.integers(), st.none() | texts, st.none() | texts)


@given(st.builds(Claim, texts, holders, texts, texts, st.floats(allow_nan=False, allow_infinity=False)))
def test_a_claim_survives_its_encoding(claim):
    assert Claim.decode(claim.encode()) == claim
    assert json.loads(claim.encode())["run"] == claim.run
