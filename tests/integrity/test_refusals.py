"""What is no damage: an object that vanishes while it is looked at, and one that the system does not let be read now."""

import errno
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest
import safetensors
import yaml

from draftmill import hidden_states, layout
from draftmill.catalog import OBJECTS, Entry, identify
from draftmill.cli import main
from draftmill.drafter import conformance
from draftmill.errors import UserError
from draftmill.integrity import checks, documents, reader, said, states
from draftmill.integrity.checks import Unit
from draftmill.integrity.reader import Reader
from draftmill.integrity.verify import Options, verify
from draftmill.store.local import LocalStore
from tests.core.conftest import is_one_sentence
from tests.integrity.stores import settings

NOBODY = 65534


def entries(store: LocalStore) -> list[Entry]:
    return [entry for key in sorted(store.list()) if (entry := identify(key)) and entry.kind in OBJECTS]


def families(store: LocalStore) -> list[list[Entry]]:
    """Units of one object, and those of several, whose objects are held against one another."""
    found, together = entries(store), {}
    for entry in found:
        together.setdefault(entry.shard or entry.name, []).append(entry)
    return [[entry] for entry in found] + list(together.values())


# Vanished ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deep", [False, True])
def test_an_object_that_vanishes_before_it_is_opened_is_no_damage(toy, monkeypatch, deep):
    opened = checks._open

    def removed(path, *arguments, **options):
        path.unlink()
        return opened(path, *arguments, **options)

    monkeypatch.setattr(checks, "_open", removed)
    for entry in entries(toy.store):
        data = toy.path(entry.key).read_bytes()
        assert Unit(Reader(toy.store), [entry], deep=deep).check() == [], entry.kind
        toy.path(entry.key).write_bytes(data)


def test_an_object_that_vanishes_between_two_readings_of_it_is_no_damage(toy, monkeypatch):
    """An audit is read twice, a shard of hidden states once more for its values."""
    check = said.check

    def removed(entry, provenance):
        toy.path(entry.key).unlink()
        check(entry, provenance)

    monkeypatch.setattr(said, "check", removed)
    for kind in ("audit", "hidden"):
        entry = next(entry for entry in entries(toy.store) if entry.kind == kind)
        assert Unit(Reader(toy.store), [entry], deep=False).check() == []


@pytest.mark.parametrize("file", ["completions", "model.safetensors", "config.json"])
def test_an_object_that_vanishes_before_another_is_held_against_it_is_no_damage(toy, monkeypatch, file):
    gone = toy.graph.completions(toy.graph.train[0]) if file == "completions" else toy.graph.drafter(0, file)

    def behind_a_removal(check):
        def removed(*arguments, **options):
            if {toy.path(gone), toy.path(gone).parent} & {path for path in arguments if isinstance(path, Path)}:
                toy.path(gone).unlink()
            return check(*arguments, **options)

        return removed

    monkeypatch.setattr(documents, "check_contract", behind_a_removal(documents.check_contract))
    monkeypatch.setattr(states, "check_rows", behind_a_removal(states.check_rows))
    assert verify(Reader(toy.store)).findings == []
    assert not toy.path(gone).exists()


class Remote:
    """A folder that is read as a remote store is."""

    def __init__(self, store: LocalStore) -> None:
        self.store = store

    def __getattr__(self, name: str):
        return getattr(self.store, name)


def test_a_large_remote_object_that_vanishes_before_its_header_is_read_is_no_damage(toy, monkeypatch):
    key = toy.graph.hidden(toy.graph.train[0])
    part = LocalStore.part

    def removed(store, asked, *span):
        store.path(key).unlink(missing_ok=True)
        return part(store, asked, *span)

    monkeypatch.setattr(reader, "FETCH_BYTES", 0)
    monkeypatch.setattr(LocalStore, "part", removed)
    assert Unit(Reader(Remote(toy.store)), [identify(key)], deep=False).check() == []


# Refused ----------------------------------------------------------------------------------------------------------------


@contextmanager
def few_files(free: int) -> Iterator[None]:
    """So many more files can be opened by this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, hard))
        with suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(free):
            os.close(held.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)


@contextmanager
def nobody() -> Iterator[None]:
    """Files that others may not read are refused, also to root."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture
