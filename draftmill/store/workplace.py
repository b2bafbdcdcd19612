"""Where the objects of one job lie on this machine, and how they get into the store.

With a folder as store a job reads and writes the store itself. With S3 Snakemake brings inputs and expects outputs in
copies on this machine; a job then publishes its outputs by itself, before its journal goes, so that a kill between the
two loses nothing.

Jobs of several builds may race. The first output decides whose outputs stand, and the loser takes all of the winner's. A
winner that has left the others out for too long is overrun: the loser publishes all of its own, the first one first, and
whoever finds another's first one where its own was, before or behind its other outputs, takes those. Every other output
carries the digest of the first one that it belongs to, and outputs that do not belong together are nobody's. So what a
job ends with is never mixed, however slow a winner is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from draftmill.store.base import ObjectInfo, Store
from draftmill.store.journal import Journal
from draftmill.store.local import LocalStore

if TYPE_CHECKING:
    from draftmill.store.s3 import S3Store

PROVIDER = "s3lean"
# What a winner that has put its first output may need for the others if nobody can tell whether it lives: seconds, and
# bytes a second of all outputs.
_WINNER_S, _SLOWEST = 300.0, 1 << 20
_LOOK_S = 1.0


class Workplace:
    """A job's view of a store; `scratch` is a folder of this machine for what Snakemake does not know of."""

    def __init__(self, store: Store, scratch: Path) -> None:
        """Nothing is asked of the store yet."""
        self.store, self._scratch = store, scratch
        self._later: list[Callable[[], None]] = []

    def key(self, path: Path) -> str:
        """The key of the object whose file on this machine is `path`, as Snakemake names it."""
        if isinstance(self.store, LocalStore):
            return path.relative_to(self.store.root).as_posix()
        place = f"{PROVIDER}/{self.store.url.removeprefix('s3://')}/"
        return path.as_posix().partition(place)[2]

    def sibling(self, path: Path, key: str) -> Path:
        """Where the object `key` lies or would lie relative to the file of another one, for links between them."""
        return Path(path.as_posix().removesuffix(self.key(path))) / key

    def read(self, key: str) -> Path:
        """An object that is no input of the rule, as a file. Raises KeyError if there is none."""
        if isinstance(self.store, LocalStore):
            return self.store.path(key)
        path = self._scratch / key
        self.store.fetch(key, path)
        self._later.append(lambda: path.unlink(missing_ok=True))
        return path

    def journal(self, prefix: str) -> Journal:
        """Unfinished rows; on S3 they are cleared when the outputs have been published."""
        if isinstance(self.store, LocalStore):
            return Journal(self.store, prefix)
        return _LateJournal(self.store, prefix, self._later)

    def folder(self, prefix: str) -> tuple[Path, Callable[[Path], None]]:
        """A folder for unfinished files, with what an earlier try left there, and what is to be called for each new one."""
        if isinstance(self.store, LocalStore):
            return self.store.path(prefix), lambda path: None
        folder = self._scratch / prefix
        for key in self.store.list(f"{prefix}/"):
            with suppress(KeyError):  # cleared in between by another build, which has finished the job
                self.store.fetch(key, self._scratch / key)
        self._later.append(lambda: self._forget(f"{prefix}/"))
        return folder, lambda path: self.store.publish(f"{prefix}/{path.relative_to(folder).as_posix()}", path)

    def _forget(self, prefix: str) -> None:
        for key in self.store.list(prefix):
            self.store.delete(key)

    @contextmanager
    def beside(self, key: str, prefix: str) -> Iterator[Path]:
        """The file of an object that no rule knows.

        After the block, failed or not, the store has under `prefix` what the file's folder has.
        """
        if isinstance(self.store, LocalStore):
            yield self.store.path(key)
            return
        path = self._scratch / key
        try:
            yield path
        finally:
            found = {self._key_of_scratch(file): file for file in path.parent.glob(f"{prefix.rpartition('/')[2]}*")}
            for gone in self.store.list(prefix).keys() - found.keys():
                self.store.delete(gone)
            for name, file in found.items():
                self.store.publish(name, file)

    def _key_of_scratch(self, file: Path) -> str:
        return file.relative_to(self._scratch).as_posix()

    def commit(self, outputs: Mapping[str, Path], rival: Callable[[], bool] = lambda: False) -> None:
        """Publish a finished job's outputs, by key and in that order; then what it was made with may go.

        `rival` tells whether another process is known to work on the same job now.
        """
        if outputs and not isinstance(self.store, LocalStore):
            _publish(self.store, outputs, rival)  # type: ignore[arg-type]
        for last in self._later:
            last()
        self._later.clear()

    def take(self, outputs: Mapping[str, Path]) -> bool:
        """Bring the outputs that another build has published over whatever an earlier try left on this machine.

        False, and nothing is brought, if one of them is not there any more.
        """
        return isinstance(self.store, LocalStore) or _bring(self.store, outputs, _infos(self.store, outputs))

    def finished(self, outputs: Iterable[str]) -> bool:
        """Whether all outputs of a job are in the store. On S3 what an earlier try has left of them, if not all, is removed.

        Otherwise its first one would be waited for as if somebody were still at it. In a folder Snakemake has removed it.
        """
        first, *others = outputs
        found = [self.store.info(first)]
        if found[0] is None:
            return False
        found += _infos(self.store, others).values()
        if _belong_together(found):
            return True
        for info in found if not isinstance(self.store, LocalStore) else ():
            if info is not None:
                self.store.delete(info.key)
        return False


