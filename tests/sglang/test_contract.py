"""What SGLang is asked and what it answers: the request's body against the configuration, every reply's meaning, and one
contract that the small server and, with DRAFTMILL_SGLANG_URL set, a real one keep."""

import asyncio
import json
import os

import pytest

from draftmill.config import GenerateConfig
from draftmill.engines import sglang_api as api
from draftmill.engines.base import Failure, Request, Result, Sampling
from draftmill.engines.sampling import Mix
from draftmill.engines.sglang_wire import Wire
from tests.sglang.servers import OwnServer

KEY = ("p", 0)
URL = os.environ.get("DRAFTMILL_SGLANG_URL", "")
GREEDY = Sampling(8, 0.0, 1.0, 0, 0.0)


def test_the_body_says_what_the_configuration_says_under_sglang_s_names():
    config = GenerateConfig(max_new_tokens=33, temperature=0.7, top_p=0.8, top_k=21, min_p=0.05)
    request = Request(KEY, (4, 5, 6), 987654321, Mix(config).own.sampling)
    assert api.body(request, (2, 9), "r1") == {
        "rid": "r1",
        "input_ids": [4, 5, 6],
        "stream": False,
        "sampling_params": {
            "max_new_tokens": 33,
            "temperature": 0.7,
            "top_p": 0.8,
            "top_k": 21,
            "min_p": 0.05,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": [2, 9],
            "sampling_seed": 987654321,
            "skip_special_tokens": False,
        },
    }


def test_all_tokens_are_minus_one_for_sglang_and_zero_for_us():
    request = Request(KEY, (4,), 1, Mix(GenerateConfig(top_k=0)).own.sampling)
    assert api.body(request, (2,), "r")["sampling_params"]["top_k"] == -1


def reply(ids=(5, 6, 2), said=None, kind="stop", **meta):
    finish = {"type": kind, "matched": 2} if kind == "stop" else {"type": kind, "length": len(ids)}
    return {
        "text": "x",
        "output_ids": list(ids),
        "meta_info": {"finish_reason": finish, "completion_tokens": len(ids) if said is None else said, **meta},
    }


def test_a_good_reply_is_its_ids():
    assert api.answer(KEY, 200, reply()) == Result(KEY, (5, 6, 2), "stop")
    assert api.answer(KEY, 200, reply((5, 6), kind="length")) == Result(KEY, (5, 6), "length")


@pytest.mark.parametrize(
    ("status", "said", "reason", "words"),
    [
        (200, reply(kind="abort"), "abort", "ended the row with 'abort'"),
        (200, reply(()), "length_zero", "no token"),
        (200, reply(said=0), "length_zero", "no token"),
        (200, reply(said=4), "bad_ids", "3 ids, but completion_tokens is 4"),
        (200, {"output_ids": [1]}, "server_error", "without ids, count or finish reason"),
        (200, {"output_ids": None, "meta_info": {"finish_reason": {"type": "stop"}}}, "server_error", "without"),
        (200, {"output_ids": ["x"], "meta_info": {"finish_reason": {}, "completion_tokens": 1}}, "server_error", "without"),
        (200, reply(kind=None) | {"meta_info": {"finish_reason": None, "completion_tokens": 3}}, "abort", "'None'"),
        (200, "<html>", "server_error", "<html>"),
        (200, None, "server_error", "None"),
        (500, {"object": "error", "message": "out of order"}, "server_error", "HTTP 500: out of order"),
        (503, {"detail": "The server is full"}, "server_error", "HTTP 503: The server is full"),
        (429, "slow down", "server_error", "HTTP 429"),
        (499, {"error": {"message": "gone"}}, "abort", "gone"),
        (400, {"error": {"message": "Request is aborted by somebody"}}, "abort", "aborted"),
        (400, {"error": {"message": "The input (9 tokens) is longer than the context length (4)."}}, "too_long", "9"),
        (400, {"error": {"message": "Requested token count exceeds the maximum context length"}}, "too_long", "exceeds"),
        (400, {"error": {"message": "top_p must be in (0, 1], got 7."}}, "refused", "top_p"),
        (404, "Not Found", "refused", "HTTP 404: Not Found"),
    ],
)  # fmt: skip
def test_every_other_reply_is_a_typed_failure(status, said, reason, words):
    found = api.answer(KEY, status, said)
    assert isinstance(found, Failure)
    assert found.reason == reason
    assert words in found.detail


