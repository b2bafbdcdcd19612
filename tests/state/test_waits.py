"""How long GPUs wait between two jobs: short waits count, pauses and overlaps do not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.state.jobs import picture_of
from draftmill.state.read import Reader
from draftmill.state.state import state_from
from draftmill.waits import Span, waits
from tests.state.made_store import MadeStore
from tests.state.memory import Memory


def test_only_a_short_wait_for_the_same_gpu_counts() -> None:
    spans: list[Span] = [
        (("a",), 130.0, 140.0),  # 20 s behind the first
        (("a",), 100.0, 110.0),
        (("b",), 115.0, 120.0),  # the first on its GPU
        (("a", "b"), 170.0, 180.0),  # behind the last of both
        (("a",), 241.0, 250.0),  # behind a pause
        (("a",), 245.0, 260.0),  # under the one before
        (("a",), 262.0, 270.0),
        ((), 263.0, 264.0),
    ]
    assert waits(spans) == [20.0, 0.0, 0.0, 30.0, 0.0, 0.0, 2.0, 0.0]


@given(st.lists(st.tuples(st.floats(0, 500), st.floats(0, 100)), max_size=12))
def test_jobs_of_one_gpu_one_after_another_never_add_up_to_more_than_the_clock(
    steps: list[tuple[float, float]],
) -> None:
    spans, now = list[Span](), 0.0
    for gap, took in steps:
        spans.append((("a",), now + gap, now + gap + took))
        now += gap + took
    total = sum(ended - begun for _, begun, ended in spans) + sum(waits(spans))
    assert total <= now * (1 + 1e-9)


def test_the_gpu_hours_of_a_build_are_those_of_its_jobs_with_their_waits(made: MadeStore, memory: Memory) -> None:
    picture = picture_of(Reader(memory).snapshot(), made.now)
    assert picture is not None
    held = [view for view in picture.views if view.gpus and view.job.stage in ("generate", "extract", "train")]
    assert any(view.waited for view in held)
    assert all(view.waited <= 60 for view in held)
    spans = sum((view.ended or 0.0) - (view.begun or 0.0) + view.waited for view in held)
    assert state_from(picture).cost.gpu_hours == pytest.approx(spans / 3600)
