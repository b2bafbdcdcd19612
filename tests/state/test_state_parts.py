"""The parts a page is made of: quality, shards, training, lanes' timelines; all of it from the store alone."""

from __future__ import annotations

import json

from draftmill.audit.counts import Counts, Measurements, merge
from draftmill.state.jobs import Picture, picture_of
from draftmill.state.lanes import lanes, segments
from draftmill.state.metrics import metrics
from draftmill.state.quality import quality
from draftmill.state.read import Reader
from draftmill.state.shards import changed_settings, shard_rows
from draftmill.state.state import state_of
from draftmill.state.training import training
from tests.state.made_objects import heartbeat
from tests.state.made_store import GPUS, OLD_FP, MadeStore
from tests.state.memory import Memory


def picture(memory: Memory, now: float) -> Picture:
    found = picture_of(Reader(memory).snapshot(), now)
    assert found is not None
    return found


def plain(counts: Counts) -> dict[str, object]:
    return counts.model_dump(exclude={"duplicates"})


def test_quality_is_what_the_audits_measure_together(made: MadeStore, memory: Memory) -> None:
    found = quality(picture(memory, made.now))
    audited = made.generated[: len(made.generated) - made.broken_audits]
    kinds = [made.kind_of(shard) for shard in audited] + [made.spiked_kind] * made.broken_audits
    whole: Measurements = merge(kind.audit.measurements for kind in kinds)
    assert plain(found.overall) == plain(whole.overall)
    assert {source: plain(counts) for source, counts in found.by_source.items()} == {
        source: plain(counts) for source, counts in whole.by_source.items()
    }
    assert found.overall.duplicates == sum(kind.audit.measurements.overall.duplicates for kind in kinds)
    assert (found.shards, len(found.failed)) == (len(kinds), made.broken_audits)


def test_quality_names_the_spike_of_a_failed_shard_and_follows_time(made: MadeStore, memory: Memory) -> None:
    found = quality(picture(memory, made.now))
    spiked = [point for point in found.points if point.verdict == "fail"]
    assert {point.shard for point in spiked} == set(found.failed)
    assert all(point.spike > 0.8 for point in spiked)
    assert [point.at for point in found.points] == sorted(point.at for point in found.points)
    assert next(check for check in found.checks if check.code == "spike").limit == made.config.audit.max_spike
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["overall"]["spike"] == list(found.overall.spike)


def test_every_shard_is_a_row_with_its_chain(made: MadeStore, memory: Memory) -> None:
    rows = shard_rows(picture(memory, made.now))
    assert [row.name for row in rows] == made.graph.shards
    assert {row.split for row in rows} == {"train", "held_out"}
    assert sum(row.pilot for row in rows) == 1
    by_name = {row.name: row for row in rows}
    first = by_name[made.generated[0]]
    assert [link.stage for link in first.chain] == ["generate", "audit", "extract"]
    assert [link.fingerprint for link in first.chain] == [made.fp[stage] for stage in ("generate", "audit", "extract")]
    link = first.chain[0]
    assert (link.key, link.bytes) == (made.graph.completions(first.name), len(memory.objects[link.key]))
    assert (link.host, link.run, link.git, link.gpus) == ("alpha", "5eed" * 3, "c0ffee0", (GPUS[0],))
    assert link.log == f"logs/generate/{first.name}.log"
    held_out = next(row for row in rows if row.split == "held_out")
    assert (held_out.window, held_out.chain[2].log) == (None, f"logs/extract_held_out/{held_out.name}.log")
    json.dumps([row.to_json() for row in rows], allow_nan=False)


def test_rows_and_stages_tell_the_same(made: MadeStore, memory: Memory) -> None:
    found = picture(memory, made.now)
    stages = {stage.name: stage for stage in state_of(found.snapshot, made.now).stages}
    rows = shard_rows(found)
    for place, stage in enumerate(("generate", "audit", "extract")):
        states = [row.chain[place].state for row in rows]
        jobs = stages[stage].jobs
        assert (jobs.done, jobs.failed, jobs.waiting) == tuple(map(states.count, ("done", "failed", "waiting")))
    assert sum(row.useful or 0 for row in rows) == stages["generate"].rows.useful


def test_a_shard_says_why_it_was_built(made: MadeStore, memory: Memory) -> None:
    rows = {row.name: row for row in shard_rows(picture(memory, made.now))}
    again, first, not_yet = made.generated[3], made.generated[0], made.graph.train[-1]
    assert rows[again].why == f"Was built again because settings changed that decide generate (before: {OLD_FP})."
    assert rows[first].why == "Was built because the store held nothing of it."
    assert rows[not_yet].why == "Is to be built because the store held nothing of it."


