"""JSON objects and pages: whole, of their kind, and in agreement with themselves.

A file that the system does not open raises OSError: that says nothing of what it holds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from draftmill.catalog import Entry
from draftmill.errors import UserError, reason
from draftmill.integrity import said
from draftmill.integrity.findings import Unsound, require
from draftmill.integrity.refusals import of_system
from draftmill.report.inputs import Evaluation, Window

if TYPE_CHECKING:
    from draftmill.audit.result import AuditResult

_PAGE_END = b"</html>"
_PILOT = ("rows", "prompt_tokens", "output_tokens", "loss_tokens", "tokens", "taps", "width", "hidden_bytes")


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object. Raises Unsound."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise Unsound("unreadable", "a whole JSON object", reason(error)) from None
    require(isinstance(value, dict), "content", "a JSON object", type(value).__name__)
    return dict(value)


def check_page(path: Path) -> None:
    """A page must be there to its end. Raises Unsound."""
    end = path.read_bytes()[-256:].rstrip()
    require(end.endswith(_PAGE_END), "unreadable", "a page that ends as one", "one that was cut off")


def check_audit(path: Path, entry: Entry) -> AuditResult:
    """An audit that passed. Raises Unsound."""
    from draftmill.audit.result import read_result

    value = read_object(path)
    said.check(entry, value.get("provenance"))
    try:
        result = read_result(path)
    except UserError as error:
        raise of_system(error) or Unsound("content", "an audit", reason(error)) from None
    require(result.verdict == "pass", "content", "an audit that passed", result.verdict)
    return result


def check_pilot(path: Path, entry: Entry) -> None:
    """A pilot's counts. Raises Unsound."""
    value = read_object(path)
    said.check(entry, value.get("provenance"))
    for name in _PILOT:
        count = value.get(name)
        require(isinstance(count, int) and count >= 0, "content", f"{name} as a count", count)


class _Row(BaseModel):
    output_ids: list[int]


class _Target(BaseModel):
    tokens: int


class _Measured(Evaluation):
    """An evaluation with what it sums up, which no reader of the sums needs."""

    rows: list[_Row]
    target: _Target


def check_evaluation(path: Path, entry: Entry) -> None:
    """A measured acceptance whose sums are those of its rows. Raises Unsound."""
    value = read_object(path)
    said.check(entry, value.get("provenance"))
    try:
        result = _Measured.model_validate(value)
    except ValidationError as error:
        raise Unsound("content", "an evaluation", _first(error)) from None
    rows, counted = result.rows, result.target.tokens
    require(len(rows) == result.prompts, "rows", f"{result.prompts} prompts", f"rows of {len(rows)}")
    parted = {found.prompt_id for found in result.divergences if found.decoder == "drafter"}
    identical = result.prompts - len(parted)
    require(result.identical == identical, "content", f"{identical} prompts decoded alike", result.identical)
    tokens = sum(len(row.output_ids) for row in rows)
    require(counted == tokens, "content", f"{tokens} tokens of the target", counted)


def check_train(path: Path, entry: Entry) -> None:
    """What a window's training says of itself. Raises Unsound."""
    value = read_object(path)
    said.check(entry, value.get("provenance"))
    try:
        window = Window.model_validate(value)
    except ValidationError as error:
        raise Unsound("content", "a window's training", _first(error)) from None
    require(window.steps > 0, "content", "a step at least", window.steps)


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def check_trainer(path: Path, entry: Entry, *, deep: bool) -> None:
    """The optimiser's state; with `deep` every number of it. Raises Unsound."""
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            state = json.loads((file.metadata() or {}).get("draftmill", "{}"))
            names = list(file.keys())
            sick = [n for n in names if not bool(torch.isfinite(file.get_tensor(n)).all())] if deep else []
    except (SafetensorError, ValueError) as error:
        raise Unsound("unreadable", "a whole safetensors file", reason(error)) from None
    require(isinstance(state, dict), "provenance", "a JSON object in its metadata", type(state).__name__)
    said.check(entry, state.get("provenance"))
    require(bool(names), "content", "an optimiser's tensors", "none")
    require(not sick, "values", "finite numbers", f"others in {', '.join(sick[:3])}")


def check_config(path: Path, entry: Entry) -> None:
    """A drafter's config.json as far as it stands alone. Raises Unsound."""
    said.check(entry, read_object(path).get("draftmill"))


def check_header(path: Path) -> None:
    """A safetensors file must be whole. Raises Unsound."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            require(bool(list(file.keys())), "content", "tensors", "none")
    except SafetensorError as error:
        raise Unsound("unreadable", "a whole safetensors file", reason(error)) from None


def check_contract(folder: Path, *, deep: bool) -> None:
    """A drafter's weights and configuration together, as `draftmill check` holds them. Raises Unsound."""
    from draftmill.drafter.conformance import problems_of

    kept = "a drafter that keeps the contract"
    try:
        problems = problems_of(folder, values=deep)
    except UserError as error:
        raise of_system(error) or Unsound("contract", kept, reason(error)) from None
    require(not problems, "contract", kept, problems[0] if problems else "")
