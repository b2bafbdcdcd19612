"""The configuration: every key with its type, bounds, default and meaning.

One typed model is the only source: the YAML files are checked against it, the JSON schema for editors and the reference
in config/README.md are generated from it, and stage specs (specs.py) pick from it. Keys are forbidden unless known, so
a misspelt key is an error and never a silent default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from draftmill.errors import UserError
from draftmill.gpu.policy import GatePolicy
from draftmill.store.settings import S3Settings

Share = float


class Section(BaseModel):
    """A frozen part of the configuration that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TargetConfig(Section):
    """The model whose decoding is to become faster."""

    model: str = Field(description="A folder with a Hugging Face model, or a hub id such as Qwen/Qwen3-8B.")
    revision: str | None = Field(
        None, description="Commit of the hub repository; required for a hub id, so that the target cannot change."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Weights and arithmetic of the target; auto is float32 on cpu and bfloat16 on cuda."
    )
    attention: Literal["sdpa", "eager", "flash_attention_2"] = Field(
        "sdpa", description="Attention implementation that transformers uses for the target."
    )
    trust_remote_code: bool = Field(False, description="Run Python code that the model's repository carries.")
    context_length: int | None = Field(
        None, gt=0, description="Longest row in tokens, prompt and answer together; default: what the model declares."
    )
    chat_template_args: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="Extra arguments of the chat template, such as enable_thinking: false."
    )


class SourceConfig(Section):
    """One place that prompts come from."""

    path: str = Field(description="A file, a folder, a glob, or the same under s3://; JSONL, JSON, Parquet or CSV.")
    name: str | None = Field(None, description="Label in reports and acceptance tables; default: the file's stem.")
    field: str | None = Field(
        None, description="Column that holds the prompt; default: messages, conversations, prompt or instruction."
    )
    answers: Literal["drop", "keep"] = Field(
        "drop",
        description="keep: the record's answer (last assistant turn, or input_ids with loss_mask) is taken as an "
        "imported completion instead of being generated.",
    )


class PromptsConfig(Section):
    """Which prompts, how they are split and how much bad input is tolerated."""

    sources: list[SourceConfig] = Field(min_length=1, description="Where prompts come from, read in this order.")
    max_prompts: int | None = Field(None, gt=0, description="Take only the first so many good records.")
    system: str | None = Field(None, description="System turn given to prompts that have none.")
    shard_rows: int = Field(456, ge=4, description="Average prompts a shard; sizes vary from half to a few times that.")
    held_out: Share = Field(
        0.02, gt=0, lt=0.5, description="Share of the prompts kept for evaluation, chosen by prompt id."
    )
    max_bad: Share = Field(
        0.01, ge=0, le=1, description="Share of unreadable or refused records above which the build stops."
    )


class ServerConfig(Section):
    """SGLang servers of the build's own: how they are started and when they end. Nothing here decides a row."""

    gpus: int = Field(
        1, gt=0, description="GPUs of one server (tensor parallelism); a generate job then asks for as many."
    )
    flags: dict[str, bool | int | float | str] = Field(
        default_factory=dict,
        description="Flags of `sglang.launch_server` without the dashes, over those that draftmill sets; true stands for "
        "a bare flag and false takes one away.",
    )
    python: str | None = Field(
        None, description="Python interpreter that SGLang is installed for; default: the one that runs draftmill."
    )
    environment: dict[str, str] = Field(
        default_factory=dict, description="Environment variables of the server's process, such as PYTHONPATH."
    )
    command: list[str] | None = Field(
        None,
        min_length=1,
        description="Whole command line in place of `python -m sglang.launch_server` and its flags, for a wrapper or a "
        "stand-in; {port} and {model} are filled in.",
    )
    start_seconds: float = Field(
        1200.0, gt=0, description="Seconds within which a server must have loaded its weights and answered."
    )
    idle_seconds: float = Field(300.0, gt=0, description="Seconds without a job after which a server ends.")
    stop_seconds: float = Field(15.0, ge=0, description="Seconds between SIGTERM and SIGKILL of a server.")
    max_restarts: int = Field(6, ge=0, description="Restarts within an hour after which a server is given up.")
    min_kv_tokens: int | None = Field(
        None, gt=0, description="Tokens that the server's KV cache must hold at least; default: one longest row."
    )
    first_port: int = Field(
        21000, ge=1024, le=60000, description="Servers listen on 127.0.0.1, on ports from this one on in steps of 100."
    )


