"""A directory as a store: publication is a rename within one file system."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from draftmill.errors import UserError
from draftmill.store.base import ObjectInfo

# Names that start so are unfinished publications: a listing leaves them out, and their ending keeps them out of every
# glob for *.parquet (that of pathlib finds hidden files too).
_TEMPORARY = ".unfinished-"
_FOLDER_TRIES = 50


@contextmanager
def publishing(path: Path) -> Iterator[Path]:
    """Give a temporary path in the same folder; on success it is synced and renamed to `path`, on error removed."""
    _make_folder(path.parent)
    temporary = _temporary(path)
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
    return path.with_name(f"{_TEMPORARY}{secrets.token_hex(4)}-{path.name}.part")


def _make_folder(folder: Path) -> None:
    for _ in range(_FOLDER_TRIES):
        try:
            return folder.mkdir(parents=True, exist_ok=True)
        except FileNotFoundError:  # another process removed an empty folder above it in between
            continue
    folder.mkdir(parents=True, exist_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refuse(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise UserError(f"store: the folder {error.filename} cannot be read ({error.strerror}): mend its permissions.")


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
        except FileNotFoundError:  # removed by another process between the walk and the look
            return None
        return ObjectInfo(path.relative_to(self.root).as_posix(), status.st_size, status.st_mtime)

    def get(self, key: str) -> bytes:
        """An object's bytes. Raises KeyError if there is none."""
        try:
            return self.path(key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise KeyError(key) from None

    def put(self, key: str, data: bytes) -> None:
        """Publish an object whole, replacing an older one."""
        with publishing(self.path(key)) as temporary:
            temporary.write_bytes(data)

    def create(self, key: str, data: bytes) -> bool:
        """Publish an object unless one exists; False if it does. A hard link decides between racers."""
        path = self.path(key)
        _make_folder(path.parent)
        temporary = _temporary(path)
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

    def remove_unfinished(self, older_than_s: float) -> Sequence[Path]:
        """Remove what killed publications left behind, if it is older than that; a younger one may be at work."""
        found = [path for path in self.root.rglob(f"{_TEMPORARY}*.part") if path.is_file()]
        old = [path for path in found if time.time() - path.stat().st_mtime > older_than_s]
        for path in old:
            path.unlink(missing_ok=True)
        return old

    def delete(self, key: str) -> None:
        """Remove an object and the folders it leaves empty; no error if there is none."""
        path = self.path(key)
        path.unlink(missing_ok=True)
        for folder in path.parents:
            if folder == self.root:
                return
            try:
                folder.rmdir()
            except OSError:  # it holds something, perhaps since a moment ago, or is gone already
                return
