"""Whether a server is the one that the configuration means: it answers, serves this model, and has room.

Read once at a start and once by every job that finds a server, managed or somebody else's. A server that is found may be
full of rows, so nothing is asked of it that would wait behind them. The names of the routes and fields are sglang_api's;
requests here are few and small, so the standard library's client does.
"""

from __future__ import annotations

import http.client
import json
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill.config import Config
from draftmill.engines import sglang_api
from draftmill.engines.base import Request, Sampling
from draftmill.engines.sglang_api import Served
from draftmill.errors import UserError
from draftmill.target.files import context_length

_ASK_S, _CANARY_S, _LOOK_S = 10.0, 120.0, 2.0
# From so many times what a server runs at once, rows in flight mostly wait in its queue.
_CROWDED = 1.5
# Proxies of the environment are for the world outside, not for a server beside us.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


# What a server that goes away in the middle of a reply looks like, beside the system's own errors.
_FAULTS = (OSError, ValueError, http.client.HTTPException)


class NotYet(Exception):
    """The server does not answer, or not well, but still may."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a server holds: tokens of its KV cache, and rows that it runs at once (0 if it does not say)."""

    kv_tokens: int
    running: int


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
    except _FAULTS as error:
        raise NotYet(f"{url} cannot be reached or read ({error or type(error).__name__})") from None


def prove(url: str, expected: Mapping[str, Any], *, first: bool) -> Room:
    """The server's room, if it is what `expected` says and, when this is its `first` proof, answers a prompt.

    `expected`: model, revision, context and kv_tokens. Raises NotYet while it may still come up, UserError if it is
    another server than expected.
    """
    _answer(url + sglang_api.HEALTH)
    info = _info(url)
    found = sglang_api.served(info)
    refuse_other(url, found, expected["model"], expected["revision"], expected["context"])
    tokens = int(info.get("max_total_num_tokens") or 0)
    if tokens < expected["kv_tokens"]:
        raise UserError(
            f"{url} has a KV cache of {tokens} tokens, less than {expected['kv_tokens']}: something else holds memory of "
            "the GPU, or generate.sglang.server.flags leave it too little."
        )
    if first:
        _first_answer(url)
    return Room(tokens, found.running or 0)


def crowded(in_flight: int, running: int) -> str:
    """A warning for a load far above what a server runs at once; "" if there is nothing to warn of."""
    if not running or in_flight <= _CROWDED * running:
        return ""
    return (
        f"generate.sglang.in_flight is {in_flight} and the server runs at most {running} rows at once: the others wait in its "
        f"queue while their deadlines run; set it near {running}, or give the server more room (draftmill bench generate)."
    )


def _answer(url: str) -> None:
    try:
        with _open(url, timeout=_ASK_S) as reply:
            reply.read()
    except urllib.error.HTTPError as error:
        raise NotYet(f"{url} replies {error.code}") from None
    except _FAULTS as error:
        raise NotYet(f"{url} cannot be reached ({error or type(error).__name__})") from None


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


def check_urls(
    config: Config, urls: Sequence[str], *, patience_s: float, say: Callable[[str], None] = print
) -> list[str]:
    """Those of the servers at `urls` that answer, each of which serves the target as configured.

    One that is away is left to later jobs as long as another answers; when none does they are asked again for
    `patience_s`. Raises UserError for a server that serves something else, and when none answered in time.
    """
    end, context = time.monotonic() + patience_s, context_length(config.target)
    said = False
    while True:
        found, away = _answering(config, urls, context, say)
        if found:
            for reason in away:
                say(f"generate.sglang.urls: {reason}: this job does without it.")
            return found
        if time.monotonic() >= end:
            raise UserError(f"generate.sglang.urls: {away[0]}: start it, or take it out of the list.")
        if not said:
            said = True
            say(f"generate.sglang.urls: no server answers ({away[0]}): waiting up to {patience_s:g} s for one.")
        time.sleep(min(_LOOK_S, patience_s / 4))


def _answering(
    config: Config, urls: Sequence[str], context: int, say: Callable[[str], None]
) -> tuple[list[str], list[str]]:
    """The right servers that answer, and why others do not."""
    found, away = list[str](), list[str]()
    for url in urls:
        try:
            served = sglang_api.served(_info(url))
        except NotYet as reason:
            away.append(str(reason))
            continue
        refuse_other(url, served, config.target.model, config.target.revision, context)
        if words := crowded(config.generate.sglang.in_flight, served.running or 0):
            say(words)
        found.append(url)
    return found, away