class _LateJournal(Journal):
    """A journal that stays until the outputs made from it are published."""

    def __init__(self, store: Store, prefix: str, later: list[Callable[[], None]]) -> None:
        super().__init__(store, prefix)
        self._later = later

    def clear(self) -> None:
        """Forget everything, later."""
        self._later.append(super().clear)


def _publish(store: S3Store, outputs: Mapping[str, Path], rival: Callable[[], bool]) -> None:
    from draftmill.store.s3_wire import sha256_file

    first, *others = outputs
    digest = sha256_file(outputs[first]) if others else ""
    stands = store.offer(first, outputs[first]) and all(
        store.offer(key, outputs[key], digest) or _overwrites(store, outputs, key, digest) for key in others
    )
    # Another may have published all of its own meanwhile, without having come to what we have published last.
    if stands and (not others or _is_ours(store, outputs, digest)):
        return
    if not _take(store, outputs, first, rival):
        store.publish(first, outputs[first])
        for key in others:
            store.publish(key, outputs[key], digest)


def _overwrites(store: S3Store, outputs: Mapping[str, Path], key: str, digest: str) -> bool:
    """Publish an output over what stands there: left from an earlier try, if the first one is ours; else False."""
    if not _is_ours(store, outputs, digest):
        return False
    store.publish(key, outputs[key], digest)
    return True


def _is_ours(store: S3Store, outputs: Mapping[str, Path], digest: str) -> bool:
    """Whether the first output that stands in the store is ours; it is published again if it is gone."""
    first = next(iter(outputs))
    found = store.info(first)
    return store.offer(first, outputs[first]) if found is None else found.sha256 == digest


def _take(store: Store, outputs: Mapping[str, Path], first: str, rival: Callable[[], bool]) -> bool:
    """Bring the winner's outputs over ours; False if it has not published all of them in its time and is not at work."""
    allowed = _WINNER_S + sum(path.stat().st_size for path in outputs.values()) / _SLOWEST
    while not _bring(store, outputs, found := _infos(store, outputs)):
        won = found[first]
        if won is None or (time.time() > won.modified + allowed and not rival()):
            return False
        time.sleep(_LOOK_S)
    print("Another build has published this job's outputs before: they are taken.", flush=True)
    return True


def _infos(store: Store, keys: Iterable[str]) -> dict[str, ObjectInfo | None]:
    return {key: store.info(key) for key in keys}


def _bring(store: Store, outputs: Mapping[str, Path], found: Mapping[str, ObjectInfo | None]) -> bool:
    """Bring objects over our files, all or none: False if one is absent or another job's, or goes or changes meanwhile."""
    if not _belong_together(list(found.values())):
        return False
    brought = {path: path.with_name(f".taken-{path.name}") for path in outputs.values()}
    try:
        for key, path in outputs.items():
            store.fetch(key, brought[path])
        if _infos(store, outputs) != found:
            return False
        for path, file in brought.items():
            os.replace(file, path)
        return True
    except KeyError:
        return False
    finally:
        for file in brought.values():
            file.unlink(missing_ok=True)


def _belong_together(found: Sequence[ObjectInfo | None]) -> bool:
    """Whether all outputs are there and of one job; where a store or an older version tells nothing, that is believed."""
    first = found[0]
    return all(info is not None and first is not None and info.first in ("", first.sha256) for info in found)


def without_waiting(store: Store) -> Store:
    """The same store for what is not worth waiting for, like a heartbeat: a put that is not answered is let go."""
    if isinstance(store, LocalStore):
        return store
    from draftmill.store.s3 import LooseS3Store, S3Store

    assert isinstance(store, S3Store)
    return LooseS3Store(store.url, store.settings.model_copy(update={"wait_s": 0.0, "retries": 1}))
