"""A lane over one server, without the processes around it: what its tests have in common."""

import asyncio
import random

from draftmill.config import GenerateConfig
from draftmill.engines.base import Request, Result
from draftmill.engines.sampling import Mix
from draftmill.engines.sglang_watch import Asking
from draftmill.stages.lane import Lane, Order
from draftmill.stages.lane_shard import Loaded
from draftmill.stages.rows import Asked, Ledger, RowRules
from draftmill.store.journal import Journal
from draftmill.store.local import LocalStore
from tests.sglang.small_server import VOCABULARY, expected

STOP = 7
CANARY = (1, 2, 3)


class Site:
    """A store, shards of random prompts, and one lane over one server."""

    def __init__(self, folder, server, rows=20, shards=3, **settings):
        sglang = {
            "in_flight": 8,
            "stall_seconds": 4.0,
            "backoff_seconds": 0.01,
            "bad_window": 12,
            **settings.pop("sglang", {}),
        }
        self.config = GenerateConfig.model_validate(
            {"max_new_tokens": 16, "temperature": 1.0, "flush_rows": 4, "sglang": sglang, **settings}
        )
        self.server, self.store = server, LocalStore(folder / "store")
        self.rules = RowRules(self.config, frozenset({STOP}), VOCABULARY)
        rng, own = random.Random(5), Mix(self.config).own
        self.rows = {
            f"s{s}": [
                Asked((f"s{s}p{n}", 0), "chat", tuple(rng.randrange(VOCABULARY) for _ in range(6)), own)
                for n in range(rows)
            ]
            for s in range(shards)
        }
        asking = Asking(self.config.sglang, (STOP,), self.rules.check, CANARY, 16)
        self.lane, self.waited = None, 0
        self._asking = asking

    def ledger(self, name):
        return Ledger(self.config, Journal(self.store, f"journal/{name}"))

    def load(self, name, coming):
        if name not in self.rows:
            return None
        ledger = self.ledger(name)
        ledger.load()
        return Loaded(self.rows[name], ledger)

    def order(self, name, ahead=()):
        return Order(name, list(ahead), [self.server.reference()])

    async def open(self):
        self.lane = Lane(self.config, self._asking, self.load, lambda reference: self.server)
        self._work = asyncio.create_task(self.lane.run())

    async def close(self):
        self._work.cancel()
        await self.lane.close()

    async def do(self, name, ahead=(), until=None):
        """Have a shard done as a job would; the beats it got. `until` breaks off, as a killed job does."""
        beats = []
        async for beat in (serving := self.lane.serve(self.order(name, ahead))):
            if "waiting" in beat:
                self.waited += 1
                continue
            beats.append(beat)
            if until is not None and until(beat):
                break
        await serving.aclose()
        return beats

    def run(self, work):
        """Run a coroutine function with the lane open."""

        async def whole():
            await self.open()
            try:
                return await asyncio.wait_for(work(), 60)
            finally:
                await self.close()

        return asyncio.run(whole())

    def answers(self, name):
        ledger = self.ledger(name)
        ledger.load()
        return ledger

    def right(self, name, attempts=1):
        """Every row of the shard is in its journal with the answer that a well server gives to one of its attempts."""
        found = self.answers(name).answers
        for asked in self.rows[name]:
            requests = [asked.request(self.config.seed, attempt) for attempt in range(attempts)]
            assert found[asked.key] in [Result(asked.key, *wanted(request)) for request in requests]
        assert len(found) == len(self.rows[name])


def wanted(request: Request):
    parameters = {
        "temperature": request.sampling.temperature,
        "sampling_seed": request.seed,
        "stop_token_ids": [STOP],
        "max_new_tokens": request.sampling.max_new_tokens,
    }
    ids, reason = expected(list(request.prompt_ids), parameters)
    return tuple(ids), reason
