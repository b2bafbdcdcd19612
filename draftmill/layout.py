"""Every name in the store, in one place.

Content decides names: a shard is named by its prompts, an object by its shard and the fingerprint of all that decides
its bytes. Rules, stages and readers take names from here only.
"""

from __future__ import annotations

import secrets

INDEX = "prompts/index.json"
# Where rules and prompts leave their objects; a plan lists these alone.
FOLDERS = ("prompts/", "completions/", "audits/", "hidden/", "pilot/", "drafter/", "eval/", "report/")
# What earlier indexes held (prompts/history.py).
HISTORY = "prompts/history.parquet"
KIN = "prompts/kin.json"
# What training leaves in the folder of a window.
DRAFTER_FILES = ("model.safetensors", "config.json", "resume/trainer.safetensors", "train.json")
BUILD = "progress/build.json"


def prompts(shard: str) -> str:
    """The prompts of a shard."""
    return f"prompts/{shard}.parquet"


def completions(shard: str, gen: str) -> str:
    """The answers to a shard's prompts."""
    return f"completions/{shard}-{gen}.parquet"


def rejected(shard: str, gen: str) -> str:
    """The rows of a shard that failed, each with a typed reason."""
    return f"completions/{shard}-{gen}.rejected.parquet"


def audit(shard: str, aud: str) -> str:
    """The verdict on a completions shard."""
    return f"audits/{shard}-{aud}.json"


def audit_page(shard: str, aud: str) -> str:
    """The same verdict for people."""
    return f"audits/{shard}-{aud}.html"


def failed_audit(shard: str, aud: str) -> str:
    """Where the verdict on a shard that is over a limit stays for people; no rule makes or reads it."""
    return f"audits/failed/{shard}-{aud}.json"


def audit_set(fp: str) -> str:
    """The audit page of the whole set."""
    return f"audits/set-{fp}.html"


def hidden(shard: str, ext: str) -> str:
    """The hidden states of a completions shard."""
    return f"hidden/{shard}-{ext}.safetensors"


def held_out_hidden(shard: str, ext: str) -> str:
    """The hidden states of a held-out shard, which are never temporary."""
    return f"hidden/held-out/{shard}-{ext}.safetensors"


def drafter(train: str, window: int | str) -> str:
    """The folder of the drafter after a window."""
    return f"drafter/{train}/window-{window}"


def evaluation(fp: str) -> str:
    """The measured acceptance of a drafter."""
    return f"eval/{fp}.json"


def report(fp: str) -> str:
    """The report of a run."""
    return f"report/{fp}.html"


def pilot(fp: str) -> str:
    """What the pilot shard measured."""
    return f"pilot/{fp}.json"


def journal(stage: str, name: str) -> str:
    """The folder of a job's unfinished work; gone when its output is published."""
    return f"journal/{stage}/{name}"


def progress(stage: str, name: str) -> str:
    """The heartbeat of a job."""
    return f"progress/{stage}/{name}.json"


def claim(stage: str, name: str) -> str:
    """Who works on a job now (store/claims.py)."""
    return f"claims/{stage}/{name}.json"


def record(stage: str, name: str) -> str:
    """The record of a finished job."""
    return f"records/{stage}/{name}.json"


def probe() -> str:
    """An object that a build writes and removes to see whether it may: no two builds have the same."""
    return f"progress/.probe-{secrets.token_hex(6)}"
