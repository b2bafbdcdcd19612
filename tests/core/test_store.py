"""The local store: whole or not at all, one winner, a true listing, and folders that come and go under racing jobs."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from draftmill.errors import UserError
from draftmill.store.local import LocalStore, publishing


def files(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def publish(path, data, error=None):
    with publishing(path) as temporary:
        temporary.write_bytes(data)
        if error is not None:
            raise error


@pytest.mark.parametrize("error", [ValueError, OSError, KeyboardInterrupt])
def test_an_exception_while_publishing_leaves_nothing_and_keeps_the_old(tmp_path, error):
    path = tmp_path / "folder/object"
    with pytest.raises(error):
        publish(path, b"half", error)
    assert files(tmp_path) == []
    publish(path, b"old")
    with pytest.raises(error):
        publish(path, b"ne", error)
    assert path.read_bytes() == b"old"
    assert files(tmp_path) == ["folder/object"]


def test_a_publication_that_wrote_nothing_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError), publishing(tmp_path / "object"):
        pass
    assert files(tmp_path) == []


def test_parts_of_an_object(store):
    store.put("ten", b"0123456789")
    spans = [(0, 10), (2, 5), (8, 99), (3, 3), (5, 2)]
    assert [store.part("ten", *span) for span in spans] == [b"0123456789", b"234", b"89", b"", b""]


def test_an_unfinished_object_is_in_no_listing_and_in_no_glob(store):
    store.put("a/one.parquet", b"1")
    with publishing(store.path("a/two.parquet")) as temporary:
        temporary.write_bytes(b"2")
        assert list(store.list()) == ["a/one.parquet"]
        assert [path.name for path in store.path("a").glob("*.parquet")] == ["one.parquet"]
    assert sorted(store.list()) == ["a/one.parquet", "a/two.parquet"]


def test_a_listing_holds_size_and_time_and_only_what_starts_with_the_prefix(store):
    for key in ("a/b/x", "a/bc", "ab"):
        store.put(key, key.encode())
    assert set(store.list("a/b")) == {"a/b/x", "a/bc"}
    assert set(store.list("a/b/")) == {"a/b/x"}
    assert set(store.list("nothing/here")) == set()
    info = store.list()["a/bc"]
    assert (info.key, info.size) == ("a/bc", 4)
    assert info.modified == store.path("a/bc").stat().st_mtime


def test_an_absent_store_is_an_empty_one(store):
    assert store.list() == {}
    with pytest.raises(KeyError):
        store.get("a")
    store.delete("a")


def test_a_store_below_a_file_is_an_empty_one_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    store = LocalStore(tmp_path / "file/store")
    assert store.list() == {}
    with pytest.raises(KeyError):
        store.get("a")
    with pytest.raises(OSError, match="Not a directory"):
        store.put("a", b"")


def test_a_folder_that_is_a_link_to_another_disk_is_listed(store, tmp_path):
    (tmp_path / "other").mkdir()
    store.root.mkdir()
    store.path("hidden").symlink_to(tmp_path / "other")
    store.put("hidden/x", b"1")
    assert set(store.list()) == set(store.list("hidden/")) == {"hidden/x"}


def test_a_folder_that_cannot_be_read_is_no_empty_folder(store, monkeypatch):
    store.put("a/b/x", b"1")
    real = os.scandir

    def scandir(path):
        if str(path).endswith("a/b"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserError) as caught:
        store.list()
    folder = store.path("a/b")
    assert str(caught.value) == (
        f"store: {folder} cannot be read (Permission denied): mend its permissions or its disk."
    )


def test_deleting_removes_the_folders_that_become_empty_but_never_the_root(store):
    store.put("a/b/c/x", b"1")
    store.put("a/y", b"1")
    store.delete("a/b/c/x")
    assert not store.path("a/b").exists()
    store.delete("a/y")
    assert list(store.root.iterdir()) == []
    store.delete("a/y")


def test_create_keeps_the_first(store):
    assert store.create("k/x", b"first")
    assert not store.create("k/x", b"second")
    assert store.get("k/x") == b"first"
    assert files(store.root) == ["k/x"]


def racing(script: str, racers: int, *arguments: str) -> list[str]:
    """Run a script in several processes that start its last line at the same time; what each printed."""
    code = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from draftmill.store.local import LocalStore
        me, store, start = sys.argv[1], LocalStore(Path(sys.argv[2])), Path(sys.argv[3])
        print("ready", flush=True)
        sys.stdin.readline()
        """
    ) + textwrap.dedent(script)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(number), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(racers)
    ]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [0] * racers
    return said


def test_of_racing_creators_exactly_one_wins(store, tmp_path):
    script = """
        import json
        print(json.dumps([k for k in range(60) if store.create(f"k/{k}", me.encode())]))
    """
    won = [json.loads(text) for text in racing(script, 4, str(store.root), str(tmp_path))]
    assert sorted(key for keys in won for key in keys) == list(range(60))
    for winner, keys in enumerate(won):
        assert all(store.get(f"k/{key}") == str(winner).encode() for key in keys)
    assert len(files(store.root)) == 60


@pytest.mark.parametrize("key", ["journal/generate/{me}/x", "claims/generate/{me}.json"])
def test_jobs_that_clear_up_do_not_pull_folders_from_under_each_other(store, tmp_path, key):
    script = f"""
        for turn in range(150):
            store.put(f"{key}", b"1")
            store.delete(f"{key}")
            assert store.create(f"{key}", b"1")
            store.remove_unfinished(3600)
            store.delete(f"{key}")
    """
    racing(script, 3, str(store.root), str(tmp_path))
    assert list(store.root.iterdir()) == []


WAYS = {
    "put": lambda store, file: store.put("a/b/x", b"1"),
    "create": lambda store, file: store.create("a/b/x", b"1"),
    "publish": lambda store, file: store.publish("a/b/x", file),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seen", ["gone", "there a moment ago"])
def test_a_folder_that_goes_as_soon_as_it_is_made_is_made_again(store, tmp_path, monkeypatch, way, seen):
    (tmp_path / "file").write_bytes(b"1")
    mkdir, left = Path.mkdir, [3]

    def made_and_removed(path, *arguments, **options):
        mkdir(path, *arguments, **options)
        if path.name == "b" and left[0]:
            left[0] -= 1
            os.rmdir(path)
            if seen != "gone":  # what pathlib says if the folder is there first and then not
                raise FileExistsError(17, "File exists", str(path))

    monkeypatch.setattr(Path, "mkdir", made_and_removed)
    WAYS[way](store, tmp_path / "file")
    assert store.get("a/b/x") == b"1"
    assert files(store.root) == ["a/b/x"]


def test_a_folder_stays_while_something_is_published_in_it(store):
    store.put("a/b/y", b"1")
    with publishing(store.path("a/b/x")) as temporary:
        store.delete("a/b/y")
        temporary.write_bytes(b"2")
    assert store.get("a/b/x") == b"2"
