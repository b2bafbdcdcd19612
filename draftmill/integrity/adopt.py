"""`draftmill adopt`: what is left to do after an upgrade, so that it does not throw away days of work.

When the version of a stage rises, all its objects and all that follow get other names. Most of them would come out the
same. adoption.py declares which; here the whole chain is followed: an object is taken over if it stands under the present
meaning of its own stage and if everything that it was made from does too. The copy under the new name holds the present
spec, the fingerprints that follow from it, and the ones that it had before (`adopted_from`). Only what a given
configuration asks for and lacks is taken over.
"""

from __future__ import annotations

import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftmill import layout
from draftmill.adoption import NoStepError, steps, upgrade
from draftmill.canonical import fingerprint
from draftmill.catalog import OBJECTS, Entry, identify, job_name, outputs, parts
from draftmill.graph import ONCE, Graph
from draftmill.integrity import said
from draftmill.integrity.findings import require
from draftmill.integrity.reader import Gone, Reader
from draftmill.integrity.relabel import page_of, relabel
from draftmill.records import Content, Record, content_of, write_record
from draftmill.specs import INPUTS, SPEC_VERSIONS

STAGES = ("generate", "audit", "extract", "pilot", "train", "evaluate")


@dataclass(frozen=True, slots=True)
class Making:
    """All objects of one stage and fingerprint: the spec that they share, and what becomes of the fingerprint."""

    stage: str
    fp: str
    spec: Mapping[str, Any]
    inputs: tuple[str, ...]
    new: str
    objection: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """One job's objects to relabel: its old and new name, and its keys, old to new."""

    stage: str
    old: str
    new: str
    keys: Mapping[str, str]

    @property
    def shard(self) -> str:
        """The shard or window part of the name; empty for a job of neither."""
        return parts(self.stage, self.old).part


@dataclass(frozen=True, slots=True)
class Plan:
    """What stands and is wanted, and why other old objects of wanted names do not stand (sentence → how many)."""

    jobs: list[Job]
    refused: Mapping[str, int]
    bytes: int


