"""The checks of objects that belong together: all of one shard, the files of one drafter, or one object alone.

Each object is first held against what is known of its bytes, then opened, then held against the others of its unit. What
is damaged is not held against anything: the fault of a prompt shard must not be blamed on its completions.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from draftmill import layout
from draftmill.canonical import digest_file
from draftmill.catalog import Entry, identify
from draftmill.errors import UserError, reason
from draftmill.integrity import documents, said, tables
from draftmill.integrity.findings import Finding, Note, Unsound, require
from draftmill.integrity.reader import Gone, Reader
from draftmill.integrity.refusals import of_system, refused

_T = TypeVar("_T")


class Unit:
    """The objects that are checked together, and what was found."""

    def __init__(self, reader: Reader, entries: Sequence[Entry], *, deep: bool) -> None:
        self.reader, self.deep = reader, deep
        self.entries = {entry.key: entry for entry in entries}
        self.findings: list[Finding] = []
        self.damaged: set[str] = set()
        self._facts: dict[str, Any] = {}

    def check(self) -> list[Finding]:
        """Everything that is wrong with the unit."""
        for entry in self.entries.values():
            self._facts[entry.key] = self._try(entry.key, partial(self._look, entry))
        # In the order of making: what was found wrong is not held against what was made from it.
        for kind, relate in _RELATIONS.items():
            for entry in self.entries.values():
                if entry.kind == kind and self.sound(entry.key):
                    self._try(entry.key, partial(relate, self, entry))
        return self.findings

    def _look(self, entry: Entry) -> Any:
        """Hold an object against what is known of its bytes, then open it; a remote one is fetched once."""
        known = self._known_digests(entry)
        if not (self.deep or self.reader.within_reach(entry.key)):
            if entry.kind == "hidden":  # only its header is read
                said.check(entry, self._provenance(entry))
            return None
        with self.reader.file(entry.key) as path:
            if self.deep and known:
                found = digest_file(path).removeprefix("sha256:")
                require(found in known, "digest", f"sha256 {known[0]}", f"sha256 {found}")
            return _open(path, entry, self.reader, deep=self.deep)

    def _provenance(self, entry: Entry) -> Mapping[str, Any]:
        found = self.reader.provenance(entry.key)
        if not found and self.reader.store.info(entry.key) is None:
            raise Gone(entry.key)
        return found

    def _try(self, key: str, check: Callable[[], _T]) -> _T | None:
        try:
            return check()
        except Unsound as unsound:
            self.findings.append(unsound.about(key))
            self.damaged.add(key)
        except Gone:
            pass
        except (OSError, RuntimeError) as error:
            self._blame_disk(key, error)
        return None

    def _blame_disk(self, key: str, error: OSError | RuntimeError) -> None:
        """Keep an error of the store's own disk as damage; raise any other, which says nothing of the object."""
        found = of_system(error)
        if found is None:
            raise error
        if found.errno != errno.EIO or not self.reader.local:
            raise refused(found, self.reader.store.address(key)) from None
        self.findings.append(Finding(key, "unreadable", "bytes that the disk gives back", reason(found)))
        self.damaged.add(key)

    def note(self, key: str, what: Note, expected: str, found: str) -> None:
        """Keep something that is no damage."""
        self.findings.append(Finding(key, what, expected, found))

    def sound(self, key: str) -> bool:
        """Whether an object is there and no damage was found."""
        return key in self.reader.present and key not in self.damaged

    def facts(self, key: str) -> Any:
        """What was read from an object of the unit; None if it is absent, damaged, or was not opened."""
        return self._facts.get(key) if self.sound(key) else None

    def _known_digests(self, entry: Entry) -> list[str]:
        """The digest that an object must have, from the store itself or else from its record; sizes are checked here."""
        size = self.reader.listing[entry.key].size
        require(size > 0, "empty", "bytes", "none")
        recorded, stored = self.reader.recorded(entry), self.reader.stored_digest(entry.key)
        if entry.job and recorded is None:
            self._note_no_record(entry)
        if stored and recorded is not None and recorded.sha256 not in (None, stored):
            self.note(entry.key, "record of another", f"sha256 {recorded.sha256}", f"sha256 {stored}, which is stored")
        elif recorded is not None:
            require(size == recorded.bytes, "size", f"{recorded.bytes} bytes", f"{size} bytes")
        digest = stored or (recorded.sha256 if recorded is not None else None)
        return [digest] if digest else []

    def _note_no_record(self, entry: Entry) -> None:
        key = layout.record(entry.stage, entry.name)
        if key not in self.reader.present:
            self.note(entry.key, "record missing", key, "nothing")
        elif self.reader.record(entry.stage, entry.name) is None:
            self.note(entry.key, "record unreadable", key, "no record in it")
        else:
            self.note(entry.key, "record missing", f"the object in {key}", "other objects")