class SglangConfig(Section):
    """How rows are asked of SGLang, and when a server counts as sick. Nothing here decides a row."""

    urls: list[str] = Field(
        default_factory=list,
        description="Servers that somebody else runs, such as http://host:30000; default: servers of the build's own.",
    )
    server: ServerConfig = ServerConfig()
    in_flight: int = Field(
        512,
        gt=0,
        description="Rows at a server at once. CUDA graphs must reach as far, or decoding falls back to single kernels.",
    )
    ahead_rows: int | None = Field(
        None,
        ge=0,
        description="Most rows of coming shards that are generated ahead, so that neither a shard's slow last rows nor the "
        "time between two jobs leaves a server idle; they wait in the journals of those shards. null: two minutes of what "
        "the servers are measured to do, and at least eight times what they take at once.",
    )
    row_seconds: float = Field(120.0, gt=0, description="Deadline of a row, beside token_seconds for each token.")
    token_seconds: float = Field(
        0.25, ge=0, description="Seconds that each token of a row's limit adds to its deadline."
    )
    retries: int = Field(
        3, ge=0, description="Times a try of a row is repeated after a timeout, an abort or a server's error."
    )
    backoff_seconds: float = Field(
        1.0, gt=0, description="Pause before the first such repetition; it doubles each time, with jitter, up to 30 s."
    )
    canary_minutes: float = Field(
        5.0, gt=0, description="Minutes between two canaries: one fixed prompt whose greedy answer must not change."
    )
    stall_seconds: float = Field(
        180.0, gt=0, description="A server with rows in flight that decodes no token for so long is sick."
    )
    bad_window: int = Field(64, ge=4, description="Last rows of a server whose failures are counted.")
    max_bad: Share = Field(
        0.5, gt=0, le=1, description="Share of failures among them from which the server counts as sick."
    )
    restart_hours: float | None = Field(
        24.0, gt=0, description="Age at which a server of the build's own is drained and started again; null: never."
    )
    restart_host_gib: float | None = Field(
        None, gt=0, description="Host memory of a server of the build's own (GiB) from which it is started again."
    )
    patience_seconds: float = Field(
        600.0, gt=0, description="Seconds that a server under urls may be away or sick before the build stops."
    )
    idle_seconds: float = Field(
        120.0, gt=0, description="Seconds that the process which asks the servers stays when no job needs it."
    )

    @field_validator("urls")
    @classmethod
    def _plain_addresses(cls, urls: list[str]) -> list[str]:
        plain = [url.rstrip("/") for url in urls]
        if any(not url.startswith(("http://", "https://")) for url in plain) or len(set(plain)) != len(plain):
            raise ValueError("give different addresses that begin with http:// or https://")
        return plain


class MixSetting(Section):
    """One of several settings that answers are mixed from; what is null is that of `generate` itself."""

    name: str = Field(min_length=1, description="Label of its rows, in their column `setting`.")
    weight: float = Field(1.0, gt=0, description="How often it is chosen, relative to the others that a row may have.")
    sources: list[str] | None = Field(None, description="Names of the sources whose prompts it is for; default: all.")
    max_new_tokens: int | None = Field(None, gt=0, description="Longest answer in tokens.")
    temperature: float | None = Field(None, ge=0, description="Sampling temperature; 0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1, description="Nucleus sampling mass.")
    top_k: int | None = Field(None, ge=0, description="Sample from so many best tokens; 0: all.")
    min_p: float | None = Field(None, ge=0, lt=1, description="Least probability relative to the best token.")
    chat_template_args: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="Arguments of the chat template, over those of target.chat_template_args."
    )


