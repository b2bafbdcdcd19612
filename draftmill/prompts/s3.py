"""Reading data sets from S3.

An object is read in ranges, each bound to the ETag that the listing showed: it can be sought in like a file, needs no
local disk, survives a broken connection, and never mixes two versions. Endpoint, region and credentials come from the
usual AWS environment variables and files. boto3 is imported only when an s3:// path is used.
"""

from __future__ import annotations

import fnmatch
import functools
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from draftmill.errors import UserError

_RANGE = 8 << 20
_ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class S3Object:
    """One object as a listing shows it."""

    url: str
    size: int
    etag: str


def is_url(path: str) -> bool:
    """Whether a path means S3."""
    return path.startswith("s3://")


def find(url: str) -> list[S3Object]:
    """The object of that URL, or all below it as a folder, or all that match it as a glob; in order of their keys.

    As in a local glob, `*` stays within one folder and `**` does not. Raises UserError if S3 cannot be listed.
    """
    bucket, key = _split(url)
    magic = [key.find(sign) for sign in "*?[" if sign in key]
    listed = _list(url, bucket, key[: min(magic)] if magic else key)
    if magic:
        return [found for found in listed if _matches(found.url.removeprefix(f"s3://{bucket}/"), key)]
    exact = [found for found in listed if found.url == url]
    folder = f"s3://{bucket}/{key.rstrip('/')}/" if key.rstrip("/") else f"s3://{bucket}/"
    return exact or [found for found in listed if found.url.startswith(folder)]


def _matches(key: str, pattern: str) -> bool:
    if "**" in pattern:
        return fnmatch.fnmatchcase(key, pattern.replace("**/", "*"))
    parts, wanted = key.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _list(url: str, bucket: str, prefix: str) -> list[S3Object]:
    with _explained(url):
        pages = _client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        contents = [entry for page in pages for entry in page.get("Contents", ())]
    return [
        S3Object(f"s3://{bucket}/{entry['Key']}", entry["Size"], entry["ETag"].strip('"'))
        for entry in contents
        if not entry["Key"].endswith("/")
    ]


def open_object(url: str, size: int, etag: str) -> io.RawIOBase:
    """An object's content as a raw, seekable file, for as long as it has that ETag."""
    return _ObjectFile(url, size, etag)


class _ObjectFile(io.RawIOBase):
    def __init__(self, url: str, size: int, etag: str) -> None:
        super().__init__()
        self._url, self._size, self._etag = url, size, etag
        self._bucket, self._key = _split(url)
        self._position = 0
        self._held, self._held_from = b"", 0
        with _explained(url):
            self._client = _client()

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
        wanted = f"bytes={start}-{min(start + _RANGE, self._size) - 1}"
        with _explained(self._url):
            return self._fetch_range(wanted)

    def _fetch_range(self, wanted: str) -> bytes:
        from botocore.exceptions import HTTPClientError, IncompleteReadError

        # botocore repeats requests but not a body that breaks off.
        for attempt in range(_ATTEMPTS):
            try:
                reply = self._client.get_object(
                    Bucket=self._bucket, Key=self._key, Range=wanted, IfMatch=f'"{self._etag}"'
                )
                return bytes(reply["Body"].read())
            except (HTTPClientError, IncompleteReadError):
                if attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")


def _split(url: str) -> tuple[str, str]:
    bucket, _, key = url.removeprefix("s3://").partition("/")
    if not bucket:
        raise UserError(f"{url} names no bucket: write s3://bucket/key in prompts.sources.")
    return bucket, key


@functools.cache
def _client() -> Any:
    import boto3
    from botocore.config import Config

    return boto3.session.Session().client("s3", config=Config(retries={"mode": "standard", "max_attempts": 5}))


@contextmanager
def _explained(url: str) -> Iterator[None]:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", "unknown"))
        if code in ("PreconditionFailed", "412", "NoSuchKey"):
            raise UserError(f"{url} changed while it was read: run again when it is complete.") from None
        raise UserError(
            f"S3 refuses {url} ({code}): check the bucket's name and your rights to list and read it."
        ) from None
    except BotoCoreError as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(
            f"{url} cannot be reached ({reason}): check AWS_ENDPOINT_URL, region and credentials."
        ) from None
