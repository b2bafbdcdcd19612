"""What boto3 leaves open for whole objects: conditional uploads, in parts as well, with a digest beside them.

boto3's own transfer cannot say `If-None-Match` for a large file. Like patience.py this module imports nothing else of
draftmill, so that the storage plugin for Snakemake can take both along.
"""

from __future__ import annotations

import base64
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

from botocore.exceptions import ClientError

from draftmill.store.patience import Patience, brief, code_of, status_of

T = TypeVar("T")
SHA256, FIRST = "sha256", "first-sha256"
"""Names of an object's metadata: its digest, and that of the first output of its job."""
PART_BYTES = 8 << 20
"""The usual size of a part (S3 takes none below 5 MiB but the last), and of the largest file that is sent whole."""
# S3 takes 10,000 parts; a margin, because a file's size is divided by it.
_MOST_PARTS = 9_000
THREADS = 10
_CONFLICT_TRIES = 5
# An upload in parts is gone when its completion was repeated, or when another build swept it because the object was there.
_SWEPT = {"NoSuchUpload"}
_EXISTS, _CONFLICT = {"PreconditionFailed", "412"}, {"ConditionalRequestConflict", "409"}


def sha256_file(path: Path) -> str:
    """A file's digest in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Nap:
    """A sleep that ends at once, with an error, when whoever waits for the sleeper gives up."""

    def __init__(self) -> None:
        self._over = threading.Event()

    def __call__(self, seconds: float) -> None:
        """Sleep. Raises InterruptedError if it is over."""
        if self._over.wait(seconds):
            raise InterruptedError("nobody waits for this request any more")

    def end(self) -> None:
        """Let every sleeper wake up, now and later."""
        self._over.set()


@dataclass(frozen=True, slots=True)
class Stored:
    """An object as it stands in the store: its bytes and when it was changed, in seconds since 1970.

    After a put the time is that of the reply, a little later than the object's own, which the reply does not tell.
    """

    size: int
    modified: float


@dataclass(frozen=True)
class Uploader:
    """Puts whole objects with their digest; `checksums` sends it also as S3's checksum, which the server then checks."""

    # Asked for every request: renewed credentials make a new one.
    client: Callable[[], Any]
    bucket: str
    patience: Patience
    checksums: bool = True
    multipart_threshold: int = PART_BYTES

    def put(self, key: str, data: bytes, metadata: dict[str, str], **condition: str) -> Stored | None:
        """One request, with IfNoneMatch="*" or IfMatch=etag if it is conditional. None if the condition failed."""
        arguments = {"Metadata": metadata, **self._checksum(data), **condition}

        def put() -> Stored:
            reply = self.client().put_object(Bucket=self.bucket, Key=key, Body=data, **arguments)
            return Stored(len(data), _time_of(reply))

        return self._unless_lost(key, metadata, lambda: self.patience(put), condition)

    def upload(self, key: str, path: Path, metadata: dict[str, str], *, only_new: bool) -> Stored | None:
        """A file, in parts if it is large. None if the object exists and only a new one was wanted."""
        size = path.stat().st_size
        if size <= self.multipart_threshold:
            return self.put(key, path.read_bytes(), metadata, **_condition(only_new))
        condition = _condition(only_new)
        sent = self._unless_lost(
            key, metadata, lambda: self._multipart(key, path, size, metadata, condition), condition
        )
        # Some stores let two completions pass that come at the same time; the later one stands.
        return self._ours(key, metadata) if sent and only_new else sent

    def _unless_lost(
        self, key: str, metadata: dict[str, str], send: Callable[[], Stored], condition: dict[str, str]
    ) -> Stored | None:
        """What was sent; None if the condition failed. Raises the last error of a conflict that does not end."""
        attempt = 0
        while True:
            try:
                return send()
            except ClientError as error:
                code = code_of(error)
                # A request that was repeated may have met itself: the first one arrived and only its reply was lost.
                met = self._ours(key, metadata) if code in _EXISTS | _SWEPT else None
                if met or code in _EXISTS or _replaced_nothing(error, condition):
                    return met
                if code not in _CONFLICT | _SWEPT or attempt == _CONFLICT_TRIES - 1:
                    raise
                self.patience.sleep(self.patience.pause(attempt))
                attempt += 1

    def _ours(self, key: str, metadata: dict[str, str]) -> Stored | None:
        """What stands in the store if it is what we have put, which its metadata tell."""
        try:
            reply = self.patience(lambda: self.client().head_object(Bucket=self.bucket, Key=key))
        except ClientError as error:
            if status_of(error) == 404:
                return None
            raise
        found = {str(name).lower(): str(value) for name, value in reply.get("Metadata", {}).items()}
        return Stored(reply["ContentLength"], reply["LastModified"].timestamp()) if found == metadata else None

    def _multipart(
        self, key: str, path: Path, size: int, metadata: dict[str, str], condition: dict[str, str]
    ) -> Stored:
        where = {"Bucket": self.bucket, "Key": key}
        kind = {"ChecksumAlgorithm": "SHA256"} if self.checksums else {}
        begun = self.patience(lambda: self.client().create_multipart_upload(**where, Metadata=metadata, **kind))
        where["UploadId"] = begun["UploadId"]
        try:
            parts = self._parts(where, path, size)
            reply = self.patience(
                lambda: self.client().complete_multipart_upload(**where, MultipartUpload={"Parts": parts}, **condition)
            )
            return Stored(size, _time_of(reply))
        except BaseException:
            self._abort(where)
            raise

    def _parts(self, where: dict[str, str], path: Path, size: int) -> list[dict[str, Any]]:
        length, nap = max(PART_BYTES, -(-size // _MOST_PARTS)), Nap()
        # Ctrl-C reaches only the main thread; without it the others would wait for the store as long as they may.
        patience = replace(self.patience, sleep=nap)

        def send(number: int) -> dict[str, Any]:
            with path.open("rb") as file:
                file.seek((number - 1) * length)
                data = file.read(length)
            checksum = self._checksum(data)
            reply = patience(lambda: self.client().upload_part(**where, PartNumber=number, Body=data, **checksum))
            return {"PartNumber": number, "ETag": reply["ETag"], **checksum}

        with ThreadPoolExecutor(THREADS) as pool:
            return list(_cancelling(pool, nap, pool.map(send, range(1, -(-size // length) + 1))))

    def _abort(self, where: dict[str, str]) -> None:
        try:
            self.client().abort_multipart_upload(**where)
        except Exception as error:  # the sweep at a build's start finds it
            # A completion whose reply was lost has ended it.
            if isinstance(error, ClientError) and code_of(error) in _SWEPT:
                return
            self.patience.say(f"{self.patience.store} kept an unfinished upload of {where['Key']} ({brief(error)}).")

    def _checksum(self, data: bytes) -> dict[str, str]:
        if not self.checksums:
            return {}
        return {"ChecksumSHA256": base64.b64encode(hashlib.sha256(data).digest()).decode()}


def _time_of(reply: Any) -> float:
    """The time of a reply by the server's clock, in seconds since 1970; by ours if it does not say."""
    said = reply["ResponseMetadata"]["HTTPHeaders"].get("date")
    return parsedate_to_datetime(said).timestamp() if said else time.time()


def _replaced_nothing(error: ClientError, condition: dict[str, str]) -> bool:
    """Whether an object was to be replaced that is gone: AWS says 404 then, where other stores say 412."""
    return "IfMatch" in condition and status_of(error) == 404 and code_of(error) != "NoSuchBucket"


def _condition(only_new: bool) -> dict[str, str]:
    return {"IfNoneMatch": "*"} if only_new else {}


def _cancelling(pool: ThreadPoolExecutor, nap: Nap, results: Iterator[T]) -> Iterator[T]:
    """The results; after a failure no further part is begun, and none is waited for."""
    try:
        yield from results
    except BaseException:
        nap.end()
        pool.shutdown(wait=True, cancel_futures=True)
        raise