def test_settings_that_changed_between_two_objects_are_named(made: MadeStore) -> None:
    other = MadeStore(shards=4, windows=2, changes={"generate": {"temperature": 0.25}})
    changed = changed_settings(made.provenance("generate"), other.provenance("generate"))
    assert changed == (("sampling.temperature", made.config.generate.temperature, 0.25),)
    assert changed_settings(made.provenance("audit"), made.provenance("audit")) == ()
    assert changed_settings({}, {"spec": {"a": {"b": 1}}}) == (("a.b", None, 1),)


def test_training_has_curves_the_live_window_and_every_evaluation() -> None:
    made = MadeStore(shards=40, windows=4, phase="training")
    memory = Memory(made.objects)
    reader = Reader(memory)
    found = training(reader, Picture(reader.snapshot(), reader.snapshot().plan, made.now))  # type: ignore[arg-type]
    assert sorted(found.windows) == list(range(made.trained))
    assert found.wanted == 4
    assert found.live is not None
    assert (found.live.window, found.live.done, found.live.loss) == (made.trained, 40, 3.2)
    assert [(one.fingerprint, one.current) for one in found.evaluations] == [(OLD_FP, False)]
    json.dumps(found.to_json(), allow_nan=False)


def test_a_finished_build_has_its_own_evaluation_and_no_live_window() -> None:
    made = MadeStore(shards=40, windows=4, phase="finished")
    memory = Memory(made.objects)
    memory.put("eval/" + "e" * 12 + ".json", b"{torn", made.now)
    reader = Reader(memory)
    found = training(reader, Picture(reader.snapshot(), reader.snapshot().plan, made.now))  # type: ignore[arg-type]
    assert found.live is None
    assert [one.current for one in found.evaluations] == [False, True]


def test_a_lane_has_a_timeline_of_its_jobs(made: MadeStore, memory: Memory) -> None:
    found = picture(memory, made.now)
    shown = segments(found.snapshot, made.now - 3600, found.now)
    assert {segment.lane for segment in shown} >= set(GPUS[: made.lanes])
    assert [segment.start for segment in shown] == sorted(segment.start for segment in shown)
    assert all(segment.start <= segment.end <= found.now for segment in shown)
    running = [segment for segment in shown if segment.state == "running"]
    assert len(running) == made.lanes
    assert all(segment.end == found.now for segment in running)


def test_a_silent_job_whose_claim_is_renewed_has_a_lane_that_says_so(made: MadeStore, memory: Memory) -> None:
    """The job is counted as stale, so its lane and its span are: neither lost nor idle."""
    for place, state in ((1, "running"), (2, "done")):
        name = f"{made.graph.train[-place]}-{made.fp['generate']}"
        beat = heartbeat("generate", name, made.now - 1000, made.now - 900, state, total=12, gpus=[f"GPU-quiet{place}"])
        memory.put(f"progress/generate/{name}.json", beat, made.now - 900)
        memory.put(f"claims/generate/{name}.json", json.dumps({"expires": made.now + 60}).encode(), made.now)
    found = picture(memory, made.now)
    shown = {lane.id: lane.state for lane in lanes(found.snapshot, made.now) if "quiet" in lane.id}
    spans = {one.lane: one.state for one in segments(found.snapshot, made.now - 3600, made.now) if "quiet" in one.lane}
    assert shown == spans == {"GPU-quiet1": "stale", "GPU-quiet2": "stale"}
    assert sum(view.state == "stale" for view in found.views) >= 2


def test_a_failed_job_that_is_claimed_again_is_at_work(made: MadeStore, memory: Memory) -> None:
    """A later try says nothing before its model is loaded; until then its claim is all there is of it."""
    name = f"{made.graph.train[-1]}-{made.fp['generate']}"
    beat = heartbeat("generate", name, made.now - 90, made.now - 60, "failed", total=12, error="out of memory")
    memory.put(f"progress/generate/{name}.json", beat, made.now - 60)
    before = state_of(Reader(memory).snapshot(), made.now)
    memory.put(f"claims/generate/{name}.json", json.dumps({"expires": made.now + 60}).encode(), made.now)
    after = state_of(Reader(memory).snapshot(), made.now)
    jobs = [state.stage("generate").jobs for state in (before, after)]
    assert jobs[1].failed == jobs[0].failed - 1
    assert jobs[1].running == jobs[0].running + 1
    assert len(after.failures) == len(before.failures) - 1


def test_all_failures_are_counted_and_the_newest_are_given() -> None:
    made = MadeStore(shards=200, failures=60)
    state = state_of(Reader(Memory(made.objects)).snapshot(), made.now)
    told = state.to_json()
    assert len(state.failures) == told["failure_count"] == 60 + made.broken_audits
    assert len(told["failures"]) == 50
    assert [one["at"] for one in told["failures"]] == [one.at for one in state.failures[:50]]
    assert f"draftmill_failures {60.0 + made.broken_audits}\n" in metrics(state)
