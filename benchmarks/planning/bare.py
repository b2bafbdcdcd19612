"""The least Snakefile with as many jobs and files: wildcards only, no function, parameter, resource or log.

What it costs to plan is Snakemake's own; what the real one costs more is ours.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.planning.project import empty, fill
from draftmill.layout import DRAFTER_FILES

_ONCE = ("audit_set", "pilot", "evaluate", "report")
_MADE = ("completions/{s}.parquet", "completions/{s}.rejected.parquet", "audits/{s}.json", "audits/{s}.html")
_HIDDEN = "hidden/{s}.safetensors"
_DRAFTER = [f"drafter/{name}" for name in DRAFTER_FILES]

_TEXT = """
SHARDS = open("shards.txt").read().split()

rule all:
    input:
        expand({made}, s=SHARDS),
        {drafter},
        {once},

rule generate:
    input: "prompts/{{s}}.parquet", {gate_generate}
    output: "completions/{{s}}.parquet", "completions/{{s}}.rejected.parquet"
    shell: "true"

rule audit:
    input: "completions/{{s}}.parquet", "completions/{{s}}.rejected.parquet"
    output: "audits/{{s}}.json", "audits/{{s}}.html"
    shell: "true"

rule extract:
    input: "completions/{{s}}.parquet", "audits/{{s}}.json", {gate_extract}
    output: "{hidden}"
    shell: "true"

rule audit_set:
    input: expand("audits/{{s}}.json", s=SHARDS)
    output: "audit_set"
    shell: "true"

rule pilot:
    input: expand("{hidden}", s=SHARDS[0])
    output: "pilot"
    shell: "true"

rule train:
    input: expand("{hidden}", s=SHARDS), {gate_train}
    output: {drafter}
    shell: "true"

rule evaluate:
    input: {drafter}, {gate_evaluate}
    output: "evaluate"
    shell: "true"

rule report:
    input: "evaluate", expand("audits/{{s}}.json", s=SHARDS)
    output: "report"
    shell: "true"
"""

_SENTINELS = """
rule gate_generate:
    input: "prompts/{{s}}.parquet"
    output: temp(".gpu/generate-{{s}}.json")
    shell: "true"

rule gate_extract:
    input: "completions/{{s}}.parquet", "audits/{{s}}.json"
    output: temp(".gpu/extract-{{s}}.json")
    shell: "true"

rule gate_train:
    input: expand("{hidden}", s=SHARDS)
    output: temp(".gpu/train.json")
    shell: "true"

rule gate_evaluate:
    input: {drafter}
    output: temp(".gpu/evaluate.json")
    shell: "true"
"""


def write(folder: Path, shards: list[str], *, present: bool) -> None:
    """The bare project in a folder, with everything made or nothing but the prompts.

    A real build has sentinels only for jobs that are to run, so the bare one has none where nothing is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "shards.txt").write_text("\n".join(shards))
    (folder / "Snakefile").write_text(_text(sentinels=not present))
    made = [pattern.format(s=shard) for shard in shards for pattern in (*_MADE, _HIDDEN)]
    made += [*_DRAFTER, *_ONCE]
    fill(folder, [f"prompts/{shard}.parquet" for shard in shards])
    (fill if present else empty)(folder, made)


def _text(*, sentinels: bool) -> str:
    def quoted(names: list[str]) -> str:
        return ", ".join(f'"{name}"' for name in names)

    def gate(name: str) -> str:
        return f'".gpu/{name}.json"' if sentinels else ""

    parts = {
        "made": [*_MADE, _HIDDEN],
        "hidden": _HIDDEN,
        "drafter": quoted(_DRAFTER),
        "once": quoted(list(_ONCE)),
        "gate_generate": gate("generate-{s}"),
        "gate_extract": gate("extract-{s}"),
        "gate_train": gate("train"),
        "gate_evaluate": gate("evaluate"),
    }
    return (_TEXT + (_SENTINELS if sentinels else "")).format(**parts)
