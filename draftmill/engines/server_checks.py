"""Whether a server is the one that the configuration means: it answers, serves this model, and has room.

Read once at a start and once by every job that finds a server, managed or somebody else's. The names of the routes and
fields are sglang_api's; requests here are few and small, so the standard library's client does.
"""

from __future__ import annotations

import json
import secrets
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftmill.config import Config
from draftmill.engines import sglang_api
from draftmill.engines.base import Request, Sampling
from draftmill.engines.sglang_api import Served
from draftmill.errors import UserError
from draftmill.target.files import context_length

_ASK_S, _CANARY_S = 10.0, 120.0
# Proxies of the environment are for the world outside, not for a server beside us.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class NotYet(Exception):
    """The server does not answer, or not well, but still may."""


def ask(url: str, body: Mapping[str, Any] | None = None, timeout_s: float = _ASK_S) -> Any:
    """The JSON that a route replies, None for an empty reply. Raises NotYet when there is none."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"} if data else {})
    try:
        with _open(request, timeout=timeout_s) as reply:
            text = reply.read()
        return json.loads(text) if text.strip() else None
    except urllib.error.HTTPError as error:
        raise NotYet(f"{url} replies {error.code}") from None
    except (OSError, ValueError) as error:
        raise NotYet(f"{url} cannot be reached or read ({error})") from None


def prove(url: str, expected: Mapping[str, Any]) -> int:
    """Tokens that the server's KV cache holds, if it is what `expected` says and answers a first prompt.

    `expected`: model, revision, context and kv_tokens. Raises NotYet while it may still come up, UserError if it is
    another server than expected.
    """
    _answer(url + sglang_api.HEALTH)
    info = _info(url)
    refuse_other(url, sglang_api.served(info), expected["model"], expected["revision"], expected["context"])
    tokens = int(info.get("max_total_num_tokens") or 0)
    if tokens < expected["kv_tokens"]:
        raise UserError(
            f"{url} has a KV cache of {tokens} tokens, less than {expected['kv_tokens']}: something else holds memory of "
            "the GPU, or generate.sglang.server.flags leave it too little."
        )
    _first_answer(url)
    return tokens


def _answer(url: str) -> None:
    try:
        with _open(url, timeout=_ASK_S) as reply:
            reply.read()
    except urllib.error.HTTPError as error:
        raise NotYet(f"{url} replies {error.code}") from None
    except OSError as error:
        raise NotYet(f"{url} cannot be reached ({error})") from None


def _info(url: str) -> Mapping[str, Any]:
    info = ask(url + sglang_api.SERVER_INFO)
    if not isinstance(info, Mapping):
        raise NotYet(f"{url}{sglang_api.SERVER_INFO} says nothing")
    return info


def _first_answer(url: str) -> None:
    """A few greedy tokens for ids that every vocabulary has, so that weights must be loaded and kernels built."""
    request = Request(("start", 0), (1, 2, 3, 4), 0, Sampling(4, 0.0, 1.0, 0, 0.0))
    body = sglang_api.body(request, (0,), secrets.token_hex(16))
    reply = ask(url + sglang_api.GENERATE, body, _CANARY_S)
    ids = reply.get("output_ids") if isinstance(reply, Mapping) else None
    if not ids:
        raise NotYet(f"{url} does not answer a first prompt: {str(reply)[:200]}")


def refuse_other(url: str, found: Served, model: str, revision: str | None, context: int) -> None:
    """Raise UserError unless the server says that it serves this model, revision and context length."""
    if not _same_model(found.model, model):
        raise UserError(f"{url} serves {found.model or 'a model it does not name'}, but target.model is {model}.")
    if revision is not None and revision not in (found.revision or "") and revision not in found.model:
        raise UserError(
            f"{url} serves revision {found.revision or 'unknown'} of {model}, but target.revision is {revision}: start it "
            f"with --revision {revision}."
        )
    if found.context is None or found.context < context:
        raise UserError(
            f"{url} takes rows of {found.context or 'unknown'} tokens, but the configuration means {context}: start it "
            f"with --context-length {context}, or set target.context_length."
        )


def _same_model(served: str, model: str) -> bool:
    """Whether two names mean one model: equal, the same folder, a folder of the same name, or the hub's copy of an id."""
    if served == model or Path(served).resolve() == Path(model).resolve():
        return True
    if Path(model).is_dir():
        return bool(served) and Path(served).name == Path(model).resolve().name
    return f"models--{model.replace('/', '--')}" in served


def check_urls(config: Config) -> None:
    """Raise UserError unless every server under generate.sglang.urls serves the target as configured."""
    for url in config.generate.sglang.urls:
        try:
            found = sglang_api.served(_info(url))
        except NotYet as reason:
            raise UserError(f"generate.sglang.urls: {reason}: start it, or take it out of the list.") from None
        refuse_other(url, found, config.target.model, config.target.revision, context_length(config.target))
