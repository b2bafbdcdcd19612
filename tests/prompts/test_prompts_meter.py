"""Progress is shown only where it takes long, as a bar on a terminal and as lines elsewhere."""

import io

import pytest

from draftmill.errors import UserError
from draftmill.prompts import meter as meter_module
from draftmill.prompts.meter import Meter


class Stream(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands until it is set."""
    now = [100.0]
    monkeypatch.setattr(meter_module.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("terminal", [False, True])
def test_what_is_quick_is_silent(clock, terminal):
    stream = Stream(terminal)
    with Meter(stream) as meter:
        for done in range(100):
            clock[0] += 0.02
            meter("reading", done, 100)
    assert stream.getvalue() == ""


def test_lines_come_now_and_then(clock):
    stream = Stream(False)
    with Meter(stream) as meter:
        for done in range(40):
            clock[0] += 1
            meter("reading" if done < 20 else "writing", done % 20, 20)
    assert stream.getvalue().splitlines() == [
        "draftmill: reading prompts: 10%",
        "draftmill: reading prompts: 85%",
        "draftmill: writing prompt shards: 60%",
    ]


def test_a_terminal_gets_a_bar_that_is_gone_at_the_end(monkeypatch):
    monkeypatch.setattr(meter_module, "_SILENT_S", 0.0)
    stream = Stream(True)
    with Meter(stream) as meter:
        meter("reading", 1, 4)
        meter("writing", 1, 4)
        assert meter._bar is not None
    assert not meter._bar.live.is_started
    assert "reading prompts" in stream.getvalue()
    assert "writing prompt shards" in stream.getvalue()


def failing(meter):
    meter("reading", 1, 4)
    raise UserError("A file is gone.")


def test_a_bar_ends_with_a_fault(monkeypatch):
    monkeypatch.setattr(meter_module, "_SILENT_S", 0.0)
    meter = Meter(Stream(True))
    with pytest.raises(UserError), meter:
        failing(meter)
    assert not meter._bar.live.is_started
