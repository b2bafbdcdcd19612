"""A state on one terminal screen.

Texts from the store may be hostile: they are shown with their control characters spelt out and never read as markup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from draftmill.audit.text import visible
from draftmill.state import words
from draftmill.state.types import Failure, Lane, Stage, State

_LANES, _FAILURES, _MESSAGE = 16, 5, 160
_STYLES = {
    "running": "green",
    "idle": "dim",
    "stale": "yellow",
    "lost": "red",
    "failed": "red",
}


@dataclass(frozen=True)
class Column:
    """A column of a table: its cell of a row, always a Text or a bar, and the screen width from which it is shown."""

    title: str
    cell: Callable[[Any], RenderableType]
    right: bool = False
    wraps: bool = False
    from_width: int = 0


def screen(state: State, width: int) -> RenderableType:
    """The state as something that rich prints on a screen so many characters wide."""
    parts: list[RenderableType] = [_head(state), _table(_STAGE_COLUMNS, state.stages, width)]
    if state.lanes:
        parts += [_lanes(state, width)]
    if state.failures:
        parts += [_failures(state)]
    parts += [Text(visible(note), style="yellow") for note in state.notes]
    return Group(*parts)


def _head(state: State) -> Text:
    plan = state.plan
    what = f"{words.number(plan.prompts)} prompts in {plan.shards} shards" if plan.shards is not None else "no totals"
    lines = [f"{visible(state.store)}   {what}   {datetime.fromtimestamp(state.now):%H:%M:%S}"]
    lines.append("finished" if state.finished else f"time left  {words.whole_eta(state.eta)}")
    lines += [line for line in (_cost(state), _lag(state)) if line]
    return Text("\n".join(lines) + "\n")


def _cost(state: State) -> str:
    cost = state.cost
    if not cost.gpu_hours:
        return ""
    text = f"GPU-hours  {words.number(cost.gpu_hours)} so far"
    if cost.expected_low is not None and cost.expected_high is not None:
        text += f", {words.number(cost.expected_low)} to {words.number(cost.expected_high)} expected"
    if cost.spent is not None:
        text += f"   cost  {cost.spent:,.2f} so far"
        if cost.total_low is not None and cost.total_high is not None:
            text += f", {cost.total_low:,.2f} to {cost.total_high:,.2f} expected"
    return text


def _lag(state: State) -> str:
    lag = state.lag
    if not lag.jobs or lag.oldest is None:
        return ""
    return f"not yet in the store  {lag.jobs} finished jobs, the oldest for {words.duration(lag.oldest)}"


_STAGE_COLUMNS = (
    Column("stage", lambda one: Text(one.name)),
    Column("", lambda one: _bar(one)),
    Column("jobs", lambda one: Text(f"{one.jobs.done:,}/{words.number(one.jobs.wanted)}"), right=True),
    Column("now", lambda one: _at_work(one), right=True),
    Column("failed", lambda one: Text(f"{one.jobs.failed or ''}", style="red"), right=True),
    Column("useful", lambda one: _if_told(one, one.rows.useful), right=True),
    Column("rejected", lambda one: _if_told(one, one.rows.rejected), right=True, from_width=100),
    Column("tokens/s", lambda one: Text(words.number(one.token_rate.minute)), right=True),
    Column("1 h", lambda one: Text(words.number(one.token_rate.hour)), right=True, from_width=120),
    Column("all", lambda one: Text(words.number(one.token_rate.all)), right=True, from_width=120),
    Column("trained/s", lambda one: Text(words.number(one.trained_rate.hour)), right=True, from_width=110),
    Column("time left", lambda one: _time_left(one), wraps=True),
)
_LANE_COLUMNS = (
    Column("lane", lambda lane: _safe(lane.gpu[:12] if lane.gpu is not None else f"pid {lane.pid}")),
    Column("host", lambda lane: _safe(lane.host), from_width=90),
    Column("state", lambda lane: Text(lane.state, style=_STYLES[lane.state])),
    Column("stage", lambda lane: _safe(lane.stage)),
    Column("shard", lambda lane: _safe(lane.subject)),
    Column("done", lambda lane: _safe(f"{lane.done}/{lane.total} {lane.unit}")),
    Column("tokens/s", lambda lane: Text(_lane_rate(lane)), right=True),
    Column("heard", lambda lane: Text(f"{words.duration(lane.age)} ago")),
    Column("server", lambda lane: _safe((lane.server and lane.server.state) or ""), from_width=110),
    Column("gate", lambda lane: _safe(_gate(lane)), from_width=110, wraps=True),
)


def _table(columns: Sequence[Column], rows: Iterable[Any], width: int, title: str | None = None) -> Table:
    shown = [column for column in columns if width >= column.from_width]
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for column in shown:
        table.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=not column.wraps,
            overflow="fold" if column.wraps else "ellipsis",
        )
    for row in rows:
        table.add_row(*(column.cell(row) for column in shown))
    return table


def _bar(stage: Stage) -> ProgressBar:
    """Jobs done and, of those at work, their share of rows."""
    jobs, rows = stage.jobs, stage.rows
    wanted = max(jobs.wanted or 0, 1)
    by_rows = words.share(rows.done, rows.wanted) * wanted
    return ProgressBar(total=wanted, completed=min(max(by_rows, jobs.done), wanted), width=10)


def _at_work(stage: Stage) -> Text:
    jobs = stage.jobs
    return Text(f"{jobs.running or ''}", style="yellow" if jobs.stale else "")


def _if_told(stage: Stage, value: int) -> Text:
    return Text(words.number(value) if stage.name in ("generate", "audit") else "")


def _time_left(stage: Stage) -> Text:
    return Text(words.eta(stage.eta), style="" if stage.eta.low is not None else "dim")


def _lane_rate(lane: Lane) -> str:
    return words.number(lane.tokens_per_second) if lane.state == "running" else ""


def _gate(lane: Lane) -> str:
    return ", ".join([lane.gate.verdict, *lane.gate.reasons]) if lane.gate is not None else ""


def _lanes(state: State, width: int) -> Group:
    more = len(state.lanes) - _LANES
    table = _table(_LANE_COLUMNS, state.lanes[:_LANES], width, "\nlanes")
    return Group(table, Text(f"and {more} more")) if more > 0 else Group(table)


def _failures(state: State) -> Group:
    lines: list[RenderableType] = [Text(f"\nlast failures ({len(state.failures)})", style="bold red")]
    for failure in state.failures[:_FAILURES]:
        lines += _failure(failure, state.now)
    return Group(*lines)


def _failure(failure: Failure, now: float) -> list[RenderableType]:
    where = f" on {_plain(failure.host)}" if failure.host else ""
    what = f"{failure.stage} {_plain(failure.subject)}{where}, {words.duration(now - failure.at)} ago"
    again = " (at work again)" if failure.running_again else ""
    said = f": {_plain(failure.message)}" if failure.message else ""
    return [Text(f"  {what}{again}{said}"), Text(f"    {_plain(failure.command)}", style="dim")]


def _plain(text: str) -> str:
    one = " ".join(visible(text[: 4 * _MESSAGE]).split())
    return one if len(one) <= _MESSAGE else one[: _MESSAGE - 1] + "…"


def _safe(text: str) -> Text:
    return Text(_plain(text))
