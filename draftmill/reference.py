"""The reference of the configuration and its JSON schema, generated from the typed model so that they cannot drift."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from draftmill.config import Config

_HEAD = """# Configuration

One YAML file, given with `--configfile`; `config.yaml` is the default and builds the demo. Every key is checked before
anything starts, and an unknown one is an error. `snakemake --config generate='{temperature: 0.8}'` changes single values.

What a key decides is in its stage's spec: changing it rebuilds that stage and what follows, and nothing else. Keys that
decide no bytes (`flush_*`, `save_every`, `resources`, `gate`, limits of bad input) rebuild nothing. Paths are relative to
the folder that Snakemake runs in. This page is made by `make reference`.
"""


def markdown() -> str:
    """The reference as Markdown: one table a section."""
    return "\n".join([_HEAD, *_sections(Config, "")]) + "\n"


def schema() -> str:
    """The JSON schema of a configuration file, for editors and checkers."""
    return json.dumps(Config.model_json_schema(), indent=1) + "\n"


def _sections(model: type[BaseModel], prefix: str) -> Iterator[str]:
    plain = {name: field for name, field in model.model_fields.items() if _model(field) is None}
    if plain:
        yield f"## {prefix.rstrip('.').replace('[].', '[]') or 'Top level'}\n"
        if prefix:
            yield f"{(model.__doc__ or '').strip().splitlines()[0]}\n"
        yield "| key | type | default | meaning |\n|---|---|---|---|"
        for name, field in plain.items():
            yield f"| `{prefix}{name}` | {_type(field)} | {_default(field)} | {_cell(field.description or '')} |"
        yield ""
    for name, field in model.model_fields.items():
        nested = _model(field)
        if nested is not None:
            many = "[]" if nested is not field.annotation else ""
            yield from _sections(nested, f"{prefix}{name}{many}.")


def _model(field: FieldInfo) -> type[BaseModel] | None:
    candidates: list[Any] = [field.annotation, *get_args(field.annotation)]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _type(field: FieldInfo) -> str:
    text = field.annotation.__name__ if isinstance(field.annotation, type) else str(field.annotation)
    text = text.replace("typing.", "").replace("NoneType", "null").replace("None", "null")
    bounds = [f"{sign} {getattr(m, key)}" for m in field.metadata for key, sign in _SIGNS.items() if hasattr(m, key)]
    return _cell(", ".join([f"`{text}`", *bounds]))


_SIGNS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default_factory() if field.default_factory is not None else field.default  # type: ignore[call-arg]
    return _cell(f"`{json.dumps(None if value is PydanticUndefined else value)}`")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
