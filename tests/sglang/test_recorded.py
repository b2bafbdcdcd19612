"""What a real SGLang 0.5.17 replied on an H200 (recorded/), read by the adapter and held against the small server."""

import http.client
import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from draftmill.engines import sglang_api as api
from draftmill.engines.base import Failure, Request, Result, Sampling
from tests.sglang.servers import OwnServer

KEY = ("p", 0)
VOCABULARY, CONTEXT = 49152, 2048
FILE = Path(__file__).parent / "recorded/sglang-0.5.17.json"


def recorded():
    found = json.loads(FILE.read_text())
    for one in found:
        if one["body"]:
            one["body"]["input_ids"] *= one.pop("body_repeats_input_ids", 1)
    return found


def of(path):
    return next(one for one in recorded() if one["path"] == path)


def row(rid):
    return next(one for one in recorded() if one["body"] and one["body"]["rid"] == rid)


ROWS = ["bare-0", "bare-1", "short", "greedy", "long"]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    options = ["--vocabulary", str(VOCABULARY), "--context", str(CONTEXT)]
    server = OwnServer(tmp_path_factory.mktemp("small") / "record", *options)
    yield server
    server.kill()


def ask(url, one):
    data = None if one["body"] is None else json.dumps(one["body"]).encode()
    request = urllib.request.Request(
        url + one["path"], data, {"Content-Type": "application/json"}, method=one["method"]
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            text, status = reply.read().decode(), reply.status
    except urllib.error.HTTPError as error:
        text, status = error.read().decode(), error.code
    return status, json.loads(text) if text.startswith("{") else text


def test_the_recorded_requests_have_the_fields_that_the_adapter_sends():
    body = api.body(Request(KEY, (1, 2), 5, Sampling(256, 0.8, 1.0, 0, 0.0)), (2,), "r")
    for rid in ROWS:
        asked = row(rid)["body"]
        assert asked.keys() == body.keys()
        assert asked["sampling_params"].keys() == body["sampling_params"].keys()


@pytest.mark.parametrize(
    ("rid", "kind"), [("bare-0", "stop"), ("bare-1", "stop"), ("short", "length"), ("greedy", "stop")]
)
def test_the_adapter_reads_recorded_answers(rid, kind):
    one = row(rid)
    found = api.answer(KEY, one["status"], one["reply"])
    assert found == Result(KEY, tuple(one["reply"]["output_ids"]), kind)
    sampling = one["body"]["sampling_params"]
    assert len(found.output_ids) <= sampling["max_new_tokens"]
    assert (found.output_ids[-1] in sampling["stop_token_ids"]) == (kind == "stop")


def test_the_adapter_knows_the_recorded_refusal_of_a_long_prompt():
    one = row("long")
    found = api.answer(KEY, one["status"], one["reply"])
    assert isinstance(found, Failure)
    assert found.reason == "too_long"


def test_the_adapter_reads_what_the_recorded_server_says_of_itself():
    found = api.served(of("/server_info")["reply"])
    assert (found.model, found.context) == ("model", CONTEXT)
    assert found.running == of("/server_info")["reply"]["internal_states"][0]["effective_max_running_requests_per_dp"]
    assert api.decoded_tokens(of("/metrics")["reply"]) == 978961.0


@pytest.mark.parametrize("rid", ROWS)
def test_the_small_server_answers_rows_in_the_recorded_form(small, rid):
    one = row(rid)
    status, reply = ask(small.url, one)
    assert status == one["status"]
    assert shape(reply, one["reply"]) == []
    if status == 400:
        assert reply == one["reply"]


@pytest.mark.parametrize("path", ["/health", "/model_info", "/server_info", "/metrics", "/nowhere"])
def test_the_small_server_has_the_recorded_routes(small, path):
    status, reply = ask(small.url, one := of(path))
    assert status == one["status"]
    if isinstance(one["reply"], dict) and status == 200:
        assert shape(reply, one["reply"]) == []


def shape(ours, real, where=""):
    """Fields of ours that the real one lacks or has with another type."""
    if isinstance(real, dict):
        strange = [f"{where}.{name}" for name in ours if name not in real and name not in ("matched", "length")]
        return strange + [
            fault for name in ours if name in real for fault in shape(ours[name], real[name], f"{where}.{name}")
        ]
    if isinstance(real, list) and real and ours:
        return shape(ours[0], real[0], f"{where}[]")
    return [] if isinstance(ours, type(real)) or real is None or isinstance(real, float) else [where]


def test_an_id_outside_the_vocabulary_ended_the_real_server_and_ends_the_small_one(tmp_path):
    one = row("outside")
    assert one["status"] == 0
    assert max(one["body"]["input_ids"]) >= VOCABULARY
    server = OwnServer(tmp_path / "record", "--vocabulary", str(VOCABULARY), "--context", str(CONTEXT))
    try:
        with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
            ask(server.url, one)
        assert server.process.wait(30) != 0
    finally:
        server.kill()
