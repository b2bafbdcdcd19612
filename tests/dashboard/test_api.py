"""What the server tells of a made store, part by part."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from draftmill.dashboard.app import Server, plotly
from draftmill.dashboard.board import Board
from draftmill.dashboard.page import STATIC
from draftmill.dashboard.parts import lanes_part
from draftmill.dashboard.shards_with import KINDS
from draftmill.state.read import Reader
from draftmill.store.local import LocalStore
from tests.dashboard.conftest import WAIT_S
from tests.state.made_store import MadeStore, Memory


def value(client: TestClient, path: str) -> dict:
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


def test_state(client: TestClient, made: MadeStore) -> None:
    found = value(client, "/api/state")
    assert found["problem"] is None
    assert found["state"]["plan"]["shards"] == made.shards
    assert {stage["name"] for stage in found["state"]["stages"]} >= {"generate", "audit", "extract", "train"}


def test_quality_adds_up(client: TestClient, made: MadeStore) -> None:
    found = value(client, "/api/quality")
    assert found["overall"]["rows"] == sum(one["rows"] for one in found["by_source"].values())
    assert sum(point["rows"] for point in found["points"]) == found["overall"]["rows"]
    assert sum(point["shards"] for point in found["points"]) == found["shards"]
    assert len(found["failed"]) == made.broken_audits
    assert set(found["checks_by_source"]) == set(found["by_source"])


def test_lengths_are_of_whole_shards(client: TestClient, made: MadeStore) -> None:
    found = value(client, "/api/lengths")
    assert 0 < found["read"] <= found["shards"] == made.shards
    assert sum(found["counts"].values()) >= found["read"] * (made.rows - 1)


def test_shards_and_one_of_them(client: TestClient, made: MadeStore) -> None:
    found = value(client, "/api/shards")
    assert [row["name"] for row in found] == made.graph.shards
    failed = next(row for row in found if row["verdict"] == "fail")
    one = value(client, f"/api/shard/{failed['name']}")
    assert [link["stage"] for link in one["chain"]] == ["generate", "audit", "extract"]
    generate = one["chain"][0]
    assert generate["record"]["run"] == generate["run"]
    assert generate["made_of"]["stage"] == "generate"


def test_changed_settings_are_told_of_a_shard_with_older_objects(client: TestClient, made: MadeStore) -> None:
    names = [row["name"] for row in value(client, "/api/shards")]
    ones = (value(client, f"/api/shard/{name}") for name in names)
    old = next(one for one in ones if one["chain"][0]["before"])
    assert "settings changed" in old["why"]
    assert old["chain"][0]["changed"] == [], "the made objects differ in nothing"


@pytest.mark.parametrize("name", ["nothing", "0" * 12, "..%2F..%2Fetc%2Fpasswd"])
def test_an_unknown_shard_is_not_found(client: TestClient, name: str) -> None:
    assert client.get(f"/api/shard/{name}").status_code == 404


def test_training(client: TestClient, made: MadeStore) -> None:
    found = value(client, "/api/training")
    assert found["wanted"] == len(made.graph.windows)
    assert len(found["windows"]) == made.trained
    assert found["live"]["window"] == made.trained
    assert found["evaluations"][0]["evaluation"]["drafter"]["by_source"]


@pytest.mark.parametrize("hours", [1, 6, 24, 168])
def test_lanes_of_some_hours(client: TestClient, hours: int) -> None:
    found = value(client, f"/api/lanes?hours={hours}")
    assert found["now"] - found["since"] == pytest.approx(hours * 3600)
    assert found["lanes"]
    for lane in found["lanes"]:
        starts = [span["start"] for span in lane["spans"]]
        assert starts == sorted(starts)
        assert all(span["end"] >= span["start"] for span in lane["spans"])
    assert any(lane["servers"] for lane in found["lanes"])


def test_lanes_at_work_tell_verdicts_servers_and_memory() -> None:
    made = MadeStore(phase="generating")
    board = Board(Reader(Memory(made.objects)), clock=lambda: made.now)
    board.look()
    assert board.view is not None
    found = lanes_part(board.view, 1)
    gates = [gate for lane in found["lanes"] for gate in lane["gates"]]
    assert {gate["verdict"] for gate in gates} == {"free"}
    assert {server["epoch"] for lane in found["lanes"] for server in lane["servers"]} == {1, 2}
    assert any(seen["memory"] for seen in board.history.to_json().values())
    states = {span["state"] for lane in found["lanes"] for span in lane["spans"]}
    assert {"running", "failed", "idle"} <= states


def test_jobs_closer_than_a_pixel_are_one_span(client: TestClient) -> None:
    hour, week = (value(client, f"/api/lanes?hours={hours}")["lanes"] for hours in (1, 168))
    assert sum(len(lane["spans"]) for lane in week) < sum(len(lane["spans"]) for lane in hour)
    assert sum(span["jobs"] for lane in week for span in lane["spans"]) >= sum(len(lane["spans"]) for lane in hour)


@pytest.mark.parametrize("query", ["hours=x", "hours=-1", "hours=9e99", "hours="])
def test_nonsense_in_numbers_is_the_default(client: TestClient, query: str) -> None:
    found = value(client, f"/api/lanes?{query}")
    assert found["now"] - found["since"] == pytest.approx(3600)


def test_metrics_are_prometheus_text(client: TestClient) -> None:
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    names = {family.name for family in text_string_to_metric_families(answer.text)}
    assert {"draftmill_jobs", "draftmill_eta_seconds"} <= names


def test_plotly_is_that_of_the_package(client: TestClient) -> None:
    answer = client.get("/plotly.js")
    assert answer.content[:200] != b""
    assert b"plotly.js" in answer.content[:200]
    again = client.get("/plotly.js", headers={"if-none-match": plotly()[1]})
    assert again.status_code == 304
    assert client.get("/plotly.js", headers={"accept-encoding": "identity"}).content == answer.content


def test_static_files_are_kept_by_the_browser_and_nothing_else_is_served(client: TestClient) -> None:
    for name in STATIC:
        answer = client.get(f"/static/{name}")
        assert answer.status_code == 200
        assert client.get(f"/static/{name}", headers={"if-none-match": answer.headers["etag"]}).status_code == 304
    for name in ("..%2Fapp.py", "index.html", "app.py", "%00"):
        assert client.get(f"/static/{name}").status_code == 404


def test_the_page_weighs_under_300_kb(client: TestClient) -> None:
    assert len(client.get("/").content) + sum(map(len, STATIC.values())) < 300_000


def test_the_stream_pushes_a_state_after_a_heartbeat(tmp_path: Path) -> None:
    """Read from the generator itself: the test client waits for the end of a stream that has none."""
    made = MadeStore(shards=20)
    store = LocalStore(made.write(tmp_path))
    board = Board(Reader(store))

    async def lanes_differ() -> tuple[dict, dict]:
        first: dict | None = None
        stream = Server(board)._stream()
        with anyio.fail_after(WAIT_S):
            async for part in stream:
                found = json.loads(part.decode().split("data: ", 1)[1]) if b"event: state" in part else {}
                if not found.get("state"):
                    continue
                if first is None:
                    first = found
                    made.tick(store)
                elif tokens(found) != tokens(first):
                    await stream.aclose()
                    return first, found
        raise AssertionError

    board.start()
    first, last = anyio.run(lanes_differ)
    board.close()
    assert last["number"] > first["number"]
    assert tokens(last) > tokens(first)


def tokens(message: dict) -> int:
    return message["state"]["stages"][0]["tokens"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "search"])
def test_every_kind_of_sample_gives_rows(client: TestClient, kind: str) -> None:
    found = value(client, f"/api/samples?kind={kind}")
    assert 0 < len(found["rows"]) <= 12
    assert 0 < found["read"] <= found["shards"]


@pytest.fixture
def every(client: TestClient) -> dict:
    return value(client, "/api/quality")


def test_shortest_and_longest_are_those_of_the_whole_set(client: TestClient, every: dict) -> None:
    lengths = [int(one) for tally in ("histogram", "histogram_cut") for one in every["overall"][tally]]
    assert value(client, "/api/samples?kind=shortest")["rows"][0]["loss_tokens"] == min(lengths)
    assert value(client, "/api/samples?kind=longest")["rows"][0]["loss_tokens"] == max(lengths)


def test_samples_of_a_source_and_of_a_shard(client: TestClient, made: MadeStore) -> None:
    rows = value(client, "/api/samples?kind=random&source=s%C3%B6urce+%3Cb%3E%26amp%3B")["rows"]
    assert {row["source"] for row in rows} == {"söurce <b>&amp;"}
    shard = made.generated[0]
    assert {row["shard"] for row in value(client, f"/api/samples?kind=longest&shard={shard}")["rows"]} == {shard}
    assert value(client, "/api/samples?kind=random&shard=nothing")["rows"] == []


def test_another_seed_gives_other_rows(client: TestClient) -> None:
    first, again, other = (
        [row["prompt_id"] for row in value(client, f"/api/samples?kind=random&seed={seed}")["rows"]]
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_a_text_is_found_whatever_its_case_and_the_search_goes_on(client: TestClient) -> None:
    found = value(client, "/api/samples?kind=search&text=OWNED")
    assert any("owned" in piece["text"] for row in found["rows"] for piece in row["pieces"])
    page = value(client, "/api/samples?kind=search&text=the")
    assert page["next"] is not None
    further = value(client, f"/api/samples?kind=search&text=the&start={page['next']}")
    shards = ({row["shard"] for row in found["rows"]} for found in (page, further))
    assert set.intersection(*shards) == set()


def test_a_pattern_is_a_text(client: TestClient) -> None:
    assert value(client, "/api/samples?kind=search&text=.*%5B")["rows"] == []
    assert client.get("/api/samples?kind=search").status_code == 400
    assert client.get("/api/samples?kind=nothing").status_code == 400


def test_a_megabyte_of_one_letter_is_cut_and_shown_further_on_demand(client: TestClient) -> None:
    rows = value(client, "/api/samples?kind=longest")["rows"]
    long = rows[0]
    assert long["output_tokens"] > 1_000_000
    assert long["more"]
    assert sum(len(piece["text"]) for piece in long["pieces"]) < 6_000
    whole = value(client, f"/api/row?shard={long['shard']}&row={long['row']}")
    assert 100_000 < sum(len(piece["text"]) for piece in whole["pieces"]) < 300_000
    assert any(piece["kind"] == "left_out" for piece in whole["pieces"])


@pytest.mark.parametrize("query", ["shard=x&row=0", "shard=&row=", "row=99999999", "shard=x&row=-1&rejected=true"])
def test_a_row_that_is_none_is_not_found(client: TestClient, query: str) -> None:
    assert client.get(f"/api/row?{query}").status_code == 404