class GenerateConfig(Section):
    """How the target answers the prompts. Everything but flush_* and sglang decides the rows."""

    engine: Literal["transformers", "sglang"] = Field(
        "transformers", description="Engine that generates: transformers in the job itself, or SGLang servers."
    )
    max_new_tokens: int = Field(2048, gt=0, description="Longest answer in tokens; a cut answer is kept as data.")
    temperature: float = Field(0.6, ge=0, description="Sampling temperature; 0 is greedy.")
    top_p: float = Field(0.95, gt=0, le=1, description="Nucleus sampling mass.")
    top_k: int = Field(20, ge=0, description="Sample from so many best tokens; 0: all.")
    min_p: float = Field(0.0, ge=0, lt=1, description="Least probability relative to the best token.")
    samples: int = Field(1, gt=0, description="Answers a prompt.")
    seed: int = Field(0, ge=0, description="Base seed; each row and sample derives its own.")
    batch_size: int = Field(16, gt=0, description="Rows a forward (transformers engine); part of what decides a row.")
    flush_rows: int = Field(64, gt=0, description="Rows after which finished rows are flushed to the journal.")
    flush_seconds: float = Field(30.0, gt=0, description="Seconds after which finished rows are flushed at the latest.")
    attempts: int = Field(2, gt=0, description="Tries a row gets before it goes to the rejected file.")
    max_token_run: int = Field(
        64, gt=1, description="A row that ends in so many equal tokens in a row is degenerate and is refused."
    )
    mix: list[MixSetting] = Field(
        default_factory=list,
        description="Several settings mixed by weight, chosen for each answer by its prompt and sample.",
    )
    sglang: SglangConfig = SglangConfig()

    @field_validator("mix")
    @classmethod
    def _names_differ(cls, mix: list[MixSetting]) -> list[MixSetting]:
        if len({setting.name for setting in mix}) != len(mix):
            raise ValueError("give every setting a name of its own")
        return mix

    @property
    def longest_answer(self) -> int:
        """The largest limit that any row may have, in tokens."""
        return max([self.max_new_tokens, *(s.max_new_tokens for s in self.mix if s.max_new_tokens)])


class AuditConfig(Section):
    """Limits a completions shard must keep. A shard over one stops everything behind it.

    A share is over its limit when chance does not explain it (exact binomial test at 1%), so a few bad rows of a small
    shard do not stop a build. Rows cut by length are no spike and are never short.
    """

    max_spike: Share = Field(
        0.30,
        ge=0,
        le=1,
        description="Largest share of answers with one exact number of loss tokens (answers cut by length left out).",
    )
    short_tokens: int = Field(8, ge=1, description="An answer not cut by length with fewer loss tokens is short.")
    max_short: Share = Field(0.30, ge=0, le=1, description="Largest share of short answers.")
    max_empty: Share = Field(
        0.02, ge=0, le=1, description="Largest share of answers with no text beside special tokens and thinking marks."
    )
    max_cut: Share = Field(1.0, ge=0, le=1, description="Largest share of answers cut off by length.")
    max_unclosed_thinking: Share = Field(
        0.5, ge=0, le=1, description="Largest share of answers that open their thinking and never close it."
    )
    max_repetitive: Share = Field(
        0.10,
        ge=0,
        le=1,
        description="Largest share of answers of 32 tokens or more, over half of whose 4-grams occurred in them before.",
    )
    max_duplicates: Share = Field(
        0.20, ge=0, le=1, description="Largest share of answers equal, token for token, to another prompt's answer."
    )
    max_boundary_moved: Share = Field(
        0.02,
        ge=0,
        le=1,
        description="Largest share of answers, in data from elsewhere, that do not begin where the rendered prompt ends.",
    )
    max_rejected: Share = Field(0.05, ge=0, le=1, description="Largest share of rows that failed to generate.")
    min_mean_loss_tokens: float = Field(16.0, ge=0, description="Smallest mean number of loss tokens an answer.")
    examples: int = Field(5, ge=0, description="Example answers shown for each broken limit.")


class HiddenConfig(Section):
    """Hidden states of the target: which layers, in what form, kept how long."""

    taps: Literal["auto"] | list[int] = Field(
        "auto", description="Target layers whose outputs the drafter reads (0-based); auto spreads num_taps of them."
    )
    num_taps: int = Field(5, gt=0, description="Number of taps when taps is auto.")
    batch_tokens: int = Field(8192, gt=0, description="Most tokens in one packed forward; a longer row goes alone.")
    policy: Literal["keep", "window"] = Field(
        "keep", description="keep: states stay; window: a window is extracted, trained on and removed."
    )
    window_shards: int = Field(8, gt=0, description="Shards a window, under policy window.")
    window_lead: int = Field(
        1, ge=0, description="Windows that may be extracted ahead of the one in training, under policy window."
    )
    budget_gib: float = Field(
        200.0,
        gt=0,
        description="Most hidden states in the store at once; the plan refuses what the pilot shows to exceed it.",
    )
    canary_rows: int = Field(2, ge=1, description="Rows a shard that are computed again alone and compared.")


