"""A directory as a store: publication is a rename within one file system."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draftmill.store.base import ObjectInfo

# Names that start so are unfinished publications: a listing leaves them out, and so does every glob for *.parquet.
_TEMPORARY = ".unfinished-"


@contextmanager
def publishing(path: Path) -> Iterator[Path]:
    """Give a temporary path in the same folder; on success it is synced and renamed to `path`, on error removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{_TEMPORARY}{secrets.token_hex(4)}-{path.name}")
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LocalStore:
    """Objects as files below one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)

    def path(self, key: str) -> Path:
        """Where an object lies or would lie."""
        return self.root / key

    def list(self, prefix: str = "") -> dict[str, ObjectInfo]:
        """Every object whose key starts with the prefix; an absent directory is an empty store."""
        folder = self.root / prefix.rpartition("/")[0]
        found = (self._info(Path(base) / name) for base, _, names in os.walk(folder) for name in names)
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
        except FileNotFoundError:
            raise KeyError(key) from None

    def put(self, key: str, data: bytes) -> None:
        """Publish an object whole, replacing an older one."""
        with publishing(self.path(key)) as temporary:
            temporary.write_bytes(data)

    def create(self, key: str, data: bytes) -> bool:
        """Publish an object unless one exists; False if it does. A hard link decides between racers."""
        path = self.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{_TEMPORARY}{secrets.token_hex(4)}-{path.name}")
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

    def delete(self, key: str) -> None:
        """Remove an object and the folders it leaves empty; no error if there is none."""
        path = self.path(key)
        path.unlink(missing_ok=True)
        for folder in path.parents:
            if folder == self.root or any(folder.iterdir() if folder.exists() else ()):
                return
            folder.rmdir()
