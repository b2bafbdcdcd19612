"""A small output of every stage from inputs that are the same on every machine.

No stage reads another's output here, so that a change shows in its own stage alone. Weights and states come from
numpy's generator, whose numbers are exact everywhere; floats are kept to two digits and compared with a tolerance, ids
are those of a greedy model that is sure of them.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import torch
import transformers

from draftmill.audit.result import audit_tables, combine
from draftmill.audit.tokens import TokenInfo
from draftmill.canonical import canonical_json
from draftmill.config import (
    AuditConfig,
    DrafterConfig,
    EvaluateConfig,
    GenerateConfig,
    HiddenConfig,
    TrainConfig,
    parse,
)
from draftmill.drafter.model import Drafter
from draftmill.drafter.spec import DrafterShape, resolve_shape
from draftmill.engines.transformers import RowSampler, TransformersEngine
from draftmill.hidden_states import HiddenRow, HiddenShard, RowKey, write_shard
from draftmill.prompts.index import INDEX_VERSION, bring_up_to_date
from draftmill.schemas import COMPLETIONS, PROMPTS, REJECTED, read_rows, write_rows
from draftmill.specs import SPEC_VERSIONS
from draftmill.stages.evaluate import HeldOutPrompt, evaluate_drafter
from draftmill.stages.extract import extract_shard
from draftmill.stages.generate import Answering, RowRules, generate_shard
from draftmill.stages.pilot import measure_pilot
from draftmill.stages.train import train_window
from draftmill.store.journal import Journal
from draftmill.store.local import LocalStore
from draftmill.target.model import Tapped
from tests.extract.conftest import Beat as ExtractBeat
from tests.generate.conftest import Beat, prompt
from tests.tiny import config_values, make_tokenizer, write_prompts

STOP = 258
TARGET: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": STOP,
    "pad_token_id": None,
}
TEXTS = ["count the rivers", "explain a bridge", "measure the market and the garden", "praise the moon", "é\n✓ {} \\"]


def exact(shape: tuple[int, ...], seed: int, size: float) -> torch.Tensor:
    """Numbers between -size and size, the same bits on every machine."""
    values = np.random.Generator(np.random.PCG64(seed)).random(int(np.prod(shape)))
    return torch.from_numpy(((2 * values - 1) * size).astype(np.float32).reshape(shape))


def make_target() -> Any:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TARGET)).eval().requires_grad_(False)
    for seed, (name, weight) in enumerate(sorted(model.named_parameters())):
        if weight.dim() > 1:
            weight.copy_(exact(tuple(weight.shape), seed, 2.0 if name.startswith("lm_head") else 0.5))
    return model


def shape() -> DrafterShape:
    target = {**TARGET, "model_type": "llama"}
    drafter = DrafterConfig(layers=1, block_size=4)
    return resolve_shape(drafter, HiddenConfig(taps=[0, 2]), target, mask_token_id=259)


def digits(value: Any) -> Any:
    """The same value with every float to two digits."""
    if isinstance(value, float):
        return round(value, 2)
    if isinstance(value, dict):
        return {str(key): digits(item) for key, item in value.items()}
    return [digits(item) for item in value] if isinstance(value, list | tuple) else value


def prompts(folder: Path) -> Any:
    write_prompts(folder / "chat.jsonl", [f"{text} {number}" for number in range(12) for text in TEXTS])
    values = config_values(
        store=str(folder / "store"), prompts={"sources": [{"path": str(folder / "chat.jsonl")}], "shard_rows": 12}
    )
    store = LocalStore(folder / "store")
    index = bring_up_to_date(
        parse(values),
        store,
        write=True,
        limit_tokens=9999,
        tokenizer="t",
        count_tokens=lambda _: 1,
        cache_dir=folder / "cache",
    )
    rows = {shard.name: read_rows(store.path(f"prompts/{shard.name}.parquet"), PROMPTS) for shard in index.shards}
    return {
        "shards": [[shard.name, shard.split, shard.rows] for shard in index.shards],
        "rows": hashlib.sha256(canonical_json(rows).encode()).hexdigest()[:16],
        "first": rows[index.shards[0].name][0],
    }


def generate(folder: Path) -> Any:
    config = parse(config_values(generate={"temperature": 0.0, "max_new_tokens": 8, "max_token_run": 3, "attempts": 1}))
    table = [
        {"prompt_id": f"p{number}", "source": "chat", "record": canonical_json(prompt(text))}
        for number, text in enumerate(TEXTS)
    ]
    answered = {**prompt("hi"), "answer": {"role": "assistant", "content": "yes"}}
    table.append({"prompt_id": "imported", "source": "chat", "record": canonical_json(answered)})
    write_rows(folder / "prompts.parquet", PROMPTS, table, {})
    sampling: GenerateConfig = config.generate
    tokenizer = make_tokenizer(folder / "tokenizer")
    rules = RowRules(sampling, frozenset({STOP}), TARGET["vocab_size"])
    generate_shard(
        config,
        Answering(TransformersEngine(make_target(), [STOP], sampling), tokenizer, rules, 256),
        prompts=folder / "prompts.parquet",
        completions=folder / "good.parquet",
        rejected=folder / "bad.parquet",
        journal=Journal(LocalStore(folder), "journal"),
        heartbeat=Beat,  # type: ignore[arg-type]
        provenance={},
    )
    good, bad = read_rows(folder / "good.parquet", COMPLETIONS), read_rows(folder / "bad.parquet", REJECTED)
    return {"good": good, "bad": bad, "sampled": sampled()}


def sampled() -> list[list[int]]:
    """What the sampler picks from fixed logits with fixed noise; a generator's own noise is not the same everywhere."""
    logits = exact((4, 50), 5, 4.0)
    settings = ({"top_k": 0, "top_p": 1.0}, {"top_k": 3, "top_p": 1.0}, {"top_k": 9, "top_p": 0.4}, {"min_p": 0.5})

    def noise(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        uniform = exact(tuple(values.shape), generator.initial_seed(), 1.0)
        return values.copy_(-torch.log((uniform + 1.001) / 2.002))

    with mock.patch.object(torch.Tensor, "exponential_", noise):
        samplers = [
            RowSampler(range(4), GenerateConfig(**{"temperature": 1.5, **chosen}), logits.device) for chosen in settings
        ]
        return [sampler(torch.zeros(4, 1), logits.clone()).argmax(-1).tolist() for sampler in samplers]


def completions() -> list[dict[str, Any]]:
    """Fixed rows: plain, cut, repeating, empty, imported with a mask."""
    outputs = [[10, 11, 12, STOP], list(range(40, 52)), [7, 8] * 20 + [STOP], [STOP], [10, 11, 12, STOP], [5, 6, STOP]]
    rows = [
        {
            "prompt_id": f"p{number}",
            "sample": 0,
            "source": "chat" if number % 2 else "code",
            "origin": "imported",
            "prompt_ids": [60 + number, 61, 62],
            "output_ids": output,
            "loss_mask": None,
            "finish_reason": "stop" if output[-1] == STOP else "length",
            "text": "text",
        }
        for number, output in enumerate(outputs)
    ]
    return [*rows[:-1], {**rows[-1], "loss_mask": [True, False, True]}]


def audit_result(sources: tuple[str, ...] = ("chat", "code")) -> Any:
    rejected = [{"prompt_id": "r", "sample": 0, "source": "chat", "reason": "token_run", "detail": ""}]
    return audit_tables(
        "Shard x",
        pa.Table.from_pylist([row for row in completions() if row["source"] in sources], schema=COMPLETIONS),
        pa.Table.from_pylist(rejected, schema=REJECTED),
        AuditConfig(),
        TokenInfo(special_ids=frozenset({256, 257, STOP}), eos_ids=frozenset({STOP})),
        {},
    )


def audit(_folder: Path) -> Any:
    return facts_of(audit_result())


def audit_set(_folder: Path) -> Any:
    return facts_of(combine("The set", [audit_result(("chat",)), audit_result(("code",))], AuditConfig(), {}))


def facts_of(result: Any) -> Any:
    by_source = {name: counts.model_dump(mode="json") for name, counts in result.measurements.by_source.items()}
    return {"by_source": by_source, "checks": [asdict(check) for check in result.checks], "verdict": result.verdict}


def extract(folder: Path) -> Any:
    write_rows(folder / "good.parquet", COMPLETIONS, completions(), {})
    extract_shard(
        parse(config_values(hidden={"batch_tokens": 40})),
        Tapped(make_target(), [0, 2]),
        completions=folder / "good.parquet",
        hidden=folder / "x.safetensors",
        heartbeat=ExtractBeat,  # type: ignore[arg-type]
        provenance={},
    )
    shard = HiddenShard(folder / "x.safetensors")
    last = shard.row(len(shard) - 1)
    return {
        "offsets": shard.offsets.tolist(),
        "input_ids": last.input_ids.tolist(),
        "loss_mask": last.loss_mask.tolist(),
        "hidden": last.hidden[[0, -1], :, :4].float().tolist(),
    }


def pilot(folder: Path) -> Any:
    write_rows(folder / "good.parquet", COMPLETIONS, completions(), {})
    measure_pilot(folder / "good.parquet", states(folder / "x.safetensors", 4, 1), folder / "pilot.json", {})
    record = json.loads((folder / "pilot.json").read_text())
    return {name: value for name, value in record.items() if not name.endswith("_bytes")}


def states(path: Path, rows: int, seed: int) -> Path:
    def row(number: int) -> HiddenRow:
        ids = (torch.arange(14) * 3 + 7 * number + seed) % 40 + 10
        mask = (torch.arange(14) >= 3).to(torch.uint8)
        hidden = exact((14, 2, 32), 100 * seed + number, 1.0).bfloat16()
        return HiddenRow(RowKey(f"p{number}", 0, "chat"), ids.int(), mask, hidden)

    write_shard(path, [row(number) for number in range(rows)], {})
    return path


def train(folder: Path) -> Any:
    head = exact((TARGET["vocab_size"], 32), 1, 1.0)
    result = train_window(
        hidden=[states(folder / "a.safetensors", 6, 1)],
        held_out=[states(folder / "h.safetensors", 2, 2)],
        previous=None,
        output=folder / "drafter",
        journal=folder / "journal",
        shape=shape(),
        target={**TARGET, "model_type": "llama"},
        embed=head,
        head=head,
        config=TrainConfig(epochs=1, anchors=3, batch_rows=3, learning_rate=2e-3),
        device=torch.device("cpu"),
        provenance={},
    )
    config = json.loads((folder / "drafter/config.json").read_text())
    weights = Drafter(shape()).state_dict()
    return {
        "tensors": {name: list(weight.shape) for name, weight in sorted(weights.items())},
        "config": {name: value for name, value in config.items() if name not in ("draftmill", "transformers_version")},
        "steps": [result["steps"], result["rows"], result["held_out_rows"]],
        "loss": [point["loss"] for point in result["curve"]],
        "held_out_loss": result["epochs"][-1]["held_out"]["loss"],
    }


def evaluate(folder: Path) -> Any:
    model = make_target()
    drafter = Drafter(shape()).initialize(0).eval().requires_grad_(False)
    asked = [
        HeldOutPrompt(f"p{number}", "chat" if number % 2 else "code", [20 + number, 30, 40 + 3 * number])
        for number in range(4)
    ]
    result = evaluate_drafter(
        prompts=asked,
        drafter=drafter,
        target=model,
        stop=[STOP],
        config=EvaluateConfig(max_prompts=3, max_new_tokens=10, bootstrap=20, prompt_lookup_tokens=3),
        context_length=256,
        exact=True,
        output=folder / "eval.json",
        provenance={},
    )
    kept = ("prompts", "identical", "divergences", "target", "rows", "too_long")
    summary = {name: result["drafter"][name] for name in ("tokens", "target_forwards", "saved_forwards")}
    return {**{name: result[name] for name in kept}, "drafter": summary, "keys": sorted(result["drafter"])}


STAGES: dict[str, Callable[[Path], Any]] = {
    "prompts": prompts,
    "generate": generate,
    "audit": audit,
    "audit_set": audit_set,
    "extract": extract,
    "pilot": pilot,
    "train": train,
    "evaluate": evaluate,
}


def version(stage: str) -> int:
    return INDEX_VERSION if stage == "prompts" else SPEC_VERSIONS[stage]


def output(stage: str) -> Any:
    """A stage's output as JSON values, floats to two digits."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return json.loads(json.dumps(digits(STAGES[stage](Path(folder)))))
