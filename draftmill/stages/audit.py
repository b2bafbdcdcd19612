"""The audit stage: a completions shard in, its verdict and its page out, and a full stop if a limit is broken.

Snakemake removes the outputs of a job that fails, and the numbers of a failed audit are what a person needs most. So
they are published under another name, which no rule knows, before the job fails with one sentence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftmill.audit.page import render
from draftmill.audit.result import AuditResult, audit_tables, combine, read_result
from draftmill.audit.tokens import TokenInfo
from draftmill.canonical import canonical_json
from draftmill.config import AuditConfig
from draftmill.errors import UserError
from draftmill.schemas import REJECTED, read_completions, read_table
from draftmill.store.local import publish_text


def audit_shard(
    completions: Path,
    rejected: Path,
    out_json: Path,
    out_html: Path,
    limits: AuditConfig,
    tokens: TokenInfo,
    provenance: Mapping[str, Any],
    *,
    failed: Path,
) -> AuditResult:
    """Audit one shard and publish verdict and page.

    `failed` is the JSON's place if a limit is broken, with the page beside it. Raises UserError then, with the worst
    finding in one sentence, and leaves no output; after a pass it is the failed files of earlier tries that are gone.
    """
    name = f"Shard {completions.stem}"
    tables = read_completions(completions), read_table(rejected, REJECTED)
    try:
        result = audit_tables(name, *tables, limits, tokens, provenance)
    except ValueError as error:
        raise UserError(f"{completions} is damaged: {error}; delete it and build again.") from None
    good, bad = (out_json, out_html), (failed, failed.with_suffix(".html"))
    stays, goes = (good, bad) if result.verdict == "pass" else (bad, good)
    publish(result, *stays)
    for path in goes:
        path.unlink(missing_ok=True)
    if result.verdict == "fail":
        raise UserError(result.failure(str(stays[1])))
    # Failures under other limits are answered too, and would only mislead.
    for path in failed.parent.glob(f"{failed.stem.partition('-')[0]}-*"):
        path.unlink(missing_ok=True)
    return result


def publish(result: AuditResult, out_json: Path | None, out_html: Path | None, *, pairs: bool = True) -> None:
    """Write an audit's JSON and page, each whole or not at all; the page first, so that a JSON always has one."""
    if out_html is not None:
        publish_text(out_html, render(result))
    if out_json is not None:
        publish_text(out_json, canonical_json(result.to_json(pairs=pairs)) + "\n")


def audit_set(
    shards: Sequence[Path],
    limits: AuditConfig,
    out_html: Path | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> AuditResult:
    """The audit of a whole set from its shards' audit JSONs, and its page. Raises UserError for a damaged JSON."""
    parts = [read_result(path) for path in sorted(shards, key=lambda path: path.name)]
    result = combine(f"The whole set of {len(parts)} shards", parts, limits, provenance)
    publish(result, None, out_html)
    return result
