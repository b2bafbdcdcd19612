"""The report as one static HTML page: everything is inline, nothing is fetched, and only our own scripts may run.

Completions, source names and reasons are hostile text. The template engine escapes them, a content security policy
names the two scripts of the page by their digests, and the plots' data is JSON that is never run. The page is a
function of its inputs: it holds no time, host or rate.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Template
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from draftmill.audit.page import environment
from draftmill.audit.text import visible
from draftmill.report import plots, words
from draftmill.report.inputs import Decoder, Run, Window, read_run
from draftmill.report.pipeline import steps
from draftmill.report.provenance import STAGES, settings, versions
from draftmill.store.local import publish_text

SHORT_TOKENS = 8
"""Answers with fewer loss tokens are called short here; a constant, because audit limits do not decide a report."""


def build_report(
    *,
    audits: Sequence[Path],
    train: Sequence[Path],
    evaluation: Path,
    audit_page: Path,
    counts: Mapping[str, Any],
    specs: Mapping[str, Mapping[str, Any]],
    fingerprints: Mapping[str, str],
    output: Path,
    provenance: Mapping[str, Any],
) -> None:
    """Publish the report of a run as HTML at `output`.

    `audits` are the shards' audit JSONs with their pages beside them, `audit_page` the page of the whole set; both are
    linked by their place relative to `output`. `train` is each window's train.json in any order, `counts` what became
    of the source records (prompts/scan.py), `specs` and `fingerprints` are by stage. Raises UserError for a damaged
    input.
    """
    run = read_run(audits, train, evaluation)
    text = _template().render(
        **_acceptance(run),
        **_data(run),
        **_training(run.windows),
        **_links(run, audits, audit_page, output.parent),
        steps=steps(run, counts, specs["train"]),
        bad=counts["bad"],
        fingerprints=[(stage, fingerprints[stage]) for stage in (*STAGES, "report")],
        settings=settings(specs),
        versions=versions(run, provenance),
        provenance=provenance,
        figures=plots.figures(
            run.audits.measurements.overall, run.windows, run.evaluation.drafter, run.evaluation.prompt_lookup
        ),
        dark=plots.DARK,
        scripts=_scripts(),
    )
    publish_text(output, text)


def _scripts() -> list[tuple[str, Markup]]:
    """The page's scripts, each with the digest that its security policy allows it by."""
    own = files("draftmill.report").joinpath("templates/report.js").read_text(encoding="utf-8")
    return [(_digest(text), Markup(text)) for text in (get_plotlyjs(), own)]


def _digest(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


@lru_cache(maxsize=1)
def _template() -> Template:
    pages = environment("draftmill.report")
    pages.filters.update(n=words.number, gap=words.gap, bounds=words.bounds, share_bounds=words.share_bounds)
    pages.filters.update(visible=visible, decoder=words.decoder)
    return pages.get_template("report.html.jinja")


def _acceptance(run: Run) -> dict[str, Any]:
    found, overall = run.evaluation, run.audits.measurements.overall
    rows = sum(window.rows for window in run.windows)
    return {
        "headline": words.headline(found),
        "meaning": words.meaning(found.drafter, rows, overall.loss_tokens),
        "found": found,
        "positions": _positions(found.drafter, found.prompt_lookup),
        "sources": _sources(found.drafter, found.prompt_lookup),
    }


def _positions(drafter: Decoder, lookup: Decoder) -> list[dict[str, Any]]:
    """Positions of both decoders side by side; a decoder that proposes fewer has none at the end."""
    own = {row.position: row for row in drafter.by_position}
    other = {row.position: row for row in lookup.by_position}
    return [{"position": k, "drafter": own.get(k), "lookup": other.get(k)} for k in sorted({*own, *other})]


def _sources(drafter: Decoder, lookup: Decoder) -> list[dict[str, Any]]:
    names = sorted({*drafter.by_source, *lookup.by_source})
    return [
        {"name": name, "drafter": drafter.by_source.get(name), "lookup": lookup.by_source.get(name)} for name in names
    ]


def _data(run: Run) -> dict[str, Any]:
    counts = run.audits.measurements.overall
    return {
        "counts": counts,
        "data_sources": run.audits.measurements.by_source,
        "tallies": [("Finish reason", counts.finish), ("Thinking", counts.thinking), ("Rejected", counts.rejected)],
        "short_tokens": SHORT_TOKENS,
    }


def _training(windows: Sequence[Window]) -> dict[str, Any]:
    """The windows, and one line an epoch of each; its `step` counts over all windows."""
    epochs = [
        {"window": number, "step": window.steps_before + epoch.step, "scores": epoch}
        for number, window in enumerate(windows)
        for epoch in window.epochs
    ]
    return {"windows": windows, "epochs": epochs}


def _links(run: Run, audits: Sequence[Path], audit_page: Path, start: Path) -> dict[str, Any]:
    """The audits' pages by their place relative to the report's folder."""
    pages = {path.stem: os.path.relpath(path.with_suffix(".html"), start) for path in audits}
    return {
        "set_page": os.path.relpath(audit_page, start),
        "audit_pages": [(name, run.audits.rows[name], page) for name, page in sorted(pages.items())],
    }