class DrafterConfig(Section):
    """Shape of the DFlash drafter; what is null follows the target."""

    layers: int = Field(5, gt=0, description="Decoder layers.")
    block_size: int = Field(16, ge=2, description="Tokens a block: the anchor and block_size - 1 proposals.")
    heads: int | None = Field(None, gt=0, description="Query heads; default: the target's.")
    kv_heads: int | None = Field(None, gt=0, description="Key and value heads; default: the target's.")
    head_dim: int | None = Field(None, gt=0, description="Width of a head; default: the target's.")
    intermediate_size: int | None = Field(None, gt=0, description="Width of the MLP; default: the target's.")
    sliding_layers: int = Field(0, ge=0, description="Leading layers with causal sliding-window attention.")
    sliding_window: int = Field(2048, gt=0, description="Window of those layers in tokens.")
    mask_token_id: int | None = Field(None, ge=0, description="Id fed at masked slots; default: an unused special id.")

    @model_validator(mode="after")
    def _sliding_fits(self) -> DrafterConfig:
        if self.sliding_layers > self.layers:
            raise ValueError(f"sliding_layers is {self.sliding_layers} but there are only {self.layers} layers")
        return self


class TrainConfig(Section):
    """How the drafter is trained."""

    epochs: int = Field(6, gt=0, description="Passes over each window of hidden states.")
    learning_rate: float = Field(6e-4, gt=0, description="Peak learning rate of AdamW.")
    min_learning_rate: float = Field(0.0, ge=0, description="Learning rate at the end of the cosine.")
    warmup: Share = Field(0.04, ge=0, lt=1, description="Share of the steps with a linearly rising rate.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay of matrices.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's moment decay.")
    clip_norm: float = Field(1.0, gt=0, description="Largest gradient norm.")
    anchors: int = Field(512, gt=0, description="Anchor positions sampled a row and step.")
    batch_rows: int = Field(8, gt=0, description="Rows an optimiser step.")
    micro_batch_rows: int | None = Field(
        None,
        gt=0,
        description="Rows in one forward; a step adds up their gradients. Saves memory and changes only how sums are "
        "rounded; default: all rows of a step.",
    )
    max_length: int = Field(
        3072, gt=1, description="Longest row in tokens; the tail of a longer one is not trained on."
    )
    loss_decay: float | None = Field(
        None, gt=0, description="Gamma of the position weight exp(-(k-1)/gamma); default by block size: 4, 5 or 7."
    )
    loss: Literal["cross_entropy", "dpace"] = Field(
        "cross_entropy", description="Token weights: fixed decay, or D-PACE's accepted-prefix weights."
    )
    seed: int = Field(0, ge=0, description="Seed of initial weights, order and anchors.")
    save_every: int = Field(200, gt=0, description="Optimiser steps between resumable checkpoints inside a window.")


class EvaluateConfig(Section):
    """How acceptance is measured."""

    max_prompts: int = Field(256, gt=0, description="Held-out prompts that are decoded.")
    max_new_tokens: int = Field(512, gt=0, description="Tokens decoded a prompt.")
    prompt_lookup_tokens: int = Field(10, gt=0, description="Proposals of the prompt_lookup baseline.")
    bootstrap: int = Field(1000, gt=0, description="Resamples for the intervals.")


class ResourcesConfig(Section):
    """What a job may use on this host."""

    cpu_threads: int = Field(1, gt=0, description="Threads of a job when device is cpu.")
    cpu_threads_alone: int = Field(
        1, gt=0, description="Threads of training and evaluation when device is cpu; they run alone at the end."
    )
    train_gpus: int = Field(1, gt=0, description="GPUs of the training job.")
    gpu_retries: int = Field(
        1, ge=0, description="Times a failed GPU job is started again, on another GPU if its own turned busy or sick."
    )
    gpu_hour_price: float | None = Field(
        None, ge=0, description="Price of one GPU for one hour, in any currency; then costs are told beside GPU-hours."
    )