def test_the_decode_counter_is_the_sum_over_ranks_and_nothing_else():
    text = (
        "# HELP sglang:realtime_tokens_total tokens\n"
        'sglang:realtime_tokens_total{model_name="m",mode="prefill_compute"} 900.0\n'
        'sglang:realtime_tokens_total{dp_rank="0",mode="decode"} 12.0\n'
        'sglang:realtime_tokens_total{dp_rank="1",mode="decode"} 1.5e3\n'
        'sglang:realtime_tokens_total_created{mode="decode"} 1.7e9\n'
    )
    assert api.decoded_tokens(text) == 1512.0
    assert api.decoded_tokens("sglang:num_running_reqs 3\n") is None


def test_what_a_server_says_of_itself():
    found = api.served(
        {
            "model_path": "m", "revision": None, "context_length": 4096,
            "internal_states": [{"effective_max_running_requests_per_dp": 64}],
        }
    )  # fmt: skip
    assert (found.model, found.context, found.running) == ("m", 4096, 64)
    assert api.served({}).context is None


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    server = OwnServer(tmp_path_factory.mktemp("small") / "record")
    yield server
    server.kill()


@pytest.fixture(params=["small", pytest.param("real", marks=pytest.mark.skipif(not URL, reason="no server is named"))])
def url(request, small):
    return small.url if request.param == "small" else URL


def asked(url, *requests, deadline_s=120.0):
    async def work():
        wire = Wire(url)
        try:
            bodies = [
                api.body(request, (7,), f"contract-{n}-{os.urandom(4).hex()}") for n, request in enumerate(requests)
            ]
            return await asyncio.gather(
                *(wire.generate(r.key, b, deadline_s) for r, b in zip(requests, bodies, strict=True))
            )
        finally:
            await wire.close()

    return asyncio.run(work())


def test_greedy_rows_are_the_same_every_time_and_keep_their_limit(url):
    first, second = asked(url, Request(KEY, (3, 4, 5), 1, GREEDY)), asked(url, Request(KEY, (3, 4, 5), 2, GREEDY))
    assert isinstance(first[0], Result)
    assert first == second
    assert 0 < len(first[0].output_ids) <= 8
    assert (first[0].finish_reason == "length") == (len(first[0].output_ids) == 8 and first[0].output_ids[-1] != 7)


def test_a_stopped_row_ends_with_the_id_that_ended_it(url):
    plain = asked(url, Request(KEY, (3, 4, 5), 1, GREEDY))[0]
    stop = plain.output_ids[2]

    async def work():
        wire = Wire(url)
        try:
            body = api.body(Request(KEY, (3, 4, 5), 1, GREEDY), (stop,), "stop-" + os.urandom(4).hex())
            return await wire.generate(KEY, body, 60)
        finally:
            await wire.close()

    if url == URL:  # the small server draws other ids for another stop id
        found = asyncio.run(work())
        assert (found.output_ids[-1], found.finish_reason) == (stop, "stop")


def test_a_prompt_beyond_the_context_is_too_long(url):
    found = asked(url, Request(KEY, (3,) * 600_000, 1, GREEDY))[0]
    assert isinstance(found, Failure)
    assert found.reason == "too_long"


def test_many_rows_at_once_come_back_under_their_own_keys(url):
    rows = [Request((f"p{n}", 0), (3, 4, 5 + n), n, GREEDY) for n in range(64)]
    found = asked(url, *rows)
    assert [result.key for result in found] == [row.key for row in rows]
    assert all(isinstance(result, Result) for result in found)


def test_a_row_that_takes_too_long_is_aborted_at_the_server(small):
    small.misbehave("hang", 1)
    found = asked(small.url, Request(KEY, (3,), 1, GREEDY), deadline_s=0.2)[0]
    assert (found.reason, found.detail) == ("timeout", "no answer within 0 s")
    assert running(small.url) == 0


def running(url):
    async def work():
        wire = Wire(url)
        try:
            async with wire._session.get(url + api.METRICS) as reply:
                text = await reply.text()
        finally:
            await wire.close()
        return text

    line = next(line for line in asyncio.run(work()).splitlines() if "num_running_reqs" in line)
    return int(line.rpartition(" ")[2])


def test_nobody_there_is_a_failed_connection():
    found = asked("http://127.0.0.1:9", Request(KEY, (3,), 1, GREEDY))[0]
    assert found.reason == "connection"


def test_the_routes_that_the_client_looks_at(url):
    async def work():
        wire = Wire(url)
        try:
            async with wire._session.get(url + api.SERVER_INFO) as info, wire._session.get(url + api.HEALTH) as health:
                return json.loads(await info.read()), health.status, await wire.reachable()
        finally:
            await wire.close()

    info, health, reachable = asyncio.run(work())
    assert (health, reachable) == (200, True)
    assert api.served(info).context