def open_store(pristine: Path) -> Iterator[LocalStore]:
    """A copy of the toy store in a folder that everybody may enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        shutil.copytree(pristine / "build", Path(folder) / "build")
        yield LocalStore(Path(folder) / "build")


def sentence_or_nothing(unit: Unit, words: str) -> bool:
    """Whether a look at a unit is refused, in these words; otherwise it must find nothing."""
    refusal = None
    try:
        assert unit.check() == [], [entry.kind for entry in unit.entries.values()]
    except UserError as error:
        refusal = error
    assert refusal is None or (is_one_sentence(refusal) and words in str(refusal))
    return refusal is not None


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("free", [0, 1, 2, 3])
def test_too_many_open_files_are_said_and_are_no_damage(toy, free, deep):
    assert verify(Reader(toy.store), Options(deep=deep)).findings == []  # and everything is imported
    refused = []
    for family in families(toy.store):
        unit = Unit(Reader(toy.store), family, deep=deep)
        for entry in family:
            unit.reader.record(entry.stage, entry.name)
        with few_files(free):
            refused.append(sentence_or_nothing(unit, "cannot be read (Too many open files): mend that"))
    assert all(refused) if free == 0 else not all(refused)


@pytest.mark.parametrize("deep", [False, True])
def test_an_object_without_permission_is_said_and_is_no_damage(open_store, deep):
    look = Reader(open_store)
    assert verify(look, Options(deep=deep)).findings == []
    for entry in entries(open_store):
        open_store.path(entry.key).chmod(0)
        with nobody():
            words = f"{open_store.path(entry.key)} cannot be written or read (Permission denied): mend its permissions"
            assert sentence_or_nothing(Unit(look, [entry], deep=deep), words), entry.kind
        open_store.path(entry.key).chmod(0o644)


def test_a_refusal_for_a_moment_is_no_damage(toy, monkeypatch):
    """safetensors says that there is no such file, and when the system is asked it gives it."""

    def no_such_file(path, **_):
        raise FileNotFoundError(f"No such file or directory: {path}")

    for module in (hidden_states, conformance, safetensors):
        monkeypatch.setattr(module, "safe_open", no_such_file)
    for entry in entries(toy.store):
        if entry.key.endswith(".safetensors"):
            assert sentence_or_nothing(Unit(Reader(toy.store), [entry], deep=False), "refused it for a moment")
    with pytest.raises(OSError, match="No such file"):
        documents.check_contract(toy.path(toy.graph.drafter(0, "model.safetensors")).parent, deep=False)


def refuse(monkeypatch, key, error):
    """Let the store raise the error for one key."""
    get = LocalStore.get

    def refusing(store, asked):
        if asked == key:
            raise error
        return get(store, asked)

    monkeypatch.setattr(LocalStore, "get", refusing)


def test_what_cannot_be_read_beside_the_objects_is_said(toy, monkeypatch):
    key = layout.claim("generate", "0123456789ab-0123456789ab")
    toy.store.put(key, b"{}")
    refuse(monkeypatch, key, OSError(errno.EACCES, "Permission denied", str(toy.path(key))))
    with pytest.raises(UserError, match=r"/claims/generate/.* cannot be written or read \(Permission denied\)"):
        verify(Reader(toy.store))


def test_a_record_that_the_disk_does_not_give_back_is_no_damage_of_its_objects(toy, monkeypatch):
    key = layout.record("pilot", toy.graph.specs.fp["pilot"])
    refuse(monkeypatch, key, OSError(errno.EIO, "Input/output error", str(toy.path(key))))
    found = verify(Reader(toy.store)).findings
    assert [(finding.key, finding.what) for finding in found] == [(toy.graph.pilot(), "record unreadable")]


def test_a_broken_disk_of_this_machine_says_nothing_of_a_remote_object(toy, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "Input/output error", "/tmp/draftmill-x")

    monkeypatch.setattr(LocalStore, "fetch", broken)
    with pytest.raises(UserError, match=r"/tmp/draftmill-x cannot be read \(Input/output error\)"):
        verify(Reader(Remote(toy.store)))


# The command --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def quarantine(toy, monkeypatch, capsys):
    """Call `draftmill verify --quarantine` while something befalls one object as it is opened; nothing may be moved."""
    folder, key = toy.store.root.parent, toy.graph.hidden(toy.graph.train[0])
    (folder / "config.yaml").write_text(yaml.safe_dump(settings(folder)))
    monkeypatch.setattr(sys, "argv", ["draftmill", "verify", "--quarantine", "--configfile", "config.yaml"])
    monkeypatch.setattr("draftmill.integrity.verify._LOCAL_WORKERS", 1)
    verify(Reader(toy.store))  # so that everything is imported
    opened = checks._open

    def run(befall):
        def spoilt(path, *arguments, **options):
            with befall(path) if path == toy.path(key) else nullcontext():
                return opened(path, *arguments, **options)

        monkeypatch.setattr(checks, "_open", spoilt)
        with pytest.raises(SystemExit) as ended:
            main()
        assert toy.store.list("quarantine/") == {}
        return ended.value.code or 0, *capsys.readouterr()

    return run


def test_verify_beside_a_build_that_removes_states_finds_nothing(quarantine):
    code, out, err = quarantine(lambda path: nullcontext(path.unlink()))
    assert (code, err) == (0, "")
    assert out.endswith("none damaged.\n")


def test_verify_with_too_many_open_files_ends_with_a_sentence(quarantine):
    code, out, err = quarantine(lambda path: few_files(0))
    assert (code, out) == (2, "")
    assert err.startswith("draftmill: ")
    assert err.endswith(
        " cannot be read (the system refused it for a moment, perhaps for too many open files): mend that and give the "
        "same command again; nothing was moved.\n"
    )
