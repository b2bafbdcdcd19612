"""The command line of a managed server, and the digest that says whether a running one is the one that is wanted.

The spec covers what the server is: model, arithmetic, context, flags, interpreter, GPUs. Sampling is no part of it, for
every request spells it out; so stages and settings that differ only in sampling share a server.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from draftmill.canonical import fingerprint
from draftmill.config import Config
from draftmill.target.files import context_length

Flag = bool | int | float | str
# The largest batch for which SGLang 0.5.17 captures CUDA graphs by default is 256; beyond it a step costs twice.
_GRAPHS_AT_MOST = 1024


@dataclass(frozen=True, slots=True)
class Wanted:
    """A server as a configuration wants it: its spec, its command line with {port}, its environment."""

    spec: str
    model: str
    revision: str | None
    context: int
    gpus: int
    command: tuple[str, ...]
    environment: Mapping[str, str]


def wanted(config: Config, identity: str) -> Wanted:
    """The server that `config` wants for the target of this identity (target/files.py)."""
    server, target = config.generate.sglang.server, config.target
    context = context_length(target)
    command = _command(config, context)
    shown = fingerprint([identity, list(command), dict(server.environment), server.gpus, config.dtype, context])
    return Wanted(
        spec=f"sglang {shown}",
        model=target.model,
        revision=target.revision,
        context=context,
        gpus=server.gpus,
        command=command,
        environment=dict(server.environment),
    )


def _command(config: Config, context: int) -> tuple[str, ...]:
    server = config.generate.sglang.server
    if server.command is not None:
        return tuple(part.replace("{model}", config.target.model) for part in server.command)
    flags = {**_flags(config, context), **server.flags}
    python = server.python or sys.executable
    words = [python, "-m", "sglang.launch_server"]
    for name, value in flags.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not False:
            words += [f"--{name}", str(value)]
    return (*words, "--host", "127.0.0.1", "--port", "{port}")


def _flags(config: Config, context: int) -> dict[str, Flag]:
    target, sglang = config.target, config.generate.sglang
    return {
        "model-path": target.model,
        "revision": target.revision or False,
        "trust-remote-code": target.trust_remote_code,
        "dtype": config.dtype,
        "context-length": context,
        "tp-size": sglang.server.gpus,
        # Prompts are read once: a cache of prefixes would only hold memory that rows could use.
        "disable-radix-cache": True,
        "cuda-graph-max-bs-decode": min(sglang.in_flight, _GRAPHS_AT_MOST),
        # Tokens that move are what tells a living server from a stuck one.
        "enable-metrics": True,
    }
