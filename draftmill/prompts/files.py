"""Which files a source names, and how each is opened.

A path is a file, a folder, a glob, or one of these under s3://. In folders and globs, files of other types (a README,
a licence) are passed over; packed data that cannot be read is an error, because it would be a silent loss. The order
of files is by path, so that it is the same on every machine.
"""

from __future__ import annotations

import glob
import gzip
import io
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath
from typing import IO, cast

from draftmill.errors import UserError
from draftmill.store.open import is_s3
from draftmill.store.settings import S3Settings

_BUFFER = 1 << 20
# S3 as the AWS variables and files alone describe it.
_AWS = S3Settings()
_PACKED = (".zst", ".xz", ".bz2", ".zip", ".lz4", ".tar", ".tgz", ".7z", ".gz")

OnBytes = Callable[[int], None]


class Format(StrEnum):
    """How a file holds its records."""

    JSONL = "jsonl"
    JSON = "json"
    CSV = "csv"
    PARQUET = "parquet"


_FORMATS = {
    ".jsonl": Format.JSONL,
    ".ndjson": Format.JSONL,
    ".json": Format.JSON,
    ".csv": Format.CSV,
    ".parquet": Format.PARQUET,
}


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of records.

    `path` is spelt as the configuration spells it. `stamp` is an opaque text that is new whenever the content may be:
    modification and change time of a local file, the ETag of an object, which is reached by `s3`.
    """

    path: str
    label: str
    format: Format
    gzipped: bool
    size: int
    stamp: str
    s3: S3Settings = _AWS

    @property
    def remote(self) -> bool:
        """Whether the file is an object on S3."""
        return is_s3(self.path)


def find(path: str, name: str | None = None, s3: S3Settings = _AWS) -> list[SourceFile]:
    """The files a source names, ordered by path. Raises UserError if there are none or one cannot be read."""
    found = _find_remote(path, name, s3) if is_s3(path) else _find_local(path, name)
    if not found:
        raise UserError(f"{path} matches no JSONL, JSON, CSV or Parquet file: correct prompts.sources.")
    return found


def _find_local(path: str, name: str | None) -> list[SourceFile]:
    if os.path.isfile(path):
        return [_local(path, name)]
    if os.path.isdir(path):
        inside = (os.path.join(base, file) for base, _, files in os.walk(path) for file in files)
        return [_local(file, name) for file in _data(inside)]
    if glob.has_magic(path):
        return [_local(file, name) for file in _data(filter(os.path.isfile, glob.iglob(path, recursive=True)))]
    raise UserError(
        f"There is no prompt source {path}: correct prompts.sources (`draftmill fetch demo` brings the demo's prompts)."
    )


def _find_remote(path: str, name: str | None, settings: S3Settings) -> list[SourceFile]:
    from draftmill.prompts import s3

    objects = s3.find(path, settings)
    urls = list(objects) if path in objects else _data(objects)
    return [_file(url, name, objects[url].size, objects[url].etag, settings) for url in urls]


def _local(path: str, name: str | None) -> SourceFile:
    try:
        status = os.stat(path)
    except OSError as error:
        raise unreadable(path, error) from None
    return _file(path, name, status.st_size, f"{status.st_mtime_ns}:{status.st_ctime_ns}")


def unreadable(path: str, error: OSError) -> UserError:
    """The sentence for a file that the system does not let us read."""
    return UserError(f"{path} cannot be read ({error.strerror}): make it readable or take it out of prompts.sources.")


def _file(path: str, name: str | None, size: int, stamp: str, settings: S3Settings = _AWS) -> SourceFile:
    if size == 0:
        raise UserError(f"{path} is empty: fill it or take it out of prompts.sources.")
    kind = _format(path)
    if kind is None:
        raise UserError(
            f"{path} has an unknown type: give JSONL, JSON or CSV (each also as .gz), or Parquet, with that suffix."
        )
    gzipped = path.lower().endswith(".gz")
    stem = PurePosixPath(path.removesuffix(path[-3:]) if gzipped else path).stem
    return SourceFile(path, name or stem, kind, gzipped, size, stamp, settings)


def _format(path: str) -> Format | None:
    lower = path.lower()
    kind = _FORMATS.get(PurePosixPath(lower.removesuffix(".gz")).suffix)
    return None if kind is Format.PARQUET and lower.endswith(".gz") else kind


def _data(paths: Iterable[str]) -> list[str]:
    visible = sorted(path for path in paths if not PurePosixPath(path).name.startswith((".", "_")))
    for path in visible:
        if _format(path) is None and path.lower().endswith(_PACKED):
            raise UserError(
                f"{path} is packed in a way that cannot be read: unpack it, pack it as .gz or move it away."
            )
    return [path for path in visible if _format(path) is not None]


def check_unchanged(files: Iterable[SourceFile]) -> None:
    """Raise UserError if a local file is no longer the one that was found (objects are read by ETag)."""
    for file in files:
        if not file.remote and _local(file.path, file.label).stamp != file.stamp:
            raise UserError(f"{file.path} changed while it was read: run again when it is complete.")


@contextmanager
def opened(file: SourceFile, on_bytes: OnBytes | None = None) -> Iterator[IO[bytes]]:
    """The file's content, unpacked if it is gzipped; seekable. `on_bytes` hears how far into the file it has got."""
    raw = _raw(file)
    with io.BufferedReader(_Heard(raw, on_bytes) if on_bytes else raw, _BUFFER) as stream:
        yield cast(IO[bytes], gzip.GzipFile(fileobj=stream)) if file.gzipped else stream


def _raw(file: SourceFile) -> io.RawIOBase | io.FileIO:
    if not file.remote:
        return io.FileIO(file.path)
    from draftmill.prompts import s3

    return s3.open_object(file.path, file.size, file.stamp, file.s3)


class _Heard(io.RawIOBase):
    """A raw file that tells how far it has been read."""

    def __init__(self, raw: io.RawIOBase | io.FileIO, on_bytes: OnBytes) -> None:
        super().__init__()
        self._raw = raw
        self._on_bytes = on_bytes

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int | None:  # type: ignore[override]
        count = self._raw.readinto(buffer)
        self._on_bytes(self._raw.tell())
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._raw.seek(offset, whence)

    def close(self) -> None:
        self._raw.close()
        super().close()
