"""What crosses the wire to SGLang, in one place: names of 0.5.17, checked against its source, and nothing else.

`/generate` is asked with `input_ids` and not streamed: what counts are the ids, which come with the last answer anyway,
and a stream would cost the client one message a row and step. Whether tokens move is read from the server's metrics.
Later versions of SGLang that spell something otherwise are to be met here alone.

A server is known to the client by a `ServerHandle`: managed ones (engines/server.py) can restart, those that somebody
else runs (`FixedServer`) cannot.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from draftmill.engines.base import Failure, Key, Request, Result
from draftmill.errors import UserError

GENERATE, HEALTH, METRICS = "/generate", "/health", "/metrics"
SERVER_INFO, MODEL_INFO, ABORT = "/server_info", "/model_info", "/abort_request"

# Tokens of a server's context that it keeps for itself: it shortens a row's limit by up to 2 so that prompt and answer
# fit, and refuses prompts within 6 of the end.
RESERVED_TOKENS = 6
# Failures that another try of the same request may mend; all others are the row's own.
TRANSIENT = frozenset({"timeout", "abort", "connection", "server_error"})
_TOO_LONG = re.compile(r"context length|longer than|exceeds|too long", re.IGNORECASE)
_DETAIL = 300


class ServerHandle(Protocol):
    """One SGLang server as the client sees it, at one epoch; the handle of a restarted server is a new object.

    `url`: base address without a slash at the end. `uuid`: identity of the server, the same at every epoch. `epoch`:
    rises at each restart; rows carry it.
    """

    @property
    def url(self) -> str:
        """Base address."""
        ...

    @property
    def uuid(self) -> str:
        """Identity, the same at every epoch."""
        ...

    @property
    def epoch(self) -> int:
        """How often the server was restarted."""
        ...

    def alive(self) -> bool:
        """Whether the server's process lives; True if that cannot be known."""
        ...

    def loaded(self) -> ServerHandle:
        """The server when it has loaded, at once if it has; blocks while somebody's restart of it goes on.

        Raises UserError when it does not start.
        """
        ...

    def restart(self, reason: str) -> ServerHandle:
        """End the server and start it again with the same settings; the port may move. Blocks until it is ready.

        Raises UserError when restarts are used up, or when it does not start.
        """
        ...

    @property
    def host_bytes(self) -> int:
        """Memory of the host that its processes hold; 0 if that is not known."""
        ...

    @property
    def began(self) -> float:
        """When this epoch began, in seconds since 1970; 0 if that is not known."""
        ...

    def reference(self) -> dict[str, Any]:
        """A JSON value from which another process of this host makes the handle again.

        Of a managed server: {"kind": "managed", ...} for `draftmill.engines.server.attach(reference)`.
        """
        ...


@dataclass(frozen=True, slots=True)
class FixedServer:
    """A server that somebody else runs: it is used as it is and cannot be restarted."""

    url: str
    epoch: int = 0
    host_bytes: int = 0
    began: float = 0.0

    @property
    def uuid(self) -> str:
        """Its address, for want of anything better."""
        return self.url

    def alive(self) -> bool:
        """True: only its answers can tell."""
        return True

    def loaded(self) -> FixedServer:
        """As it is: only its answers can tell."""
        return self

    def restart(self, reason: str) -> ServerHandle:
        """Raises UserError: it is not ours."""
        raise UserError(
            f"The SGLang server {self.url} is sick ({reason}) and is not ours to restart: mend it and give the same "
            "command again; what was generated is kept."
        )

    def reference(self) -> dict[str, Any]:
        """Its address."""
        return {"kind": "fixed", "url": self.url}


def body(request: Request, stop_ids: Sequence[int], rid: str) -> dict[str, Any]:
    """The JSON of one `/generate` request. `rid` names it for `/abort_request`.

    Every parameter that decides the row is spelt out, because a server may take defaults from the model's
    generation_config.json. `sampling_seed` matters with --enable-deterministic-inference and is ignored otherwise.
    """
    sampling = request.sampling
    return {
        "rid": rid,
        "input_ids": list(request.prompt_ids),
        "stream": False,
        "sampling_params": {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            # Penalties would change the distribution that the drafter is to learn.
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": list(stop_ids),
            "sampling_seed": request.seed,
            "skip_special_tokens": False,
        },
    }


def answer(key: Key, status: int, reply: Any) -> Result | Failure:
    """What a reply of `/generate` says: the row, or its typed failure. `reply` is parsed JSON, or text if it was none."""
    if status != 200:
        return _refusal(key, status, reply)
    try:
        meta = reply["meta_info"]
        kind = str((meta["finish_reason"] or {}).get("type"))
        ids, said = tuple(int(i) for i in reply["output_ids"]), int(meta["completion_tokens"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return Failure(key, "server_error", f"an answer without ids, count or finish reason: {str(reply)[:_DETAIL]}")
    if kind not in ("stop", "length"):
        return Failure(key, "abort", f"the server ended the row with {kind!r}: {_message(meta['finish_reason'])}")
    if not ids or said == 0:
        return Failure(key, "length_zero", f"no token was generated (finish reason {kind})")
    if len(ids) != said:
        return Failure(key, "bad_ids", f"{len(ids)} ids, but completion_tokens is {said}")
    return Result(key, ids, kind)


def _refusal(key: Key, status: int, reply: Any) -> Failure:
    said = _message(reply)
    if status >= 500 or status in (408, 429, 499):
        return Failure(key, "abort" if status == 499 else "server_error", f"HTTP {status}: {said}")
    if status == 400 and "abort" in said.lower():
        return Failure(key, "abort", f"HTTP {status}: {said}")
    return Failure(key, "too_long" if _TOO_LONG.search(said) else "refused", f"HTTP {status}: {said}")


def _message(reply: Any) -> str:
    """The words of an error, wherever this server puts them."""
    found = reply
    for name in ("error", "message", "detail"):
        if isinstance(found, Mapping) and found.get(name):
            found = found[name]
    return " ".join(str(found).split())[:_DETAIL]


def decoded_tokens(metrics: str) -> float | None:
    """Tokens that the server has decoded since its start, by its own count, or None where it does not say.

    SGLang counts them at each log line (every 40 steps), so that the count moves while the longest row still runs.
    """
    found = [_value(line) for line in metrics.splitlines() if _counts(line)]
    return sum(found) if found else None


def _counts(line: str) -> bool:
    return line.startswith("sglang:realtime_tokens_total{") and 'mode="decode"' in line


def _value(line: str) -> float:
    try:
        return float(line.rpartition("}")[2].split()[0])
    except (ValueError, IndexError):
        return 0.0


@dataclass(frozen=True, slots=True)
class Served:
    """What a server says of itself: model folder or id, revision, longest row in tokens, requests at a time."""

    model: str
    revision: str | None
    context: int | None
    running: int | None


def served(info: Mapping[str, Any]) -> Served:
    """Read a reply of `/server_info`."""
    states = info.get("internal_states") or [{}]
    running = states[0].get("effective_max_running_requests_per_dp") or info.get("max_running_requests")
    context = info.get("context_length") or info.get("max_req_input_len")
    return Served(
        model=str(info.get("model_path", "")),
        revision=info.get("revision"),
        context=int(context) if context else None,
        running=int(running) if running else None,
    )
