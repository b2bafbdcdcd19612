"""A directory as a store: publication is a rename within one file system."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from draftmill.errors import UserError
from draftmill.store import writer
from draftmill.store.base import ObjectInfo

# Names that start so are unfinished publications: a listing leaves them out, and their ending keeps them out of every
# glob for *.parquet (that of pathlib finds hidden files too).
_TEMPORARY = ".unfinished-"
_FOLDER_TRIES = 1000


@contextmanager
def publishing(path: Path) -> Iterator[Path]:
    """Give a temporary path in the same folder; on success it is synced and renamed to `path`, on error removed."""
    temporary = _temporary(path)
    with _folder_of(path):
        try:
            yield temporary
            _sync(temporary)
            os.replace(temporary, path)
            _sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def publish_text(path: Path, text: str) -> None:
    """Publish a text file whole, in UTF-8 and with its line ends as they are."""
    with publishing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def _temporary(path: Path) -> Path:
    return path.with_name(f"{_TEMPORARY}{writer.mark()}-{secrets.token_hex(4)}-{path.name}.part")


def _unfinished(name: str) -> bool:
    return name.startswith(_TEMPORARY) and name.endswith(".part")


def _left(path: Path, older_than_s: float) -> bool:
    """Whether nobody works on an unfinished file any more."""
    if writer.dead(path.name.removeprefix(_TEMPORARY).partition("-")[0]):
        return True
    with suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime > older_than_s
    return False


@contextmanager
def _folder_of(path: Path) -> Iterator[None]:
    """Make the folder of a file and keep it: with a file in it nobody can remove it as empty meanwhile."""
    keeper = _temporary(path)
    _make_keeper(keeper)
    try:
        yield
    finally:
        keeper.unlink(missing_ok=True)


def _make_keeper(keeper: Path) -> None:
    for attempt in range(_FOLDER_TRIES):
        try:
            keeper.parent.mkdir(parents=True, exist_ok=True)
            return keeper.touch(exist_ok=False)
        # Another process removed an empty folder in between.
        except (FileNotFoundError, FileExistsError):
            if attempt == _FOLDER_TRIES - 1:
                raise


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. Where the file system has none for folders, nothing is held (claims decide nothing)."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refuse(error: OSError) -> None:
    """Let pass what is only gone: removed by another process between the walk and the look."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise UserError(f"store: {error.filename} cannot be read ({error.strerror}): mend its permissions or its disk.")


class LocalStore:
    """Objects as files below one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)

    def path(self, key: str) -> Path:
        """Where an object lies or would lie."""
        return self.root / key

    def list(self, prefix: str = "") -> dict[str, ObjectInfo]:
        """Every object whose key starts with the prefix; an absent directory is an empty store.

        Folders that are links to other disks are followed. Raises UserError for a folder that cannot be read, which
        would otherwise look like finished work that is gone.
        """
        if self.root.exists() and not self.root.is_dir():
            raise UserError(f"store: {self.url} is no folder: choose another one.")
        folder = self.root / prefix.rpartition("/")[0]
        walk = os.walk(folder, onerror=_refuse, followlinks=True)
        found = (self._info(Path(base) / name) for base, _, names in walk for name in names)
        return {info.key: info for info in found if info is not None and info.key.startswith(prefix)}

    def _info(self, path: Path) -> ObjectInfo | None:
        if path.name.startswith(_TEMPORARY):
            return None
        try:
            status = path.stat()
        except OSError as error:
            _refuse(error)
            return None
        return ObjectInfo(path.relative_to(self.root).as_posix(), status.st_size, status.st_mtime)

    def info(self, key: str) -> ObjectInfo | None:
        """One object without its bytes; None if there is none."""
        path = self.path(key)
        return self._info(path) if path.is_file() else None

    def get(self, key: str) -> bytes:
        """An object's bytes. Raises KeyError if there is none."""
        try:
            return self.path(key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise KeyError(key) from None

    def part(self, key: str, start: int, stop: int) -> bytes:
        """The bytes from `start` up to `stop` of an object. Raises KeyError if there is none."""
        try:
            with self.path(key).open("rb") as stream:
                stream.seek(start)
                return stream.read(max(stop - start, 0))
        except (FileNotFoundError, NotADirectoryError):
            raise KeyError(key) from None

    def put(self, key: str, data: bytes) -> None:
        """Publish an object whole, replacing an older one."""
        with publishing(self.path(key)) as temporary:
            temporary.write_bytes(data)

    def create(self, key: str, data: bytes) -> bool:
        """Publish an object unless one exists; False if it does. A hard link decides between racers."""
        path = self.path(key)
        temporary = _temporary(path)
        with _folder_of(path):
            try:
                temporary.write_bytes(data)
                _sync(temporary)
                os.link(temporary, path)
            except FileExistsError:
                return False
            finally:
                temporary.unlink(missing_ok=True)
            _sync(path.parent)
            return True

    def replace(self, key: str, data: bytes, old: bytes) -> bool:
        """Publish a small object in the place of one that still has the bytes `old`; False if it has others or is gone."""
        with _locked(self.path(key).parent):
            try:
                if self.get(key) != old:
                    return False
            except KeyError:
                return False
            self.put(key, data)
            return True

    def fetch(self, key: str, path: Path) -> None:
        """Copy an object into a file, which appears whole or not at all. Raises KeyError if there is none."""
        if not self.path(key).is_file():
            raise KeyError(key)
        with publishing(path) as temporary:
            shutil.copyfile(self.path(key), temporary)

    def publish(self, key: str, path: Path) -> None:
        """Publish a copy of a finished file, replacing an older object."""
        with publishing(self.path(key)) as temporary:
            shutil.copyfile(path, temporary)

    def address(self, key: str) -> str:
        """The path of an object."""
        return str(self.path(key))

    def free_bytes(self) -> int:
        """Room on the file system that the folder is on or will be on."""
        folder = self.root.absolute()
        return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free

    def remove_unfinished(self, older_than_s: float, *, done: Sequence[str] = (), dry: bool = False) -> Sequence[str]:
        """Remove what killed publications left behind: that of a dead process of this host at once, other files by age."""
        walk = os.walk(self.root, onerror=_refuse, followlinks=True)
        found = [Path(base) / name for base, _, names in walk for name in names if _unfinished(name)]
        gone = [path for path in found if self._becomes(path).startswith(tuple(done)) or _left(path, older_than_s)]
        for path in () if dry else gone:
            path.unlink(missing_ok=True)
        return [str(path) for path in gone]

    def _becomes(self, temporary: Path) -> str:
        """The key of what an unfinished file was to become."""
        name = temporary.name.removeprefix(_TEMPORARY).split("-", 2)[-1].removesuffix(".part")
        return temporary.with_name(name).relative_to(self.root).as_posix()

    def delete(self, key: str) -> None:
        """Remove an object and the folders it leaves empty; no error if there is none."""
        path = self.path(key)
        # A replace() that has compared and not yet written would bring the object back.
        with _locked(path.parent):
            path.unlink(missing_ok=True)
        for folder in path.parents:
            if folder == self.root:
                return
            try:
                folder.rmdir()
            except OSError:  # it holds something, perhaps since a moment ago, or is gone already
                return
