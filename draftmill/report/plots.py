"""The plots, as plotly figures in the page's light colours; the page's script swaps them for the dark ones.

Texts from outside are escaped here: plotly reads a little HTML, links among it, in every label.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from draftmill.audit.counts import Counts
from draftmill.audit.histogram import histogram
from draftmill.audit.sentences import percent
from draftmill.audit.text import visible
from draftmill.report.inputs import Acceptance, Decoder, Epoch, Interval, Position, Window
from draftmill.report.words import number, plural

TEXT, DIM, GRID, DRAFTER, LOOKUP, CUT, FAINT = (
    "#1c1f24",
    "#626a75",
    "#d9dce1",
    "#2f6fbd",
    "#c2701c",
    "#d8cfb8",
    "#a9c3e6",
)
DARK = {
    TEXT: "#e6e8eb",
    DIM: "#98a1ad",
    GRID: "#343a42",
    DRAFTER: "#7fb2f5",
    LOOKUP: "#f0a45c",
    CUT: "#5f573f",
    FAINT: "#3c5b85",
}
"""Light colour -> dark colour."""
SPIKE = 0.1
"""Share of all answers from which the most common exact number of loss tokens is named in the plot."""
_HEIGHT, _LABEL, _EPOCHS, _STEEP = 300, 26, 4, 4.0


def figures(counts: Counts, windows: Sequence[Window], drafter: Decoder, lookup: Decoder) -> dict[str, Any]:
    """All figures as JSON values, by the id of their place in the page."""
    made = {
        "plot-loss-tokens": loss_tokens(counts),
        "plot-loss": loss(windows),
        "plot-learning-rate": learning_rate(windows),
        "plot-slots": slots(windows[-1]),
        "plot-positions": positions(drafter.by_position, lookup.by_position),
        "plot-sources": sources(drafter.by_source, lookup.by_source),
    }
    return {place: figure.to_plotly_json() for place, figure in made.items()}


def loss_tokens(counts: Counts) -> go.Figure:
    """Answers by their number of loss tokens: ended by themselves, and cut off by length on top."""
    figure = _figure("loss tokens an answer", "answers")
    found = histogram(counts, 1.0)
    bars = found.bars if found else []
    x = [(bar.first + bar.last) / 2 for bar in bars]
    names = [str(bar.first) if bar.first == bar.last else f"{bar.first} to {bar.last}" for bar in bars]
    for name, colour, heights in (
        ("ended by itself", DRAFTER, [bar.whole for bar in bars]),
        ("cut off by length", CUT, [bar.cut for bar in bars]),
    ):
        hover = "%{customdata} loss tokens: %{y}<extra></extra>"
        figure.add_bar(x=x, y=heights, name=name, marker_color=colour, customdata=names, hovertemplate=hover)
    figure.update_layout(barmode="stack", bargap=0.08)
    value, rows = counts.spike
    if rows > 1 and rows >= SPIKE * counts.rows:
        text = f"exactly {value}: {plural(rows, 'answer')}, {percent(rows / counts.rows)}"
        figure.add_annotation(x=value, y=rows, text=text, font={"color": TEXT}, arrowcolor=DIM, ay=-28)
    return figure


def loss(windows: Sequence[Window]) -> go.Figure:
    """Training loss by step, and the held-out loss at each epoch's end."""
    figure = _figure("step", "loss")
    steps, values = _curve(windows, "loss")
    figure.add_scatter(x=steps, y=values, name="train", mode="lines", line_color=DRAFTER)
    ends = [
        (window.steps_before + epoch.step, epoch.held_out.loss)
        for window in windows
        for epoch in window.epochs
        if epoch.held_out
    ]
    figure.add_scatter(
        x=[step for step, _ in ends],
        y=[value for _, value in ends],
        name="held out",
        mode="lines+markers",
        line={"color": LOOKUP, "dash": "dot"},
        marker_color=LOOKUP,
    )
    # The first steps of fresh weights may lose ten times what later ones do, which would flatten all the rest.
    if values and 0 < _STEEP * min(values) < max(values):
        figure.update_yaxes(type="log", tickvals=[digit * 10**power for power in range(-2, 4) for digit in (1, 2, 5)])
    return _with_windows(figure, windows)


def learning_rate(windows: Sequence[Window]) -> go.Figure:
    """Learning rate by step."""
    figure = _figure("step", "")
    steps, values = _curve(windows, "learning_rate")
    figure.add_scatter(x=steps, y=values, mode="lines", line_color=DRAFTER, name="learning rate")
    figure.update_layout(showlegend=False, height=190)
    figure.update_yaxes(tickformat=".1e", nticks=4, rangemode="tozero")
    return _with_windows(figure, windows)


def _curve(windows: Sequence[Window], name: str) -> tuple[list[int], list[float]]:
    points = [(window.steps_before + point.step, getattr(point, name)) for window in windows for point in window.curve]
    return [step for step, _ in points], [value for _, value in points]


def _with_windows(figure: go.Figure, windows: Sequence[Window]) -> go.Figure:
    for window in windows[1:]:
        figure.add_vline(x=window.steps_before + 0.5, line={"color": GRID, "dash": "dash", "width": 1})
    return figure