def _open(path: Path, entry: Entry, reader: Reader, *, deep: bool) -> Any:
    """Open an object by its kind; what its unit's other objects are held against. Raises Unsound."""
    match entry.kind:
        case "index":
            return _check_index(reader)
        case "prompts":
            return tables.read_prompts(path, entry, deep=deep)
        case "completions" | "rejected":
            return tables.read_rows(path, entry, deep=deep)
        case "hidden":
            from draftmill.integrity.states import open_shard

            return open_shard(path, entry, deep=deep)
        case "audit":
            return documents.check_audit(path, entry)
        case "audit_page" | "audit_set" | "report":
            return documents.check_page(path)
        case "pilot":
            return documents.check_pilot(path, entry)
        case "evaluation":
            return documents.check_evaluation(path, entry)
        case "drafter":
            return _check_drafter_file(path, entry, deep=deep)
    return None


def _check_index(reader: Reader) -> None:
    from draftmill.prompts.index import load

    try:
        load(reader.store)
    except UserError as error:
        if error.kind != "mistake":  # the store is away, which says nothing of the index
            raise
        raise Unsound("unreadable", "an index of prompts", "something else") from None


def _check_drafter_file(path: Path, entry: Entry, *, deep: bool) -> None:
    match path.name:
        case "config.json":
            documents.check_config(path, entry)
        case "train.json":
            documents.check_train(path, entry)
        case "trainer.safetensors":
            documents.check_trainer(path, entry, deep=deep)
        case "model.safetensors":
            documents.check_header(path)


# Together -------------------------------------------------------------------------------------------------------------


def _relate_completions(unit: Unit, entry: Entry) -> None:
    beside = layout.rejected(entry.shard, entry.fp)
    if beside not in unit.reader.present:
        unit.note(entry.key, "incomplete", f"{beside} beside it", "nothing")
    prompts = unit.facts(layout.prompts(entry.shard))
    good, bad = unit.facts(entry.key), unit.facts(beside)
    if prompts is not None and good is not None and bad is not None:
        tables.check_conserved(prompts, good, bad)


def _remade(unit: Unit, entry: Entry, read: str) -> bool:
    """Whether the records say that an input was made again after an object had read it; engines may then differ."""
    own, other = unit.reader.record(entry.stage, entry.name), identify(read)
    then = own.inputs.get(read) if own is not None else None
    now = unit.reader.recorded(other) if other is not None else None
    if then is None or now is None or None in (then.sha256, now.sha256) or then.sha256 == now.sha256:
        return False
    unit.note(entry.key, "remade input", f"{read} of sha256 {then.sha256}", f"sha256 {now.sha256}")
    return True


def _relate_hidden(unit: Unit, entry: Entry) -> None:
    states = unit.facts(entry.key)
    if states is None:
        return
    completions = str((states.provenance.get("inputs") or {}).get("completions"))
    rows = unit.facts(completions)
    if rows is None or _remade(unit, entry, completions):
        return
    from draftmill.integrity.states import check_rows

    with unit.reader.file(completions) as path:
        check_rows(states, path, rows, deep=unit.deep)


def _relate_audit(unit: Unit, entry: Entry) -> None:
    audit = unit.facts(entry.key)
    made_from = None if audit is None else identify(str(audit.provenance["inputs"]["completions"]))
    if audit is None or made_from is None:
        return
    good = unit.facts(made_from.key)
    bad = unit.facts(layout.rejected(made_from.shard, made_from.fp))
    if good is not None and bad is not None and not _remade(unit, entry, made_from.key):
        counts = audit.measurements.overall
        found = f"{counts.rows} answers and {counts.rejections} rejected"
        rows = f"{len(good.keys)} answers and {len(bad.keys)} rejected"
        require(found == rows, "rows", rows, found)


def _relate_drafter(unit: Unit, entry: Entry) -> None:
    if not entry.key.endswith("/model.safetensors"):
        return
    config = entry.key.replace("model.safetensors", "config.json")
    if not unit.sound(config):
        return
    if unit.deep or unit.reader.within_reach(entry.key):
        with unit.reader.files(entry.key, config) as (model, _):
            documents.check_contract(model.parent, deep=unit.deep)


_RELATIONS: dict[str, Callable[[Unit, Entry], None]] = {
    "completions": _relate_completions,
    "hidden": _relate_hidden,
    "audit": _relate_audit,
    "drafter": _relate_drafter,
}
