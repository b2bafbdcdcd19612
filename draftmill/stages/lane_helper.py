"""The lane's helpers: processes with the target's tokenizer that read shards and write completions for it.

A chat template over thousands of prompts is a second or more of Python. In a thread of the lane it would hold the
interpreter's lock, and every system call of the event loop would wait up to a switch interval (5 ms) to get it back: a few
hundred requests in flight then fall to a few dozen rows a second. In a job it would cost the import of transformers
and torch once a shard, seconds in which nothing is published. So it happens in processes that live as long as the lane.

A helper reads JSON lines on standard input and gives pickled answers on what was its standard output; pickles are safe here,
because both ends are the same code of the same user. It ends when its input does, that is also when the lane is killed.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from draftmill.config import Config, parse
from draftmill.engines.sglang_watch import Asking
from draftmill.errors import UserError
from draftmill.stages.asking import Target, read_target
from draftmill.stages.generate import Outputs
from draftmill.stages.rows import Asked, RowRules
from draftmill.stages.shards import Shards
from draftmill.store.open import open_store
from draftmill.target.tokenizer import render_prompt

_TRIES = 2
# Any prompt does; this one has an answer of more than a few tokens from every model.
_CANARY = {"messages": [{"role": "user", "content": "Count from one to thirty in words."}]}


class Helper:
    """A helper seen from the lane: one call at a time, from any thread. It is started by its first call."""

    def __init__(self, config: Config, generate: str) -> None:
        """`generate` is the fingerprint of the generate stage."""
        self._config, self._plan = config, {"config": config.model_dump(mode="json"), "generate": generate}
        self._process: subprocess.Popen[bytes] | None = None
        self._turn, self._closed = threading.Lock(), False

    def asking(self) -> Asking:
        """What servers are asked by: the configuration's limits and the target's rules. Raises UserError without a target."""
        stop, vocabulary, canary = self._call("target")
        generate = self._config.generate
        rules = RowRules(generate, frozenset(stop), vocabulary)
        return Asking(generate.sglang, tuple(stop), rules.check, tuple(canary), generate.longest_answer)

    def read(self, shard: str, coming: bool) -> list[Asked] | None:
        """Shards.read()."""
        found: list[Asked] | None = self._call("read", shard, coming)
        return found

    def write(self, shard: str, outputs: Outputs, provenance: Mapping[str, Any]) -> None:
        """Shards.write()."""
        self._call("write", shard, {name: str(path) for name, path in asdict(outputs).items()}, dict(provenance))

    def close(self) -> None:
        """End it for good; a call under way fails."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        if (process := self._process) is not None:
            process.kill()
            process.wait()

    def _call(self, *words: Any) -> Any:
        with self._turn:
            for left in reversed(range(_TRIES)):
                try:
                    fault, answer = self._ask(words)
                    break
                except (OSError, EOFError, pickle.UnpicklingError) as error:
                    self._end()
                    self._process = None
                    if not left or self._closed:
                        raise UserError(
                            f"The process that reads shards for the lane ended again and again ({error or 'killed'}): see the "
                            "lane's log, and whether the host ran out of memory."
                        ) from None
        if fault:
            raise UserError(fault)
        return answer

    def _ask(self, words: tuple[Any, ...]) -> tuple[str, Any]:
        if self._closed:
            raise EOFError("the lane ends")
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "draftmill.stages.lane_helper"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            self._send(self._plan)
        self._send(words)
        assert self._process.stdout is not None
        found: tuple[str, Any] = pickle.load(self._process.stdout)
        return found

    def _send(self, value: Any) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value).encode() + b"\n")
        self._process.stdin.flush()


def _answers(config: Config, generate: str, asked: IO[bytes], given: IO[bytes]) -> None:
    target, shards = None, None
    for line in asked:
        try:
            if target is None or shards is None:
                target = read_target(config)
                shards = Shards(config, target, open_store(config.store, config.s3), generate)
            answer: tuple[str, Any] = ("", _do(config, target, shards, *json.loads(line)))
        except UserError as error:
            answer = (str(error), None)
        except Exception as error:
            traceback.print_exc()
            answer = (f"A shard could not be read or written: {error!r}; the lane's log says where.", None)
        pickle.dump(answer, given, protocol=pickle.HIGHEST_PROTOCOL)
        given.flush()


def _do(config: Config, target: Target, shards: Shards, what: str, *words: Any) -> Any:
    if what == "target":
        canary = render_prompt(target.tokenizer, _CANARY, config.target.chat_template_args)
        return sorted(target.rules.stop_ids), target.rules.vocabulary, canary
    if what == "read":
        return shards.read(*words)
    shard, outputs, provenance = words
    shards.write(shard, Outputs(**{name: Path(path) for name, path in outputs.items()}), provenance)
    return None


def main() -> None:
    """Answer until the lane is gone."""
    given = os.fdopen(os.dup(1), "wb")
    # What is printed goes to the lane's log.
    os.dup2(2, 1)
    plan = json.loads(sys.stdin.buffer.readline())
    _answers(parse(plan["config"]), plan["generate"], sys.stdin.buffer, given)


if __name__ == "__main__":
    main()