@dataclass
class Adoption:
    """One store, and which of its old objects stand."""

    reader: Reader
    versions: Mapping[str, int] = field(default_factory=lambda: SPEC_VERSIONS)

    def __post_init__(self) -> None:
        self._provenance: dict[str, Mapping[str, Any]] = {}
        self._specs: dict[tuple[str, str], tuple[Mapping[str, Any], tuple[str, ...] | None]] = {}
        self._verdicts: dict[tuple[str, str], str] = {}
        self._names: dict[tuple[str, str], list[str]] = defaultdict(list)
        self._objects: dict[tuple[str, str], list[Entry]] = defaultdict(list)
        for key in sorted(self.reader.present):
            entry = identify(key)
            if entry is not None and entry.stage in STAGES and entry.job is not None and entry.kind in OBJECTS:
                self._objects[entry.job].append(entry)
        for stage, name in self._objects:
            self._names[stage, parts(stage, name).fp].append(name)
        self.makings: dict[tuple[str, str], Making] = {}
        for stage in STAGES:
            for own, fp in sorted(self._names):
                if own == stage:
                    self.makings[stage, fp] = self._making(stage, fp)

    # What fingerprints become -----------------------------------------------------------------------------------------

    def _making(self, stage: str, fp: str) -> Making:
        spec, inputs = self._shared(stage, fp)
        if not spec or inputs is None:
            return Making(stage, fp, spec, (), "", "what it was made from is not in the store any more")
        try:
            new_spec = upgrade(stage, spec, self.versions)
        except NoStepError as error:
            return Making(stage, fp, spec, inputs, "", str(error))
        pairs = zip(INPUTS[stage], inputs, strict=True)
        above = [self.makings.get(pair) for pair in pairs]
        lost = next((making for making in above if making is not None and making.objection), None)
        if lost is not None:
            return Making(stage, fp, spec, inputs, "", f"the {lost.stage} before it: {lost.objection}")
        renamed = [making.new if making is not None else old for making, old in zip(above, inputs, strict=True)]
        return Making(stage, fp, new_spec, inputs, fingerprint([stage, new_spec, renamed]))

    def _shared(self, stage: str, fp: str) -> tuple[Mapping[str, Any], tuple[str, ...] | None]:
        """The spec and the inputs' fingerprints that give this one, out of the first object that says them undamaged."""
        if (stage, fp) not in self._specs:
            self._specs[stage, fp] = {}, None
            for name in self._names[stage, fp]:
                found = self.provenance(stage, name)
                inputs = self._input_fingerprints(stage, fp, found)
                if inputs is not None:
                    self._specs[stage, fp] = found["spec"], inputs
                    break
        return self._specs[stage, fp]

    def provenance(self, stage: str, name: str) -> Mapping[str, Any]:
        """What a job's objects say of their making; empty if they cannot be read."""
        key = _telling([entry.key for entry in self._objects.get((stage, name), [])])
        if key and key not in self._provenance:
            found = self.reader.provenance(key)
            plain = all(isinstance(found.get(name, {}), Mapping) for name in ("spec", "inputs"))
            self._provenance[key] = found if plain else {}
        return self._provenance.get(key, {})

    def _input_fingerprints(self, stage: str, fp: str, provenance: Mapping[str, Any]) -> tuple[str, ...] | None:
        """The fingerprints of an old object's inputs: named inside, or found as those that give its own."""
        named = said.input_fingerprints(stage, provenance)
        for found in self._possible(INPUTS[stage]) if named is None else [tuple(named)]:
            with suppress(ValueError):  # a damaged spec may hold what is no plain JSON
                if fingerprint([stage, provenance.get("spec"), list(found)]) == fp:
                    return found
        return None

    def _possible(self, stages: Sequence[str]) -> Iterator[tuple[str, ...]]:
        if not stages:
            yield ()
            return
        for stage, fp in list(self.makings):
            if stage == stages[0]:
                yield from ((fp, *rest) for rest in self._possible(stages[1:]))

    # Which objects stand ----------------------------------------------------------------------------------------------

    def objection(self, stage: str, name: str) -> str:
        """Why a job's objects do not stand under the present meaning; empty if they do."""
        if (stage, name) not in self._verdicts:
            self._verdicts[stage, name] = ""  # a circle cannot be; a train job asks its forerunner
            self._verdicts[stage, name] = self._judge(stage, name)
        return self._verdicts[stage, name]

    def _judge(self, stage: str, name: str) -> str:
        fp = parts(stage, name).fp
        making = self.makings.get((stage, fp))
        if making is None or making.objection:
            return "what it was made from is not in the store any more" if making is None else making.objection
        provenance = self.provenance(stage, name)
        declared = steps(stage, int(self._shared(stage, fp)[0]["version"]), self.versions)
        if declared and not provenance:
            return "it is gone or damaged, and nobody can say whether it stands"
        for step in declared:
            objection = step.objection(_Looked(self.reader, provenance))
            if objection:
                return objection
        return next((why for above in self._made_from(stage, name, making) if (why := self.objection(*above))), "")

    def _made_from(self, stage: str, name: str, making: Making) -> Iterator[tuple[str, str]]:
        """The jobs that made what a job read. Temporary states may be gone; their completions are asked then."""
        part, _ = parts(stage, name)
        shards: Iterable[str] = [part]
        if stage == "train":
            inside = self.provenance(stage, name)
            read = inside.get("inputs", {}).get("hidden", [])
            shards = [*(map(str, read) if isinstance(read, list) else ()), *making.spec.get("held_out", ())]
            if int(part) > 0:
                yield stage, job_name(stage, str(int(part) - 1), making.fp)
        elif stage == "pilot":
            shards = [str(making.spec.get("shard"))]
        elif stage == "evaluate":
            drafter = identify(str(self.provenance(stage, name).get("inputs", {}).get("drafter")))
            if drafter is not None:
                yield drafter.stage, drafter.name
            return
        for above, fp in zip(INPUTS[stage], making.inputs, strict=True):
            for shard in shards:
                yield above, job_name(above, shard, fp)

    # The plan -----------------------------------------------------------------------------------------------------------

    def plan(self, graphs: Iterable[Graph]) -> Plan:
        """What the configurations ask for, lack, and can take over."""
        jobs: list[Job] = []
        refused: Counter[str] = Counter()
        for stage, new in _wanted(graphs):
            found = [name for name in self._candidates(stage, new) if name != new]
            why = [self.objection(stage, name) for name in found]
            standing = [name for name, objection in zip(found, why, strict=True) if not objection]
            keys = next((keys for name in standing if (keys := self._keys(stage, name, new))), None)
            if keys is not None:
                jobs.append(Job(stage, _name_in(keys), new, keys))
            else:
                refused.update(f"{stage}: {objection}" for objection in set(why) if objection)
        size = sum(self.reader.listing[key].size for job in jobs for key in job.keys)
        return Plan(jobs, dict(refused), size)

    def _candidates(self, stage: str, new: str) -> Iterator[str]:
        """Old names whose objects could take the new one: same shard, and the fingerprint becomes the new one."""
        part, fp = parts(stage, new)
        for (own, old), making in self.makings.items():
            if own != stage or old == fp:
                continue
            name = job_name(stage, part, old)
            # A making that does not stand has no new name; it is named so that a person hears why.
            if (stage, name) in self._objects and (making.new == fp or making.objection):
                yield name

    def _keys(self, stage: str, old: str, new: str) -> dict[str, str] | None:
        """Each output's old key and new key; None unless all are there."""
        for before, after in zip(outputs(stage, old), outputs(stage, new), strict=True):
            if all(key in self.reader.present for key in before):
                return dict(zip(before, after, strict=True))
        return None

    # Taking over --------------------------------------------------------------------------------------------------------

    def take_over(self, job: Job, *, remove_old: bool = False) -> None:
        """Publish a job's objects under their new names, and its record; with `remove_old` the old ones go.

        Raises Unsound if the record says that an old object is damaged.
        """
        provenance = self.new_provenance(job)
        store = self.reader.store
        with tempfile.TemporaryDirectory(prefix="draftmill-") as folder, self.reader.files(*job.keys) as files:
            self._require_sound(job, files)
            made = {new: Path(folder) / new for new in job.keys.values()}
            for path, new in zip(files, made.values(), strict=True):
                if path.suffix != ".html":
                    relabel(path, new, provenance, self._names_inside(job))
            for new in made.values():
                if new.suffix == ".html":
                    page_of(new.with_suffix(".json"), new)
            contents = {key: content_of(path) for key, path in made.items()}
            for key, path in made.items():
                store.publish(key, path)
        write_record(store, self._new_record(job, contents))
        for key in (*job.keys, layout.record(job.stage, job.old)) if remove_old else ():
            store.delete(key)

    def _require_sound(self, job: Job, files: Sequence[Path]) -> None:
        """Raise Unsound if the record says that an old object had other bytes: damage must not get a new name."""
        record = self.reader.record(job.stage, job.old)
        for key, path in zip(job.keys, files, strict=True):
            known = record.outputs.get(key) if record is not None else None
            if known is not None:
                found = content_of(path)
                require(found == known, "digest", f"sha256 {known.sha256} of {key}", f"sha256 {found.sha256}")

    def new_provenance(self, job: Job) -> dict[str, Any]:
        """What the relabelled objects say of themselves."""
        old = self.provenance(job.stage, job.old)
        making = self.makings[job.stage, parts(job.stage, job.old).fp]
        return {
            **old,
            "fingerprint": making.new,
            "spec": making.spec,
            "inputs": {name: self._renamed(value) for name, value in (old.get("inputs") or {}).items()},
            "adopted_from": [*old.get("adopted_from", ()), making.fp],
        }

    def _names_inside(self, job: Job) -> dict[str, str]:
        """Stems of the objects that a job read, old to new."""
        read = (self.provenance(job.stage, job.old).get("inputs") or {}).values()
        keys = [value for value in read if isinstance(value, str)]
        return {Path(key).stem: Path(new).stem for key in keys if (new := self._renamed(key)) != key}

    def _renamed(self, value: Any) -> Any:
        """A key of the store under the name that it has now; everything else as it is."""
        entry = identify(value) if isinstance(value, str) else None
        if entry is None or entry.job is None:
            return value
        making = self.makings.get((entry.stage, entry.fp))
        return value if making is None or not making.new else value.replace(entry.fp, making.new)

    def _new_record(self, job: Job, contents: Mapping[str, Content]) -> Record:
        old = self.reader.record(job.stage, job.old)
        inputs = {self._renamed(key): read for key, read in old.inputs.items()} if old is not None else {}
        # What was relabelled has other bytes now than were read; only inputs of the same name keep their digests.
        kept = {
            key: read if old is not None and key in old.inputs else Content(bytes=read.bytes)
            for key, read in inputs.items()
        }
        basis = old or Record(stage=job.stage, name=job.new, outputs={})
        return basis.model_copy(update={"name": job.new, "outputs": dict(contents), "inputs": kept})