def slots(window: Window) -> go.Figure:
    """Accuracy by slot of a block: held out for the epochs (evenly chosen if many), and train for the last one."""
    figure = _figure("slot of the block", "accuracy", share=True)
    chosen = _evenly([epoch for epoch in window.epochs if epoch.held_out], _EPOCHS)
    for order, epoch in enumerate(chosen):
        last = epoch is chosen[-1]
        line = {"color": DRAFTER if last else FAINT, "width": 2.5 if last else 1.5, "dash": "solid" if last else "dot"}
        _slot_line(
            figure,
            epoch.held_out.accuracy_by_position if epoch.held_out else [],
            f"held out, epoch {epoch.epoch}",
            line,
            order,
        )
    if window.epochs:
        final = window.epochs[-1]
        _slot_line(figure, final.train.accuracy_by_position, f"train, epoch {final.epoch}", {"color": LOOKUP}, _EPOCHS)
    figure.update_xaxes(dtick=1 if window.shape["block_size"] <= 16 else None)
    figure.update_layout(height=400)
    return figure


def _slot_line(figure: go.Figure, shares: Sequence[float], name: str, line: Mapping[str, Any], order: int) -> None:
    figure.add_scatter(
        x=list(range(1, len(shares) + 1)),
        y=list(shares),
        name=name,
        mode="lines+markers",
        line=dict(line),
        marker_color=line["color"],
        legendrank=order,
    )


def _evenly(epochs: Sequence[Epoch], most: int) -> list[Epoch]:
    """At most `most` of the epochs, first and last among them."""
    if len(epochs) <= most:
        return list(epochs)
    return [epochs[round(k * (len(epochs) - 1) / (most - 1))] for k in range(most)]


def positions(drafter: Sequence[Position], lookup: Sequence[Position]) -> go.Figure:
    """Share of blocks with at least so many proposals accepted, for both decoders."""
    figure = _figure("proposals accepted, at least", "share of blocks", share=True)
    for name, colour, rows in (("drafter", DRAFTER, drafter), ("prompt lookup", LOOKUP, lookup)):
        shares = [row.share for row in rows]
        figure.add_scatter(
            x=[row.position for row in rows],
            y=[share.mean for share in shares],
            error_y=_error(shares, colour),
            name=name,
            mode="lines+markers",
            line_color=colour,
            marker_color=colour,
            customdata=[number(row.blocks) for row in rows],
            hovertemplate="%{y:.1%} of %{customdata} blocks",
        )
    figure.update_xaxes(dtick=1 if max(map(len, (drafter, lookup)), default=0) <= 20 else None)
    return figure


def sources(drafter: Mapping[str, Acceptance], lookup: Mapping[str, Acceptance]) -> go.Figure:
    """Acceptance length of both decoders by source, the sources from top to bottom."""
    names = sorted({*drafter, *lookup}, reverse=True)
    figure = _figure("tokens a forward", "")
    for name, colour, groups, shift in (("drafter", DRAFTER, drafter, 0.12), ("prompt lookup", LOOKUP, lookup, -0.12)):
        places = [(row, groups[source]) for row, source in enumerate(names) if source in groups]
        lengths = [group.acceptance_length for _, group in places]
        figure.add_scatter(
            x=[value.mean for value in lengths],
            y=[row + shift for row, _ in places],
            error_x=_error(lengths, colour),
            name=name,
            mode="markers",
            marker={"color": colour, "size": 8},
            customdata=[[_label(names[row]), plural(group.prompts, "prompt")] for row, group in places],
            hovertemplate="%{customdata[0]}: %{x:.2f}, %{customdata[1]}",
        )
    figure.add_vline(x=1, line={"color": DIM, "dash": "dot", "width": 1})
    figure.update_yaxes(
        tickvals=list(range(len(names))),
        ticktext=[_label(name) for name in names],
        range=[-0.6, len(names) - 0.4],
    )
    figure.update_layout(height=130 + 34 * max(len(names), 1), hovermode="closest")
    return figure


def _error(values: Sequence[Interval], colour: str) -> dict[str, Any]:
    return {
        "type": "data",
        "symmetric": False,
        "array": [max(value.high - value.mean, 0.0) for value in values],
        "arrayminus": [max(value.mean - value.low, 0.0) for value in values],
        "color": colour,
        "thickness": 1.5,
        "width": 4,
    }


def _label(text: str) -> str:
    shown = visible(text)
    return html.escape(shown if len(shown) <= _LABEL else shown[: _LABEL - 1] + "…")


def _figure(x: str, y: str, *, share: bool = False) -> go.Figure:
    axis = {"gridcolor": GRID, "linecolor": GRID, "zerolinecolor": GRID, "tickfont": {"color": DIM}, "fixedrange": True}
    rising = {"tickformat": ".1~%", "rangemode": "tozero"} if share else {}
    return go.Figure(
        layout=go.Layout(
            template="none",
            height=_HEIGHT,
            margin={"l": 52, "r": 12, "t": 34, "b": 46},
            paper_bgcolor="rgba(0,0,0,0)",
            plot_bgcolor="rgba(0,0,0,0)",
            font={"family": "system-ui, sans-serif", "size": 12, "color": DIM},
            legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"color": TEXT}},
            xaxis={**axis, "title": {"text": x}},
            yaxis={**axis, "title": {"text": y, "standoff": 8}, "automargin": True, **rising},
            hovermode="x unified" if share else "closest",
            dragmode=False,
        )
    )
