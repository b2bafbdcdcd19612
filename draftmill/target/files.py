"""What can be known of the target without loading it: where it lies, its config, its identity.

A hub model is identified by repository and commit. A folder is identified by the digests of the files that decide what
the model says; they are cached by size and modification time, so that a `touch` costs one more reading and changes
nothing. No torch here: this is read whenever the Snakefile is parsed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftmill.canonical import fingerprint
from draftmill.config import TargetConfig
from draftmill.digests import DigestCache
from draftmill.errors import UserError, reason

# What decides the text a model gives: weights, config, tokenizer, template, remote code.
_DECISIVE = re.compile(r".*\.(safetensors|bin|json|txt|model|jinja|py|gguf)")
_WEIGHTLESS = re.compile(r".*\.(json|txt|model|jinja|py)")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_folder(target: TargetConfig) -> bool:
    """Whether the target is a local folder rather than a hub id."""
    return Path(target.model).is_dir()


def check(target: TargetConfig) -> None:
    """Raise UserError unless the target is a folder with a config.json or a hub id with a commit."""
    path = Path(target.model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"target.model: the folder {path} holds no config.json, so it is no Hugging Face model.")
        return
    if path.is_absolute() or target.model.startswith(".") or target.model.count("/") != 1:
        hint = " Run `draftmill fetch demo` first." if target.model.startswith("demo/") else ""
        raise UserError(f"target.model: there is no folder {path}.{hint}")
    if target.revision is None or not _COMMIT.fullmatch(target.revision):
        raise UserError(
            f"target.revision: {target.model} is a hub id and needs the full commit (40 hex digits) of its repository, "
            "or the target could change under finished work."
        )


def identity(target: TargetConfig, cache: DigestCache) -> str:
    """A name of the model's content. Raises UserError like check()."""
    check(target)
    if not is_folder(target):
        return f"{target.model}@{target.revision}"
    return _fingerprint(target, cache, _DECISIVE)


def tokenizer_identity(target: TargetConfig, cache: DigestCache) -> str:
    """A name of all that decides a prompt's ids: the model's files without its weights. Raises UserError like check()."""
    check(target)
    if not is_folder(target):
        return f"{target.model}@{target.revision}"
    return _fingerprint(target, cache, _WEIGHTLESS)


def _fingerprint(target: TargetConfig, cache: DigestCache, names: re.Pattern[str]) -> str:
    files = sorted(path for path in Path(target.model).iterdir() if path.is_file() and names.fullmatch(path.name))
    return fingerprint([[path.name, cache.digest(path)] for path in files])


def file(target: TargetConfig, name: str) -> Path | None:
    """A file of the target, from its folder or the hub's local cache or the hub; None if the model has no such file."""
    if is_folder(target):
        path = Path(target.model) / name
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(target.model, name, revision=target.revision))
    except LocalEntryNotFoundError:
        raise UserError(
            f"target.model: {target.model} is neither a folder nor in the local hub cache, and the hub cannot be reached: "
            "give a folder, or download it once where there is a network."
        ) from None
    except EntryNotFoundError:
        return None
    except HfHubHTTPError as error:
        raise UserError(f"target.model: the hub refused {target.model}: {reason(error)}.") from None


def read_config(target: TargetConfig) -> dict[str, Any]:
    """The target's config.json. Raises UserError if it cannot be had."""
    check(target)
    path = file(target, "config.json")
    if path is None:
        raise UserError(f"target.model: {target.model} has no config.json, so it is no Hugging Face model.")
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"target.model: {path} is no readable config ({reason(error)}): copy the model again."
        ) from None


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config.json: `text_config` of multimodal models, else all of it."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) and nested else config


def context_length(target: TargetConfig) -> int:
    """The longest row in tokens: as configured, else what the model declares. Raises UserError if neither says."""
    if target.context_length is not None:
        return target.context_length
    declared = text_config(read_config(target)).get("max_position_embeddings")
    if not isinstance(declared, int):
        raise UserError("target.context_length: the model does not declare one, so set it.")
    return declared