class PlanConfig(Section):
    """Rates that `draftmill plan` assumes as long as nothing was measured: about one H200 with a target of 27B.

    Finished jobs in the store and the pilot's record take their place. Nothing here decides anything that is built.
    """

    answer_tokens: float | None = Field(
        None, gt=0, description="Tokens an answer; default: half of generate.max_new_tokens."
    )
    generate_tokens_per_second: float = Field(2000.0, gt=0, description="Tokens that a GPU generates a second.")
    extract_tokens_per_second: float = Field(8000.0, gt=0, description="Tokens that a GPU extracts a second.")
    train_rows_per_second: float = Field(
        1.0, gt=0, description="Rows that a GPU trains on a second, each pass counted."
    )
    evaluate_tokens_per_second: float = Field(
        10.0, gt=0, description="Tokens that a GPU evaluates a second, all three ways of decoding together."
    )


def _folder(path: str) -> str:
    """The store in its plain spelling, as Snakemake wants it. Raises ValueError for what its rules would read otherwise."""
    if path.startswith("s3://"):
        return _bucket(path)
    plain = str(PurePosixPath(path))
    if not path or "://" in path or plain == "/" or plain.startswith("~") or set(plain) & set("{}\n"):
        raise ValueError("give s3://bucket/prefix or a local folder of the build's own, not ~ and without braces")
    return plain


def _bucket(url: str) -> str:
    plain = url.rstrip("/")
    names = plain.removeprefix("s3://").split("/")
    if any(name in (".", "..") or not re.fullmatch(r"[A-Za-z0-9._=+@,-]+", name) for name in names):
        raise ValueError("give s3://bucket/prefix, of letters, digits and ._=+@,- between single slashes")
    return plain


class Config(Section):
    """The whole configuration."""

    device: Literal["cpu", "cuda"] = Field(description="Where models run.")
    store: Annotated[str, AfterValidator(_folder)] = Field(
        description="Where all outputs live: a folder, or s3://bucket/prefix."
    )
    s3: S3Settings = S3Settings()
    target: TargetConfig
    prompts: PromptsConfig
    generate: GenerateConfig = GenerateConfig()
    audit: AuditConfig = AuditConfig()
    hidden: HiddenConfig = HiddenConfig()
    drafter: DrafterConfig = DrafterConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    resources: ResourcesConfig = ResourcesConfig()
    gate: GatePolicy = GatePolicy()
    plan: PlanConfig = PlanConfig()
    pilot: int = Field(
        0, ge=0, description="Which train shard, counted from 0 in index order, goes first; all others wait for it."
    )

    def gate_device(self, stage: str) -> Literal["cpu", "cuda"]:
        """Where a stage's job needs a GPU of this host: nowhere when it only asks servers that somebody else runs."""
        elsewhere = stage == "generate" and self.generate.engine == "sglang" and bool(self.generate.sglang.urls)
        return "cpu" if elsewhere else self.device

    @property
    def dtype(self) -> Literal["float32", "bfloat16"]:
        """The target's arithmetic with auto resolved."""
        if self.target.dtype != "auto":
            return self.target.dtype
        return "float32" if self.device == "cpu" else "bfloat16"


def parse(values: Mapping[str, Any]) -> Config:
    """Check a mapping as read from YAML. Raises UserError naming each wrong key."""
    try:
        return Config.model_validate(dict(values))
    except ValidationError as error:
        raise UserError("The configuration is wrong: " + "; ".join(_sentence(e) for e in error.errors())) from None


def _sentence(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"]) or "top level"
    if error["type"] == "extra_forbidden":
        return f"{where} is not a known key (config/README.md lists them)"
    if error["type"] == "missing":
        return f"{where} is missing"
    return f"{where}: {error['msg'].removeprefix('Value error, ')} (it is {error['input']!r:.80})"


def load(path: Path) -> Config:
    """Read and check one YAML file. Raises UserError like parse() and read_yaml()."""
    return parse(read_yaml(path))


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises UserError if it is absent, not YAML, or something else."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"There is no configuration file {path}: give one with --configfile.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read as a configuration file ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text, so it is no configuration file.") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no mapping of keys: see config/README.md.")
    return values
