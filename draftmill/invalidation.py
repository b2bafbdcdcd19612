"""What each key of the configuration invalidates, found by changing it and resolving the specs again.

The table in docs/invalidation.md is made from this, so it says what the code does and not what somebody meant. A value to
change to is found by trying plain ones; only where none fits, or where a change would be no change of meaning, one is
named here. Some keys decide something only under another setting, so every key is tried in several situations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel

from draftmill import specs as specs_module
from draftmill.config import Config, parse
from draftmill.drafter.spec import resolve_shape
from draftmill.errors import UserError
from draftmill.prompts.index import spec_of
from draftmill.specs import Shards, resolve

INDEX = "index"
STAGES = (INDEX, "generate", "audit", "extract", "pilot", "train", "evaluate", "audit_set", "report")

_CONTEXT = 512
_TARGET = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": _CONTEXT,
}
_SHARDS = Shards(tuple(f"{number:012x}" for number in range(20)), ("f" * 12,))
_BASE: Mapping[str, Any] = {
    "device": "cpu",
    "store": "build",
    "target": {"model": "org/model", "revision": "a" * 40},
    "prompts": {"sources": [{"path": "prompts.jsonl"}]},
    "generate": {"max_new_tokens": 24},
}
# What else is set while a key is changed; the first says nothing.
SITUATIONS: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "`device: cuda`": {"device": "cuda"},
    "`target.dtype: float32`": {"target": {"dtype": "float32"}},
    "`generate.engine: sglang`": {"generate": {"engine": "sglang"}},
    "`generate.mix`": {"generate": {"mix": [{"name": "warm"}]}},
    "`hidden.taps` by hand": {"hidden": {"taps": [0, 2]}},
    "`hidden.policy: window`": {"hidden": {"policy": "window", "window_shards": 2}},
    "`drafter.sliding_layers`": {"drafter": {"sliding_layers": 1}},
}
# Values that no plain one can stand for.
_VALUES: Mapping[str, Any] = {
    "target.model": "org/other",
    "target.revision": "b" * 40,
    "target.context_length": 256,
    "hidden.taps": [1, 3],
    "generate.mix": [{"name": "hot", "temperature": 1.5, "max_new_tokens": 99}],
    "generate.mix[].max_new_tokens": 99,
    "generate.sglang.urls": ["http://host:30000"],
    "train.betas": [0.8, 0.9],
    "gate.ports": [30000],
}
_PLAIN: tuple[Any, ...] = (3, 0.25, 2.5, 2048, "other", True, False, ["other"], {"other": "x"}, [{"path": "other"}])


@dataclass(frozen=True, slots=True)
class Effect:
    """What a change of a key invalidates, in stage order: as a rule, and in the situations where it is something else.

    `stages` is None for a key that there is only in such a situation.
    """

    key: str
    stages: tuple[str, ...] | None
    under: Mapping[str, tuple[str, ...]]


def effects() -> list[Effect]:
    """The effect of every key, in the order of the configuration."""
    return [_effect(key, kind) for key, kind in _keys(Config, "")]


def _keys(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        inner = next((c for c in (field.annotation, *get_args(field.annotation)) if _is_model(c)), None)
        if inner is None or inner is not field.annotation:
            yield f"{prefix}{name}", field.annotation
        if inner is not None:
            yield from _keys(inner, f"{prefix}{name}." if inner is field.annotation else f"{prefix}{name}[].")


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _effect(key: str, kind: Any) -> Effect:
    found = {situation: _stages(key, kind, base) for situation, base in SITUATIONS.items()}
    rule = found.pop("")
    return Effect(key, rule, {name: stages for name, stages in found.items() if stages not in (None, rule)})


def _stages(key: str, kind: Any, base: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The stages that a change of the key can invalidate; None if it cannot be changed there."""
    before = parse(_over(_BASE, base))
    old, choices = _names(before), [value for value in get_args(kind) if isinstance(value, str)]
    found: set[str] | None = None
    for value in [_VALUES[key]] if key in _VALUES else choices or _PLAIN:
        try:
            after = parse(_over(_over(_BASE, base), _nested(before, key.split("."), value)))
            names = _names(after)
        except (UserError, LookupError):
            continue
        if after != before:
            found = (found or set()) | {stage for stage in STAGES if names[stage] != old[stage]}
            if not choices:
                break
    return None if found is None else tuple(stage for stage in STAGES if stage in found)


