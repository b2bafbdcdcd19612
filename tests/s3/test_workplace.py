"""A job's view of a store on S3: outputs before journals, one winner for all outputs, work that outlives the machine."""

from pathlib import Path

import pytest

from draftmill.store import workplace
from draftmill.store.local import LocalStore
from draftmill.store.s3 import S3Store
from draftmill.store.workplace import Workplace


@pytest.fixture
def place(s3_store: S3Store, tmp_path: Path) -> Workplace:
    return Workplace(s3_store, tmp_path / "scratch")


def outputs(folder: Path, text: str, keys: tuple[str, ...] = ("a/rows", "a/rejected")) -> dict[str, Path]:
    made = {key: folder / text / key for key in keys}
    for key, path in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text} {key}")
    return made


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
