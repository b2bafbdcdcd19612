"""Reading data sets from S3, which is reached, waited for and explained as a store there is (store/s3.py).

An object is read in ranges, each bound to the ETag that the listing showed: it can be sought in like a file, needs no
local disk, survives a broken connection, and never mixes two versions. Imported only when an s3:// path is used, because
boto3 is.
"""

from __future__ import annotations

import fnmatch
import io
import os
from typing import Any

from botocore.exceptions import ClientError

from draftmill.errors import UserError
from draftmill.store.base import ObjectInfo
from draftmill.store.patience import code_of
from draftmill.store.s3 import S3Store
from draftmill.store.settings import S3Settings

_RANGE = 8 << 20
_OTHER_VERSION = {"PreconditionFailed", "412"}


def find(url: str, settings: S3Settings) -> dict[str, ObjectInfo]:
    """The object of that URL, or all below it as a folder, or all that match it as a glob; by URL, in order of their keys.

    As in a local glob, `*` stays within one folder and `**` does not. Raises UserError if S3 cannot be listed.
    """
    bucket, key = _split(url)
    magic = [key.find(sign) for sign in "*?[" if sign in key]
    infos = _Bucket(f"s3://{bucket}", settings).list(key[: min(magic)] if magic else key)
    listed = {f"s3://{bucket}/{found}": info for found, info in infos.items()}
    if magic:
        return {found: info for found, info in listed.items() if _matches(info.key, key)}
    folder = f"s3://{bucket}/{key.rstrip('/')}/" if key.rstrip("/") else f"s3://{bucket}/"
    below = {found: info for found, info in listed.items() if found.startswith(folder)}
    return {url: listed[url]} if url in listed else below


def _matches(key: str, pattern: str) -> bool:
    if "**" in pattern:
        return fnmatch.fnmatchcase(key, pattern.replace("**/", "*"))
    parts, wanted = key.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def open_object(url: str, size: int, etag: str, settings: S3Settings) -> io.RawIOBase:
    """An object's content as a raw, seekable file, for as long as it has that ETag."""
    return _ObjectFile(url, size, etag, settings)


def _split(url: str) -> tuple[str, str]:
    bucket, _, key = url.removeprefix("s3://").partition("/")
    if not bucket:
        raise UserError(f"{url} names no bucket: write s3://bucket/key in prompts.sources.")
    return bucket, key


class _Bucket(S3Store):
    """A bucket with data sets."""

    def version(self, key: str, etag: str, start: int, stop: int) -> bytes:
        """The bytes from `start` up to `stop` of an object that still has that ETag. Raises KeyError if none has."""
        where = {**self._at(key), "Range": f"bytes={start}-{stop - 1}", "IfMatch": f'"{etag}"'}

        def request() -> bytes:
            try:
                return bytes(self.client.get_object(**where)["Body"].read())
            except ClientError as error:
                if code_of(error) in _OTHER_VERSION:
                    raise KeyError(key) from None
                raise

        return self._ask(request, key)


class _ObjectFile(io.RawIOBase):
    def __init__(self, url: str, size: int, etag: str, settings: S3Settings) -> None:
        super().__init__()
        self._url, self._size, self._etag = url, size, etag
        bucket, self._key = _split(url)
        self._bucket = _Bucket(f"s3://{bucket}", settings)
        self._position = 0
        self._held, self._held_from = b"", 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        if self._position >= self._size:
            return 0
        if not self._held_from <= self._position < self._held_from + len(self._held):
            self._held, self._held_from = self._fetch(self._position), self._position
        start = self._position - self._held_from
        piece = self._held[start : start + len(buffer)]
        buffer[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)

    def _fetch(self, start: int) -> bytes:
        try:
            return self._bucket.version(self._key, self._etag, start, min(start + _RANGE, self._size))
        except KeyError:
            raise UserError(f"{self._url} changed while it was read: run again when it is complete.") from None