def _wanted(graphs: Iterable[Graph]) -> Iterator[tuple[str, str]]:
    """Jobs that the configurations ask for and whose objects are not all there, in the order of making."""
    seen: set[tuple[str, str]] = set()
    for graph in graphs:
        fp = graph.specs.fp
        once = [(stage, ONCE, "") for stage in ("pilot", "evaluate")]
        shards = [(stage, shard, shard) for stage in ("generate", "audit", "extract") for shard in graph.shards]
        windows = [("train", str(window), str(window)) for window in range(len(graph.windows))]
        for stage, label, part in [*shards, *once[:1], *windows, *once[1:]]:
            job = stage, job_name(stage, part, fp[stage])
            if graph.wanted(stage, label) and job not in seen:
                seen.add(job)
                yield job


def _telling(keys: Sequence[str]) -> str:
    """Which of a job's objects says how it was made; empty if none does."""
    told = [key for key in keys if not key.endswith((".html", "model.safetensors"))]
    return min(told, key=lambda key: (not key.endswith("config.json"), key), default="")


def _name_in(keys: Mapping[str, str]) -> str:
    entry = identify(next(iter(keys)))
    return entry.name if entry is not None else ""


@dataclass(frozen=True, slots=True)
class _Looked:
    """An old object for a rule to look at."""

    reader: Reader
    provenance: Mapping[str, Any]

    def file(self, key: str) -> AbstractContextManager[Path]:
        return _found(self.reader, key)


@contextmanager
def _found(reader: Reader, key: str) -> Iterator[Path]:
    try:
        with reader.file(key) as path:
            yield path
    except Gone:
        raise KeyError(key) from None
