"""`draftmill audit` and `draftmill import`: is a data set worth a GPU, and how does the build take it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftmill.errors import UserError

if TYPE_CHECKING:
    from draftmill.audit.external import Settings
    from draftmill.audit.result import AuditResult
    from draftmill.prompts.files import OnBytes

DataPath = Annotated[str, typer.Argument(help="JSONL, JSON, CSV or Parquet: a file, a folder, a glob, or under s3://.")]
Tokenizer = Annotated[str | None, typer.Option(help="Folder of the target, or its hub id as ID@COMMIT.")]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--configfile", "--config", help="YAML with limits under `audit` and the tokenizer under `target`."),
]
Field = Annotated[str | None, typer.Option(help="Column that holds the prompt, if it has an unusual name.")]
Page = Annotated[Path | None, typer.Option("--html", help="Write the page with histogram and examples here.")]


def audit(
    path: DataPath,
    tokenizer: Tokenizer = None,
    config: ConfigFile = None,
    field: Field = None,
    html: Page = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole audit as JSON.")] = False,
) -> None:
    """Audit a data set of answers: messages, or input_ids with loss_mask. Status 0: pass, 1: a limit is broken."""
    from draftmill.audit.external import settings

    result = _audited(path, settings(tokenizer, config, field), html)
    if as_json:
        print(json.dumps(result.to_json(pairs=False), sort_keys=True, indent=1))
    else:
        _say(result, html)
    raise typer.Exit(0 if result.verdict == "pass" else 1)


def import_(
    path: DataPath,
    out: Annotated[Path, typer.Option(help="Source file to write, .jsonl or .parquet.")],
    tokenizer: Tokenizer = None,
    config: ConfigFile = None,
    field: Field = None,
    html: Page = None,
    force: Annotated[bool, typer.Option(help="Write the file although the audit failed.")] = False,
) -> None:
    """Audit a data set of answers and, if it passes, write it as a source that a configuration takes."""
    from draftmill.audit.external import settings, write_source

    result = _audited(path, settings(tokenizer, config, field), html)
    _say(result, html)
    if result.verdict == "fail" and not force:
        print(f"Nothing was imported from {path}: correct it, change a limit, or give --force.", file=sys.stderr)
        raise typer.Exit(1)
    rows, left_out = write_source(path, out, field)
    print(f"{rows} rows were written to {out}" + (f", {left_out} were left out." if left_out else "."))
    print(f"The configuration takes them so:\n\nprompts:\n  sources:\n    - {_source(out)}")


def _source(out: Path) -> str:
    return f"{{path: {json.dumps(str(out))}, answers: keep}}"


def _audited(path: str, chosen: Settings, html: Path | None) -> AuditResult:
    from draftmill.audit.external import audit_path
    from draftmill.stages.audit import publish

    with _progress(path) as on_bytes:
        result = audit_path(path, chosen, on_bytes)
    publish(result, None, html)
    return result


@contextmanager
def _progress(path: str) -> Iterator[OnBytes | None]:
    """A bar on a terminal, nothing elsewhere: the audit is over in a minute."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    from draftmill.audit.external import size

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("auditing", total=size(path))
        yield lambda count: bar.update(task, completed=count)


def _say(result: AuditResult, html: Path | None) -> None:
    """The verdict in plain lines, one for each broken limit. Texts of the set are not printed."""
    counts = result.measurements.overall
    print(
        f"{result.verdict}: {counts.rows} answers with {counts.mean:.1f} loss tokens on average, "
        f"{counts.rejections} records refused."
    )
    for finding in result.findings:
        print(f"- {finding.sentence} Most likely: {finding.likely[0].lower()}{finding.likely[1:]}")
    if not counts.rows and not counts.rejections:
        raise UserError(f"{result.name} holds no row at all: give a file with answers.")
    if "unknown" in counts.finish:
        print("No tokenizer was given: cut and blank answers and thinking were not told apart (--tokenizer).")
    if html is not None:
        print(f"The page is {html}.")


def register(app: typer.Typer) -> None:
    """Add both commands to the command line."""
    app.command("audit")(audit)
    app.command("import")(import_)
