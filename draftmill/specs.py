"""Stage specs and the chain of fingerprints: what decides the bytes of every object.

A stage's spec is the canonical JSON of exactly the settings that decide its output; its fingerprint covers the spec and
the fingerprints of its inputs. Changing anything else (threads, flush intervals, the gate) invalidates nothing.
Settings that change only how sums are rounded (the size of a packed forward) are left out on purpose.

Snakemake does not see imported code, and hashing code would throw away days of GPU work for a comment, so each stage
has a version here. It is raised by hand when the meaning of its output changes; the versions stand together, outside
the stage modules, because this file is read whenever the Snakefile is parsed and must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftmill.canonical import fingerprint
from draftmill.config import Config, GenerateConfig

SPEC_VERSIONS: Mapping[str, int] = {
    "generate": 1,
    "audit": 2,
    "extract": 1,
    "pilot": 1,
    "train": 1,
    "evaluate": 1,
    "audit_set": 2,
    "report": 1,
}

# The stages whose fingerprints a stage's own covers, in order: what it is made from by way of them.
INPUTS: Mapping[str, tuple[str, ...]] = {
    "generate": (),
    "audit": ("generate",),
    "audit_set": ("audit",),
    "extract": ("generate",),
    "pilot": ("generate", "extract"),
    "train": ("extract",),
    "evaluate": ("train",),
    "report": ("evaluate",),
}

# Keys of a section that leave its output's bytes alone.
_GENERATE_FREE = {"flush_rows", "flush_seconds", "sglang"}
_TRAIN_FREE = {"save_every", "micro_batch_rows"}


@dataclass(frozen=True, slots=True)
class Shards:
    """The shards of an index in order, as far as fingerprints need them."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Specs:
    """The stage specs of one configuration and their fingerprints, by stage name."""

    spec: Mapping[str, Mapping[str, Any]]
    fp: Mapping[str, str]

    def provenance(self, stage: str, **inputs: Any) -> dict[str, Any]:
        """What an object of this stage carries about itself; `inputs` name what it was made from."""
        return {"stage": stage, "fingerprint": self.fp[stage], "spec": self.spec[stage], "inputs": inputs}


def windows(config: Config, train: Sequence[str]) -> list[list[str]]:
    """Train shards grouped into windows: one under policy keep, else window_shards each."""
    size = len(train) if config.hidden.policy == "keep" else config.hidden.window_shards
    return [list(train[start : start + size]) for start in range(0, len(train), max(size, 1))]


def _sampling(generate: GenerateConfig) -> dict[str, Any]:
    """What decides the rows; a key that came later is left out while it says nothing, so that older objects stand."""
    settings = generate.model_dump(mode="json", exclude=_GENERATE_FREE)
    if generate.engine == "sglang":
        del settings["batch_size"]
    if not generate.mix:
        del settings["mix"]
    return settings


def resolve(
    config: Config, target: str, context: int, drafter: Mapping[str, Any], shards: Shards, counts: Mapping[str, Any]
) -> Specs:
    """All specs of a configuration.

    `target` is the model's identity and `context` its longest row in tokens (target/files.py), `drafter` the resolved
    shape with its taps (drafter/spec.py), `counts` what became of the source records (prompts/index.py), which only the
    report shows.
    """
    spec: dict[str, dict[str, Any]] = {}
    fp: dict[str, str] = {}

    def add(stage: str, **settings: Any) -> None:
        spec[stage] = {"version": SPEC_VERSIONS[stage], **settings}
        fp[stage] = fingerprint([stage, spec[stage], [fp[above] for above in INPUTS[stage]]])

    model = {
        "model": target,
        "dtype": config.dtype,
        "attention": config.target.attention,
        "remote_code": config.target.trust_remote_code,
    }
    add(
        "generate",
        target=model,
        chat_template_args=config.target.chat_template_args,
        sampling=_sampling(config.generate),
    )
    add("audit", limits=config.audit.model_dump(mode="json"))
    add("audit_set", shards=[*shards.train, *shards.held_out])
    add("extract", target=model, taps=drafter["taps"], stored="bfloat16")
    pilot = shards.train[config.pilot] if config.pilot < len(shards.train) else ""
    add("pilot", shard=pilot)
    add(
        "train",
        drafter=dict(drafter),
        # Weights in training: float32 on a CPU, on a GPU bfloat16 with float32 masters.
        weights="float32" if config.device == "cpu" else "bfloat16",
        training=config.train.model_dump(mode="json", exclude=_TRAIN_FREE),
        windows=windows(config, shards.train),
        held_out=list(shards.held_out),
    )
    add(
        "evaluate",
        target=model,
        decoding=config.evaluate.model_dump(mode="json"),
        chat_template_args=config.target.chat_template_args,
        context_length=context,
    )
    add("report", counts=dict(counts))
    return Specs(spec, fp)
