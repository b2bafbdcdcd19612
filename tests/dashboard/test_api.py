"""What the server tells of a made store, part by part."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path

import anyio
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from draftmill.dashboard.app import Server, plotly
from draftmill.dashboard.board import Board
from draftmill.dashboard.detail import Details
from draftmill.dashboard.page import STATIC
from draftmill.dashboard.parts import lanes_part
from draftmill.dashboard.samples import Query, Samples
from draftmill.dashboard.shards_with import KINDS, Place, ordered
from draftmill.dashboard.tables import Tables
from draftmill.state.documents import ShardAudit, SourceCounts
from draftmill.state.read import Reader
from draftmill.store.local import LocalStore
from tests.state.made_objects import heartbeat
from tests.state.made_store import GPUS, MadeStore
from tests.state.made_texts import SOURCES
from tests.state.memory import Memory
from tests.waiting import WAIT_S


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
    rows = [rows for tally in found["by_source"].values() for rows in tally.values()]
    assert found["read"] * (made.rows - 1) <= sum(rows) <= found["read"] * made.rows
    assert set(found["by_source"]) == set(SOURCES)


def test_shards_and_one_of_them(client: TestClient, made: MadeStore) -> None:
    found = value(client, "/api/shards")
    assert [row["name"] for row in found] == made.graph.shards
    failed = next(row for row in found if row["verdict"] == "fail")
    one = value(client, f"/api/shard/{failed['name']}")
    assert [link["stage"] for link in one["chain"]] == ["generate", "audit", "extract"]
    generate = one["chain"][0]
    assert generate["record"]["run"] == generate["run"]
    assert generate["made_of"]["stage"] == "generate"


def test_an_open_shard_costs_no_object_again_and_no_table_as_a_whole() -> None:
    made = MadeStore(phase="generating")
    memory = Memory(made.objects)
    board = Board(Reader(memory), clock=lambda: made.now)
    board.look()
    assert board.view is not None
    details, shard = (
        Details(memory),
        next(shard for shard in made.generated if made.graph.hidden(shard) in memory.objects),
    )
    gets = memory.gets
    first = details.of(board.view, shard)
    assert first is not None
    assert [link["made_of"]["stage"] for link in first["chain"]] == ["generate", "audit", "extract"]
    # The audit and three records are read whole; of tables and hidden states only the parts that say it.
    assert memory.gets - gets == 4
    gets, parts = memory.gets, memory.parts
    assert details.of(board.view, shard) == first
    assert (memory.gets - gets, memory.parts - parts) == (3, 0)


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
    assert any(seen["memory"] for seen in board.history.to_json(lane["id"] for lane in found["lanes"]).values())
    states = {span["state"] for lane in found["lanes"] for span in lane["spans"]}
    assert {"running", "failed", "idle"} <= states


def test_of_many_processes_without_a_gpu_the_newest_are_lanes() -> None:
    made = MadeStore(shards=200, phase="finished")
    memory = Memory(made.objects)
    for place, shard in enumerate(made.generated):
        name, at = f"{shard}-{made.fp['generate']}", made.now - 3000 + 10 * place
        memory.put(f"progress/generate/{name}.json", heartbeat("generate", name, at - 9, at, "done", pid=place), at)
    board = Board(Reader(memory), clock=lambda: made.now)
    board.look()
    assert board.view is not None
    found = lanes_part(board.view, 1)
    processes = [lane for lane in found["lanes"] if lane["gpu"] is None]
    assert sorted(int(lane["id"].split("/")[1]) for lane in processes) == list(range(160, 200))
    assert found["left_out"] == 160
    assert {lane["gpu"] for lane in found["lanes"] if lane["gpu"] is not None} >= set(GPUS[:2])


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


def test_random_rows_of_a_source_are_looked_for_where_audits_say_they_are() -> None:
    here = ShardAudit(verdict="pass", by_source={"rare": SourceCounts(rows=1)})
    elsewhere = ShardAudit(verdict="pass", by_source={"chat": SourceCounts(rows=9)})
    audits = [elsewhere] * 40 + [None, here, None, here]
    found = [Place(number, f"{number:012x}", "", "", "", audit) for number, audit in enumerate(audits)]
    for seed in range(5):
        line = [place.number for place in ordered(found, "random", "rare", seed)]
        assert (set(line[:2]), set(line[2:])) == ({41, 43}, {40, 42})
    assert [place.number for place in ordered(found, "search", "rare", 0)] == [40, 41, 42, 43]
    assert len(ordered(found, "random", None, 0)) == len(found)


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
    further = value(
        client, f"/api/samples?kind=search&text=the&start={page['next']['start']}&skip={page['next']['skip']}"
    )
    rows = ({(row["shard"], row["row"]) for row in found["rows"]} for found in (page, further))
    assert set.intersection(*rows) == set()


@pytest.mark.parametrize("rows", [11, 30])
@pytest.mark.parametrize("source", [None, "code"])
def test_a_search_paged_to_its_end_shows_every_row_that_holds_the_text(rows: int, source: str | None) -> None:
    made = MadeStore(shards=10, rows=rows, phase="finished")
    board = Board(Reader(Memory(made.objects)), clock=lambda: made.now)
    board.look()
    assert board.view is not None
    samples = Samples(Tables(board.reader.store))
    seen: list[tuple[str, int]] = []
    start: dict[str, int] | None = {"start": 0, "skip": 0}
    while start is not None:
        found = samples.find(board.view, Query("search", source=source, text="fathoms", **start))
        seen += [(row["shard"], row["row"]) for row in found["rows"]]
        start = found["next"]
        assert len(found["rows"]) == 12 or start is None, "pages are full but for the last one"
    tables = {shard: read_table(made, shard) for shard in made.graph.shards}
    expected = [
        (shard, row)
        for shard, table in tables.items()
        for row, name in enumerate(table["source"].to_pylist())
        if source in (None, name)
    ]
    assert seen == expected


def read_table(made: MadeStore, shard: str) -> pa.Table:
    return pq.read_table(BytesIO(made.objects[made.graph.completions(shard)][0]))


def test_a_slow_store_still_gives_its_first_object(board: Board, client: TestClient) -> None:
    seconds = iter(range(0, 10_000, 5))
    samples = Samples(Tables(board.reader.store), clock=lambda: float(next(seconds)))
    assert board.view is not None
    assert samples.lengths(board.view)["read"] == 1
    assert samples.find(board.view, Query("search", text="fathoms"))["read"] == 1
    assert samples.find(board.view, Query("longest"))["read"] == 1


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
