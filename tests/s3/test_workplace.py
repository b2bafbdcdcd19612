"""A job's view of a store on S3: outputs before journals, one winner for all outputs, work that outlives the machine."""

import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftmill.job import Job
from draftmill.store import workplace
from draftmill.store.claims import Claim, Holder
from draftmill.store.local import LocalStore
from draftmill.store.s3 import S3Store
from draftmill.store.s3_wire import sha256_file
from draftmill.store.workplace import Workplace
from tests.tiny import config_values


@pytest.fixture
def place(s3_store: S3Store, tmp_path: Path) -> Workplace:
    return Workplace(s3_store, tmp_path / "scratch")


def outputs(folder: Path, text: str, keys: tuple[str, ...] = ("a/rows", "a/rejected")) -> dict[str, Path]:
    made = {key: folder / text / key for key in keys}
    for key, path in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text} {key}")
    return made


def job_of(store: S3Store, files: Iterable[Path]) -> Job:
    return Job(
        SimpleNamespace(
            config={**config_values(), "store": store.url, "s3": {"endpoint_url": store.settings.endpoint_url}},
            params=SimpleNamespace(stage="extract", name="a-b", provenance={}),
            input={},
            output={str(number): str(path) for number, path in enumerate(files)},
        )
    )


def test_a_file_is_known_by_its_key_wherever_snakemake_keeps_copies(place, s3_store, tmp_path):
    copy = Path(".snakemake/storage/s3lean") / s3_store.bucket / f"{s3_store.prefix}hidden/a.safetensors"
    assert place.key(copy) == place.key(tmp_path / copy) == "hidden/a.safetensors"
    assert place.sibling(copy, "audits/b.html") == Path(str(copy).replace("hidden/a.safetensors", "audits/b.html"))
    local = Workplace(LocalStore(Path("build")), tmp_path)
    assert local.key(Path("build/hidden/a")) == "hidden/a"
    assert local.sibling(Path("build/hidden/a"), "eval/b") == Path("build/eval/b")


def test_a_journal_stays_until_the_outputs_are_published(place, s3_store, tmp_path):
    journal = place.journal("journal/generate/a")
    journal.append([{"row": 1}])
    journal.clear()
    assert len(s3_store.list("journal/")) == 1, "a kill now would lose the outputs but not the rows"
    place.commit(outputs(tmp_path, "mine"))
    assert s3_store.list("journal/") == {}
    assert s3_store.get("a/rows") == b"mine a/rows"


def test_the_loser_takes_all_of_the_winners_outputs(s3_store, tmp_path):
    Workplace(s3_store, tmp_path).commit(outputs(tmp_path, "winner"))
    mine = outputs(tmp_path, "loser")
    Workplace(s3_store, tmp_path).commit(mine)
    assert {key: path.read_text() for key, path in mine.items()} == {key: f"winner {key}" for key in mine}
    assert s3_store.get("a/rejected") == b"winner a/rejected"


def test_a_winner_that_died_between_its_outputs_does_not_mix_with_others(s3_store, tmp_path, monkeypatch):
    monkeypatch.setattr(workplace, "_WINNER_S", 0.0)
    s3_store.put("a/rows", b"dead a/rows")
    Workplace(s3_store, tmp_path).commit(outputs(tmp_path, "mine"))
    assert {s3_store.get("a/rows"), s3_store.get("a/rejected")} == {b"mine a/rows", b"mine a/rejected"}


class Rival:
    """Another job that has published its first output and is `looks` looks at its claim away from the others."""

    def __init__(self, store: S3Store, looks: int) -> None:
        self.store, self.left = store, looks
        store.put("a/rows", b"winner a/rows")

    def __call__(self) -> bool:
        self.left -= 1
        if self.left == 0:
            self.store.put("a/rejected", b"winner a/rejected")
        return self.left >= 0


