"""A whole project at toy size: a random target with a real tokenizer and chat template, prompts, and a configuration.

Everything is seeded and small, so that the real Snakefile builds it in a minute on one core.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unused|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NOUNS = [
    "river",
    "bridge",
    "market",
    "engine",
    "garden",
    "letter",
    "window",
    "planet",
    "bottle",
    "castle",
    "orange",
    "lantern",
]
VERBS = ["describe", "compare", "explain", "count", "sort", "invent", "praise", "doubt", "measure", "draw"]


def make_tokenizer(folder: Path) -> Any:
    """A byte-level tokenizer without merges: one token a byte, and four special ones."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_target(folder: Path, kind: str = "llama", layers: int = 4) -> None:
    """A seeded random Llama or Qwen3 with the tokenizer above, as a Hugging Face folder."""
    import torch
    import transformers

    tokenizer = make_tokenizer(folder)
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": kind == "llama",
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
        "pad_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        "bos_token_id": None,
        # Wide enough that a random model has opinions: near-uniform logits would make every check blind.
        "initializer_range": 0.25,
    }
    config = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[kind](**settings)
    torch.manual_seed(7)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def prompt_texts(count: int, seed: int = 0) -> list[str]:
    """Distinct prompts, the same for the same seed."""
    rng = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        found[f"{rng.choice(VERBS)} the {rng.choice(NOUNS)} and the {rng.choice(NOUNS)} {rng.randrange(1000)}"] = None
    return list(found)


def write_prompts(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")


def config_values(**changes: Any) -> dict[str, Any]:
    """The toy configuration; `changes` replace whole sections' keys, as in generate={"temperature": 0}."""
    values: dict[str, Any] = {
        "device": "cpu",
        "store": "build",
        "target": {"model": "target"},
        "prompts": {"sources": [{"path": "prompts.jsonl"}], "shard_rows": 18, "held_out": 0.12},
        "generate": {"max_new_tokens": 24, "temperature": 1.0, "batch_size": 2, "flush_rows": 1, "max_token_run": 20},
        "audit": {
            "max_repetitive": 1.0,
            "max_short": 1.0,
            "max_spike": 1.0,
            "max_empty": 1.0,
            "min_mean_loss_tokens": 1.0,
            "max_duplicates": 1.0,
        },
        "hidden": {"taps": [0, 2], "batch_tokens": 256},
        "drafter": {"layers": 1, "block_size": 4},
        "train": {"epochs": 2, "anchors": 4, "batch_rows": 4, "max_length": 128, "save_every": 2},
        "evaluate": {"max_prompts": 3, "max_new_tokens": 8, "bootstrap": 50},
    }
    for section, change in changes.items():
        values[section] = {**values.get(section, {}), **change} if isinstance(change, dict) else change
    return values


class Project:
    """A folder with a target, prompts and a configuration, built by the repository's own Snakefile."""

    def __init__(self, folder: Path, prompts: int = 60) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "target").exists():
            make_target(folder / "target")
        write_prompts(folder / "prompts.jsonl", prompt_texts(prompts))
        self.configure()

    def configure(self, **changes: Any) -> None:
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config_values(**changes)), encoding="utf-8")

    @property
    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("DRAFTMILL_")}
        return {**kept, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

    def command(self, *arguments: str, gpus: str = "gpu=2") -> list[str]:
        base = [
            sys.executable,
            "-m",
            "snakemake",
            "--snakefile",
            str(ROOT / "Snakefile"),
            "--directory",
            str(self.folder),
        ]
        base += ["--configfile", str(self.folder / "config.yaml"), "--cores", "2"]
        return [*base, *(["--resources", gpus] if gpus else []), *arguments]

    def run(self, *arguments: str, gpus: str = "gpu=2") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments, gpus=gpus),
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def build(self) -> None:
        result = self.run()
        assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]

    def plan(self) -> dict[str, int]:
        """Jobs that a dry run would start, by rule, without `all` and the sentinels."""
        return {rule: count for rule, count in self.table().items() if rule not in ("all", "gpu_free")}

    def table(self) -> dict[str, int]:
        """Jobs that a dry run would start, by rule."""
        result = self.run("-n", "--quiet", "rules")
        text = result.stdout + result.stderr
        assert result.returncode == 0, text
        if "Nothing to be done" in text:
            return {}
        lines = text.split("Job stats:")[1].splitlines()
        table = [line.split() for line in lines if len(line.split()) == 2 and line.split()[1].isdigit()]
        return {rule: int(count) for rule, count in table if rule != "total"}

    def objects(self) -> dict[str, bytes]:
        """Everything in the store but progress and records, which may hold times."""
        store = self.folder / "build"
        files = sorted(path for path in store.rglob("*") if path.is_file())
        return {
            path.relative_to(store).as_posix(): path.read_bytes()
            for path in files
            if not path.relative_to(store).as_posix().startswith(("progress/", "records/"))
        }