def _nested(config: Config, names: Sequence[str], value: Any) -> dict[str, Any]:
    """A mapping that sets one key; of a list's items the first. Raises LookupError if there is none."""
    name, inner = names[0].removesuffix("[]"), getattr(config, names[0].removesuffix("[]"))
    if len(names) == 1:
        return {name: value}
    if names[0].endswith("[]"):
        items = [item.model_dump(mode="json") for item in inner]
        items[0] |= {names[1]: value}
        return {name: items}
    return {name: _nested(inner, names[1:], value)}


def _over(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in change.items():
        old = merged.get(name)
        merged[name] = _over(old, value) if isinstance(value, dict) and isinstance(old, dict) else value
    return merged


def _names(config: Config) -> dict[str, Any]:
    """Fingerprints by stage, and what decides the index."""
    identity = f"{config.target.model}@{config.target.revision}"
    context = config.target.context_length or _CONTEXT
    shape = resolve_shape(config.drafter, config.hidden, _TARGET).describe()
    index = spec_of(config, context - config.generate.longest_answer, identity)
    return {**resolve(config, identity, context, shape, _SHARDS, {}).fp, INDEX: index}


def raised(stage: str) -> tuple[str, ...]:
    """The stages that a raised version of one invalidates."""
    config = parse(_BASE)
    before = _names(config)
    versions = specs_module.SPEC_VERSIONS
    specs_module.SPEC_VERSIONS = {**versions, stage: versions[stage] + 1}
    try:
        after = _names(config)
    finally:
        specs_module.SPEC_VERSIONS = versions
    return tuple(name for name in STAGES if before[name] != after[name])


_HEAD = """# What a change invalidates

Made by `make reference` from the code: each key was changed and the names of all objects were worked out again. A stage
with a dot is made anew; what lacks one stands, whatever its age. Old objects stay, so a change taken back costs nothing.

- **index** means that the sources are read again. Of what they give, only shards whose prompts are others are new, and
  for a new shard the rows of unchanged prompts are taken from its forerunner.
- A row that names a setting holds only under that setting; a row without a dot says that nothing is made anew then.
- A new or gone shard also makes `train`, `evaluate`, `audit_set` and `report` anew, for they are made of all shards.
"""
_NOTHING = "These keys decide no object, only how, where and when it is made:"
_VERSIONS = """## A raised version

Each stage has a version in its spec, raised by hand when the meaning of its output changes (`draftmill/specs.py`).
"""


def markdown() -> str:
    """The table as Markdown."""
    found = effects()
    rows = [row for effect in found for row in _rows(effect)]
    idle = [f"`{effect.key}`" for effect in found if effect.stages == () and not effect.under]
    versions = [_row(f"`{stage}`", raised(stage)) for stage in STAGES if stage != INDEX]
    table, second = _table("key", rows), _table("version of", versions)
    return (
        "\n\n".join([_HEAD + "\n## Keys", table, f"{_NOTHING}\n{', '.join(idle)}.", _VERSIONS + "\n" + second]) + "\n"
    )


def _rows(effect: Effect) -> Iterator[str]:
    if effect.stages:
        yield _row(f"`{effect.key}`", effect.stages)
    for situation, stages in effect.under.items():
        yield _row(f"`{effect.key}`" + ("" if effect.stages is None else f" with {situation}"), stages)


def _row(name: str, stages: Sequence[str]) -> str:
    return f"| {name} | " + " | ".join("●" if stage in stages else "" for stage in STAGES) + " |"


def _table(name: str, rows: Sequence[str]) -> str:
    return "\n".join([f"| {name} | {' | '.join(STAGES)} |", "|---" + "|:-:" * len(STAGES) + "|", *rows])
