"""Whether another build is at work in a store, by the claims of its jobs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from draftmill.build_claims import myself, others_at_work
from draftmill.store.claims import SKEW_S, Claim, Holder
from draftmill.store.local import LocalStore

ELSEWHERE = Holder(1, 1, "another boot", "another namespace")


def claim(run: str, holder: Holder, expires: float = 0.0) -> bytes:
    return Claim("owner", holder, "host", run, expires).encode()


def dead() -> Holder:
    return replace(myself(), start=myself().start + 1)


# The claim as it is when the test runs, and whether it shows another build at work.
CASES: dict[str, tuple[Callable[[], bytes], bool]] = {
    "a living process of this host": (lambda: claim("other", myself()), True),
    "one of this run": (lambda: claim("mine", myself()), False),
    "a dead process of this host": (lambda: claim("other", dead(), time.time() + 9999), False),
    "another host": (lambda: claim("other", ELSEWHERE, time.time()), True),
    "another host long ago": (lambda: claim("other", ELSEWHERE, time.time() - SKEW_S - 1), False),
    "no claim": (lambda: b"?", False),
}


@pytest.mark.parametrize(("data", "found"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("stage", ["generate", "extract", "train"])
def test_who_is_at_work(tmp_path, stage, data, found):
    store = LocalStore(tmp_path)
    store.put(f"claims/{stage}/a.json", data())
    assert others_at_work(store, store.list("claims/"), "mine") is found


def test_other_objects_and_claims_that_have_gone_say_nothing(tmp_path):
    store = LocalStore(tmp_path)
    store.put("journal/generate/a", claim("other", myself()))
    assert not others_at_work(store, ["journal/generate/a", "claims/generate/gone.json"], "mine")
    assert not others_at_work(store, [], "mine")