def test_a_winner_that_is_slow_and_lives_is_waited_for(s3_store, tmp_path, monkeypatch):
    monkeypatch.setattr(workplace, "_WINNER_S", -3600.0)
    monkeypatch.setattr(workplace, "_LOOK_S", 0.01)
    mine = outputs(tmp_path, "loser")
    Workplace(s3_store, tmp_path).commit(mine, Rival(s3_store, 20))
    assert {path.read_text() for path in mine.values()} == {"winner a/rows", "winner a/rejected"}
    assert {s3_store.get(key) for key in mine} == {b"winner a/rows", b"winner a/rejected"}


def test_a_winner_of_whom_nothing_is_known_has_time_for_its_bytes(s3_store, tmp_path, monkeypatch):
    monkeypatch.setattr(workplace, "_WINNER_S", 0.0)
    monkeypatch.setattr(workplace, "_SLOWEST", 1.0)  # an hour for the file here
    mine = outputs(tmp_path, "loser")
    mine["a/rejected"].write_bytes(b"x" * 3600)
    s3_store.put("a/rows", b"winner a/rows")
    looks = []

    def look(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            s3_store.put("a/rejected", b"winner a/rejected")

    monkeypatch.setattr(workplace.time, "sleep", look)
    Workplace(s3_store, tmp_path).commit(mine)
    assert len(looks) == 3
    assert {path.read_text() for path in mine.values()} == {"winner a/rows", "winner a/rejected"}


@pytest.mark.parametrize("overrun_before", ["a/rejected", "a/last"])
def test_a_winner_that_was_overrun_takes_the_others_outputs(s3_store, tmp_path, monkeypatch, overrun_before):
    """It seemed dead, the loser has published all of its own over it, and it lives."""
    keys = ("a/rows", "a/rejected", "a/last")
    slow, quick = outputs(tmp_path, "slow", keys), outputs(tmp_path, "quick", keys)
    offer = s3_store.offer

    def late(key: str, path: Path, first: str = "") -> bool:
        if key == overrun_before:
            monkeypatch.setattr(s3_store, "offer", offer)
            for name, file in quick.items():
                s3_store.publish(name, file)
        return offer(key, path, first)

    monkeypatch.setattr(s3_store, "offer", late)
    Workplace(s3_store, tmp_path).commit(slow)
    assert {key: path.read_text() for key, path in slow.items()} == {key: f"quick {key}" for key in keys}
    assert {key: s3_store.get(key).decode() for key in keys} == {key: f"quick {key}" for key in keys}


@pytest.mark.parametrize("dies", [False, True])
def test_outputs_of_two_jobs_that_stand_side_by_side_are_nobodys(s3_store, tmp_path, monkeypatch, dies):
    """Whoever overran the winner has come to its second output when the winner publishes the last one."""
    monkeypatch.setattr(workplace, "_WINNER_S", 0.0)
    monkeypatch.setattr(workplace, "_SLOWEST", 1e9)
    keys = ("a/rows", "a/rejected", "a/last")
    slow, quick = outputs(tmp_path, "slow", keys), outputs(tmp_path, "quick", keys)
    offer, digest = s3_store.offer, sha256_file(quick["a/rows"])

    def late(key: str, path: Path, first: str = "") -> bool:
        if key == "a/last":
            s3_store.publish("a/rows", quick["a/rows"])
            s3_store.publish("a/rejected", quick["a/rejected"], digest)
        return offer(key, path, first)

    def later(seconds: float) -> None:
        if not dies:
            s3_store.publish("a/last", quick["a/last"], digest)

    monkeypatch.setattr(s3_store, "offer", late)
    monkeypatch.setattr(workplace.time, "sleep", later)
    if not dies:
        monkeypatch.setattr(workplace, "_WINNER_S", 3600.0)
    Workplace(s3_store, tmp_path).commit(slow)
    stands = "slow" if dies else "quick"
    assert {key: path.read_text() for key, path in slow.items()} == {key: f"{stands} {key}" for key in keys}
    assert {key: s3_store.get(key).decode() for key in keys} == {key: f"{stands} {key}" for key in keys}


def test_a_first_output_that_was_removed_meanwhile_is_published_again(s3_store, tmp_path, monkeypatch):
    """Another job took the claim over, and began by removing what it took for a dead job's."""
    offer = s3_store.offer

    def late(key: str, path: Path, first: str = "") -> bool:
        if key == "a/rejected":
            Workplace(s3_store, tmp_path).finished(["a/rows", "a/rejected"])
        return offer(key, path, first)

    monkeypatch.setattr(s3_store, "offer", late)
    Workplace(s3_store, tmp_path).commit(outputs(tmp_path, "mine"))
    assert {key: s3_store.get(key) for key in s3_store.list()} == {
        key: f"mine {key}".encode() for key in ("a/rows", "a/rejected")
    }


def test_outputs_of_an_earlier_try_are_removed_unless_they_are_all(s3_store, tmp_path):
    place, keys = Workplace(s3_store, tmp_path), ["a/rows", "a/rejected"]
    assert not place.finished(keys)
    place.commit(outputs(tmp_path, "mine"))
    assert place.finished(keys)
    assert set(s3_store.list()) == set(keys)
    s3_store.publish("a/rejected", outputs(tmp_path, "another")["a/rejected"], "0" * 64)
    assert not place.finished(keys), "they are of two jobs"
    assert s3_store.list() == {}
    s3_store.put("a/rows", b"")
    assert not place.finished(keys)
    assert s3_store.list() == {}
    folder = Workplace(LocalStore(tmp_path / "folder"), tmp_path)
    folder.store.put("a/rows", b"")
    assert not folder.finished(keys)
    assert set(folder.store.list()) == {"a/rows"}, "Snakemake's to remove"


def test_what_an_earlier_try_left_behind_its_first_output_is_replaced(s3_store, tmp_path):
    s3_store.put("a/rejected", b"old")
    Workplace(s3_store, tmp_path).commit(outputs(tmp_path, "mine"))
    assert s3_store.get("a/rejected") == b"mine a/rejected"


@pytest.mark.parametrize("change", ["goes", "is replaced"])
def test_outputs_that_change_while_they_are_taken_are_taken_whole_or_not_at_all(
    s3_store, tmp_path, monkeypatch, change
):
    winner, mine = outputs(tmp_path, "winner"), outputs(tmp_path, "loser")
    Workplace(s3_store, tmp_path).commit(winner)
    place, fetch = Workplace(s3_store, tmp_path), s3_store.fetch

    def changing(key: str, path: Path) -> None:
        fetch(key, path)
        if change == "goes":
            s3_store.delete("a/rejected")
        else:
            s3_store.put("a/rejected", b"another's")

    monkeypatch.setattr(s3_store, "fetch", changing)
    assert not place.take(mine)
    assert {key: path.read_text() for key, path in mine.items()} == {key: f"loser {key}" for key in mine}
    assert {file.name for file in mine["a/rows"].parent.iterdir()} == {"rows", "rejected"}
    monkeypatch.setattr(s3_store, "fetch", fetch)
    Workplace(s3_store, tmp_path).commit(winner)
    assert place.take(mine)
    assert {key: path.read_text() for key, path in mine.items()} == {key: f"winner {key}" for key in mine}


def test_outputs_that_went_before_they_were_taken_are_published_again(s3_store, tmp_path, monkeypatch):
    """The winner's states were trained on and removed; its first output goes last."""
    Workplace(s3_store, tmp_path).commit(outputs(tmp_path, "winner"))
    mine, fetch = outputs(tmp_path, "loser"), s3_store.fetch

    def gone(key: str, path: Path) -> None:
        for name in mine:
            s3_store.delete(name)
        fetch(key, path)

    monkeypatch.setattr(s3_store, "fetch", gone)
    Workplace(s3_store, tmp_path).commit(mine)
    assert {key: s3_store.get(key).decode() for key in mine} == {key: f"loser {key}" for key in mine}


def test_a_checkpoint_that_another_build_clears_meanwhile_is_none(s3_store, tmp_path, monkeypatch):
    s3_store.put("journal/train/a-0/trainer", b"step 200")
    fetch = s3_store.fetch

    def cleared(key: str, path: Path) -> None:
        s3_store.delete(key)
        fetch(key, path)

    monkeypatch.setattr(s3_store, "fetch", cleared)
    folder, _ = Workplace(s3_store, tmp_path).folder("journal/train/a-0")
    assert not (folder / "trainer").exists()


def test_a_checkpoint_of_a_killed_job_is_there_on_another_machine(s3_store, tmp_path):
    folder, saved = Workplace(s3_store, tmp_path / "one").folder("journal/train/a-0")
    (folder / "resume").mkdir(parents=True)
    (folder / "resume/trainer").write_text("step 200")
    saved(folder / "resume/trainer")

    other = Workplace(s3_store, tmp_path / "two")
    folder, _ = other.folder("journal/train/a-0")
    assert (folder / "resume/trainer").read_text() == "step 200"
    other.commit(outputs(tmp_path, "mine"))
    assert s3_store.list("journal/") == {}


def test_an_object_that_no_rule_reads_is_brought_and_forgotten(place, s3_store):
    s3_store.put("prompts/a.parquet", b"rows")
    path = place.read("prompts/a.parquet")
    assert path.read_bytes() == b"rows"
    place.commit({})
    assert not path.exists()
    with pytest.raises(KeyError):
        place.read("prompts/absent")


def test_a_failed_audit_is_published_and_a_passed_one_forgets_it(place, s3_store):
    def audit(limits: str, fails: bool) -> None:
        with place.beside(f"audits/failed/a-{limits}.json", "audits/failed/a-") as path:
            if fails:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(limits)
                raise RuntimeError
            for old in path.parent.glob("a-*"):
                old.unlink()

    s3_store.put("audits/failed/b-1.json", b"")
    with pytest.raises(RuntimeError):
        audit("1", fails=True)
    assert s3_store.get("audits/failed/a-1.json") == b"1"
    audit("2", fails=False)
    assert set(s3_store.list("audits/")) == {"audits/failed/b-1.json"}


def test_a_job_whose_finished_outputs_go_before_they_are_taken_is_done_again(s3_store, tmp_path, monkeypatch):
    key = "hidden/a-b.safetensors"
    copy = tmp_path / f"s3lean/{s3_store.bucket}/{s3_store.prefix}{key}"
    copy.parent.mkdir(parents=True)
    copy.write_bytes(b"of an earlier try")
    job = job_of(s3_store, [copy])
    s3_store.put(key, b"another's")
    with job.claimed() as todo:
        assert not todo
    assert copy.read_bytes() == b"another's"
    fetch = S3Store.fetch

    def gone(store: S3Store, key: str, path: Path) -> None:
        store.delete(key)
        fetch(store, key, path)

    monkeypatch.setattr(S3Store, "fetch", gone)
    with job.claimed() as todo:
        assert todo


def test_a_job_forgets_what_a_killed_try_has_published_of_its_outputs(s3_store, tmp_path):
    mine = outputs(tmp_path / f"s3lean/{s3_store.bucket}", "", tuple(f"{s3_store.prefix}a/{n}" for n in ("rows", "no")))
    s3_store.put("a/rows", b"a killed try's, which nobody is to wait for")
    job = job_of(s3_store, mine.values())
    with job.claimed() as todo:
        assert todo
        assert not s3_store.list("a/")
        job.commit()
    assert set(s3_store.list("a/")) == {"a/rows", "a/no"}
    with job.claimed() as todo:
        assert not todo


def test_a_job_waits_for_a_winner_that_holds_its_claim(s3_store, tmp_path, monkeypatch):
    """Its own claim ran out while the store was away, and another took over, finished first and is slow to upload."""
    monkeypatch.setattr(workplace, "_WINNER_S", -3600.0)
    mine = outputs(tmp_path / f"s3lean/{s3_store.bucket}", "", tuple(f"{s3_store.prefix}a/{n}" for n in ("rows", "no")))
    job = job_of(s3_store, mine.values())
    looks = []

    def look(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            s3_store.put("a/no", b"winner")

    with job.claimed():
        s3_store.put("claims/extract/a-b.json", Claim("o", Holder(1, 1, "b", "n"), "h", "r", time.time()).encode())
        s3_store.put("a/rows", b"winner")
        monkeypatch.setattr(workplace.time, "sleep", look)
        job.commit()
    assert len(looks) == 3
    assert {path.read_bytes() for path in mine.values()} == {b"winner"}
