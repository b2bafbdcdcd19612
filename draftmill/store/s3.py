"""S3 as a store, by boto3.

Every object carries its sha256 as metadata, and as S3's own checksum where the store knows checksums. A store that is
away is waited for (settings.wait_s); what a person can mend is said in one sentence. The listing is one request for each
1,000 objects.
"""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import boto3
import botocore.session
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import ClientError
from botocore.utils import parse_timestamp

from draftmill.errors import UserError
from draftmill.store.base import ObjectInfo
from draftmill.store.local import publishing
from draftmill.store.patience import Patience, code_of, status_of
from draftmill.store.s3_errors import CredentialsExpiredError, StoreAwayError, explained
from draftmill.store.s3_wire import FIRST, SHA256, THREADS, Uploader, sha256_file
from draftmill.store.settings import S3Settings

T = TypeVar("T")
_CONNECT_S, _READ_S = 10, 60
_ANY_REGION = "us-east-1"


def split(url: str) -> tuple[str, str]:
    """Bucket and prefix of s3://bucket/prefix; the prefix ends with a slash or is empty. Raises UserError."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    if not bucket:
        raise UserError(f"store: {url} names no bucket: write s3://bucket/prefix.")
    prefix = prefix.strip("/")
    return bucket, f"{prefix}/" if prefix else ""


def client_of(settings: S3Settings) -> Any:
    """A boto3 client, shared by the threads of one process."""
    return _client(settings, os.getpid())[0]


def renew(settings: S3Settings) -> None:
    """Read the credentials again and let the client sign with them: it never looks a second time by itself."""
    held, fresh = _client(settings, os.getpid())[1], boto3.session.Session().get_credentials()
    # Other kinds of credentials are renewed by botocore as they run out.
    if type(held) is not Credentials or fresh is None:
        return
    now = fresh.get_frozen_credentials()
    if now.access_key and now.token != held.token:
        held.access_key, held.secret_key, held.token = now.access_key, now.secret_key, now.token


@functools.cache
def _client(settings: S3Settings, _pid: int) -> tuple[Any, Any]:
    core = botocore.session.get_session()
    # A listing has a time an object, and botocore's reading of times costs more than all the rest of a listing.
    core.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_time_of)
    session = boto3.session.Session(botocore_session=core)
    client = session.client(
        "s3",
        endpoint_url=settings.endpoint_url,
        region_name=settings.region or session.region_name or _ANY_REGION,
        config=Config(
            s3={"addressing_style": "path" if settings.path_style else "auto"},
            retries={"mode": "standard", "max_attempts": settings.retries},
            request_checksum_calculation=settings.checksum,
            response_checksum_validation=settings.checksum,
            max_pool_connections=2 * THREADS,
            connect_timeout=_CONNECT_S,
            read_timeout=_READ_S,
        ),
    )
    return client, session.get_credentials()


def _time_of(text: Any) -> datetime:
    """A time as S3 writes it: ISO 8601 in a listing, something else elsewhere."""
    try:
        return datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return parse_timestamp(text)  # type: ignore[no-any-return]


def say(sentence: str) -> None:
    """Tell the person, and the log of a job."""
    print(f"draftmill: {sentence}", file=sys.stderr, flush=True)


class S3Store:
    """Objects below one prefix of a bucket."""

    def __init__(self, url: str, settings: S3Settings | None = None) -> None:
        """Raises UserError if the URL names no bucket; nothing is asked of the store yet."""
        self.settings = settings or S3Settings()
        self.bucket, self.prefix = split(url)
        self.url = f"s3://{self.bucket}/{self.prefix}".rstrip("/")
        self._patience = Patience(self.settings.wait_s, say, self.url, renew=lambda: renew(self.settings))

    @property
    def client(self) -> Any:
        """The boto3 client that this store uses."""
        with explained(self.url, self.settings.endpoint_url or "AWS"):
            return client_of(self.settings)

    @property
    def endpoint(self) -> str:
        """Where the store is looked for."""
        return str(self.client.meta.endpoint_url)

    def list(self, prefix: str = "") -> dict[str, ObjectInfo]:
        """Every object whose key starts with the prefix."""
        pages = self.client.get_paginator("list_objects_v2")
        found = self._ask(lambda: [*pages.paginate(Bucket=self.bucket, Prefix=self.prefix + prefix)])
        entries = [entry for page in found for entry in page.get("Contents", ()) if not entry["Key"].endswith("/")]
        infos = (self._info(entry["Key"], entry["Size"], entry) for entry in entries)
        return {info.key: info for info in infos}

    def info(self, key: str) -> ObjectInfo | None:
        """One object without its bytes; None if there is none."""
        try:
            reply = self._ask(lambda: self.client.head_object(**self._at(key)), key)
        except KeyError:
            return None
        return self._info(self.prefix + key, reply["ContentLength"], reply)

    def _info(self, key: str, size: int, entry: dict[str, Any]) -> ObjectInfo:
        modified = entry["LastModified"].timestamp()
        told = {name.lower(): value for name, value in entry.get("Metadata", {}).items()}
        name, etag = key.removeprefix(self.prefix), entry["ETag"].strip('"')
        return ObjectInfo(name, size, modified, etag, told.get(SHA256, ""), told.get(FIRST, ""))

    def get(self, key: str) -> bytes:
        """An object's bytes. Raises KeyError if there is none."""
        return self._ask(lambda: bytes(self.client.get_object(**self._at(key))["Body"].read()), key)

    def part(self, key: str, start: int, stop: int) -> bytes:
        """The bytes from `start` up to `stop` of an object. Raises KeyError if there is none."""
        if start >= stop:  # which a range cannot say
            return b""
        span = {"Range": f"bytes={start}-{stop - 1}"}
        return self._ask(lambda: bytes(self.client.get_object(**self._at(key), **span)["Body"].read()), key)

    def put(self, key: str, data: bytes) -> None:
        """Publish an object whole, replacing an older one."""
        with self._explained():
            self._uploader.put(self.prefix + key, data, {SHA256: _sha256(data)})

    def create(self, key: str, data: bytes) -> bool:
        """Publish an object unless one exists; False if it does."""
        # The writer's name tells a request that met its own first try from one that lost to another's same bytes.
        metadata = {SHA256: _sha256(data), "writer": secrets.token_hex(8)}
        with self._explained():
            return self._uploader.put(self.prefix + key, data, metadata, IfNoneMatch="*") is not None

    def replace(self, key: str, data: bytes, old: bytes) -> bool:
        """Publish an object in the place of one that still has the bytes `old`; False if it has others or is gone."""
        try:
            found, etag = self._ask(lambda: self._with_tag(key), key)
            return found == old and self.put_matching(key, data, etag)
        except KeyError:
            return False

    def put_matching(self, key: str, data: bytes, etag: str) -> bool:
        """Publish an object in the place of one that still has that ETag; False if it has another."""
        metadata = {SHA256: _sha256(data), "writer": secrets.token_hex(8)}
        with self._explained():
            return self._uploader.put(self.prefix + key, data, metadata, IfMatch=etag) is not None

    def _with_tag(self, key: str) -> tuple[bytes, str]:
        reply = self.client.get_object(**self._at(key))
        return bytes(reply["Body"].read()), reply["ETag"]

    def fetch(self, key: str, path: Path) -> None:
        """Copy an object into a file, which appears whole or not at all. Raises KeyError if there is none."""
        with publishing(path) as temporary:
            self._ask(lambda: self.client.download_file(self.bucket, self.prefix + key, str(temporary)), key)

    def publish(self, key: str, path: Path, first: str = "") -> None:
        """Publish a finished local file whole, replacing an older object. `first` is that of ObjectInfo."""
        with self._explained():
            self._uploader.upload(self.prefix + key, path, _told(sha256_file(path), first), only_new=False)

    def offer(self, key: str, path: Path, first: str = "") -> bool:
        """Publish a finished file unless there is such an object; False if there is one with other bytes or `first`."""
        digest = sha256_file(path)
        # A large file is not sent only to learn that it was too late.
        found = self.info(key) if path.stat().st_size > self.settings.multipart_threshold else None
        if found is None:
            with self._explained():
                if self._uploader.upload(self.prefix + key, path, _told(digest, first), only_new=True):
                    return True
            found = self.info(key)
        return found is not None and (found.sha256, found.first) == (digest, first)

    def delete(self, key: str) -> None:
        """Remove an object; no error if there is none."""
        self._ask(lambda: self.client.delete_object(**self._at(key)))

    def address(self, key: str) -> str:
        """The URL of an object."""
        return f"{self.url}/{key}"

    def free_bytes(self) -> None:
        """S3 knows no limit."""
        return

    def remove_unfinished(self, older_than_s: float, *, done: Sequence[str] = (), dry: bool = False) -> Sequence[str]:
        """Abort uploads in parts that nobody finished.

        A young one may be at work, unless its object came meanwhile: an object has one writer, or the first one wins.
        """
        pages = self.client.get_paginator("list_multipart_uploads")
        found = self._ask(lambda: [*pages.paginate(Bucket=self.bucket, Prefix=self.prefix)])
        uploads = [upload for page in found for upload in page.get("Uploads", ())]
        gone = [upload for upload in uploads if self._left(upload, older_than_s, tuple(done))]
        for upload in () if dry else gone:
            self._abort(upload["Key"], upload["UploadId"])
        return [f"s3://{self.bucket}/{upload['Key']}" for upload in gone]

    def _left(self, upload: dict[str, Any], older_than_s: float, done: tuple[str, ...]) -> bool:
        key, begun = upload["Key"].removeprefix(self.prefix), upload["Initiated"].timestamp()
        if key.startswith(done) or time.time() - begun > older_than_s:
            return True
        there = self.info(key)
        return there is not None and there.modified > begun

    def _abort(self, key: str, upload: str) -> None:
        try:
            self._ask(lambda: self.client.abort_multipart_upload(Bucket=self.bucket, Key=key, UploadId=upload), key)
        except KeyError:  # finished or aborted by another in between
            return

    @property
    def _uploader(self) -> Uploader:
        checksums, multipart_threshold = self.settings.checksum == "when_supported", self.settings.multipart_threshold
        return Uploader(lambda: self.client, self.bucket, self._patience, checksums, multipart_threshold)

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self.prefix + key}

    def _explained(self) -> Any:
        return explained(self.url, self.endpoint)

    def _ask(self, request: Callable[[], T], key: str | None = None) -> T:
        """A request's result. Raises KeyError for a missing object if `key` is given, UserError for other refusals."""
        with self._explained():
            try:
                return self._patience(request)
            except ClientError as error:
                if key is not None and status_of(error) == 404 and code_of(error) != "NoSuchBucket":
                    raise KeyError(key) from None
                raise


class LooseS3Store(S3Store):
    """A store whose puts may be lost while it is away."""

    def put(self, key: str, data: bytes) -> None:
        """Publish an object if the store answers."""
        with suppress(StoreAwayError, CredentialsExpiredError):
            super().put(key, data)


def _told(digest: str, first: str) -> dict[str, str]:
    return {SHA256: digest, FIRST: first} if first else {SHA256: digest}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
