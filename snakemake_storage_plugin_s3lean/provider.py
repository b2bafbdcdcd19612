"""The provider: one client, and what this run knows of the storage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError
from snakemake_interface_storage_plugins.storage_provider import StorageQueryValidationResult
from snakemake_storage_plugin_s3 import DEFAULT_REGION
from snakemake_storage_plugin_s3 import StorageProvider as S3Provider

from draftmill.store.patience import Patience, status_of
from draftmill.store.s3_wire import THREADS, Nap, Stored, Uploader

T = TypeVar("T")
# Inputs that are retrieved at a time; each large one is fetched by several threads of boto3's own.
RETRIEVALS = 4
_CONNECT_S, _READ_S = 10, 60


class StorageProvider(S3Provider):  # type: ignore[misc]
    """A bucket's objects, as far as this run knows them."""

    def __post_init__(self) -> None:
        """Nothing is asked of the storage, and no client is made, before the first request."""
        # By (bucket, key); what is in here is there, what is not may be.
        self.known: dict[tuple[str, str], Stored] = {}
        # What was there when the run was planned, or was stored by it: it may be replaced and removed.
        self.own: set[tuple[str, str]] = set()
        # Where jobs publish by themselves, what they have stored is nobody's to remove but this.
        self.temporary: frozenset[tuple[str, str]] = frozenset()
        # Names below which objects are known.
        self.folders: set[tuple[str, str]] = set()
        # (bucket, prefix) whose objects of the time of planning are all in `known`.
        self.listed: set[tuple[str, str]] = set()
        # Whether no other process stores for this run: what a listing lacked is missing then until it is stored here. Only
        # a workflow can know, because a provider does not see how its jobs are executed.
        self.alone: Callable[[], bool] = lambda: False
        self.pool = ThreadPoolExecutor(RETRIEVALS, thread_name_prefix="retrieve")
        self.nap = Nap()
        self.patience = Patience(
            self.settings.wait_s,
            self.logger.warning,
            self.settings.endpoint_url or "S3",
            renew=self._forget_client,
            sleep=self.nap,
        )
        # A bare `storage("s3://...")` must stay the original plugin's, so only an instance takes queries.
        self.is_valid_query = super().is_valid_query  # type: ignore[method-assign]

    @classmethod
    def is_valid_query(cls, query: str) -> StorageQueryValidationResult:
        """Never valid for the class: this plugin is used by name or as default provider and never guessed."""
        return StorageQueryValidationResult(query=query, valid=False, reason="say storage.s3lean(...)")

    @cached_property
    def s3c(self) -> Any:
        """boto3's resource, made when it is first needed: every job parses the workflow, few ask the storage."""
        settings, session = self.settings, boto3.session.Session()
        return session.resource(
            "s3",
            endpoint_url=settings.endpoint_url,
            region_name=settings.region or session.region_name or DEFAULT_REGION,
            aws_access_key_id=settings.access_key,
            aws_secret_access_key=settings.secret_key,
            aws_session_token=settings.token,
            config=Config(
                signature_version=settings.signature_version,
                s3={"addressing_style": "path" if settings.path_style else "auto"},
                retries={"mode": "standard", "max_attempts": settings.retries},
                request_checksum_calculation=settings.checksum,
                response_checksum_validation=settings.checksum,
                max_pool_connections=RETRIEVALS * THREADS,
                connect_timeout=_CONNECT_S,
                read_timeout=_READ_S,
            ),
        )

    @property
    def client(self) -> Any:
        """The resource's client; unlike the resource it may be used by several threads."""
        return self.s3c.meta.client

    def _forget_client(self) -> None:
        self.__dict__.pop("s3c", None)

    def ask(self, request: Callable[[], T]) -> T | None:
        """A request's result, waiting while the storage is away; None for a missing object."""
        try:
            return self.patience(request)
        except ClientError as error:
            if status_of(error) == 404 and error.response["Error"]["Code"] != "NoSuchBucket":
                return None
            raise

    def uploader(self, bucket: str) -> Uploader:
        """Uploads with digests."""
        checksums, multipart_threshold = self.settings.checksum == "when_supported", self.settings.multipart_threshold
        return Uploader(lambda: self.client, bucket, self.patience, checksums, multipart_threshold)

    def folder(self, bucket: str, key: str) -> str:
        """The prefix that is listed to learn of a key, with its slash: the configured one, or the key's folder."""
        prefix = (self.settings.inventory_prefix or "").removeprefix("s3://").strip("/")
        if f"{bucket}/{key}".startswith(f"{prefix}/"):
            return f"{prefix}/".partition("/")[2]
        return key.rpartition("/")[0] + "/" if "/" in key else ""

    def list(self, bucket: str, prefix: str) -> None:
        """Learn of every object below a prefix, once."""
        if (bucket, prefix) in self.listed:
            return
        pages = self.client.get_paginator("list_objects_v2")
        found = self.ask(lambda: [*pages.paginate(Bucket=bucket, Prefix=prefix)])
        entries = [entry for page in found or () for entry in page.get("Contents", ())]
        self.take(bucket, prefix, ((e["Key"], Stored(e["Size"], e["LastModified"].timestamp())) for e in entries))

    def take(self, bucket: str, prefix: str, entries: Iterable[tuple[str, Stored]]) -> None:
        """Take over a listing that a workflow has made already: all objects below a prefix that matter to it."""
        found = {(bucket, key): entry for key, entry in entries if not key.endswith("/")}
        self.known |= found
        self.own |= found.keys()
        self.folders |= {(bucket, folder) for _, key in found for folder in folders_of(key, prefix)}
        self.listed.add((bucket, prefix))


def folders_of(key: str, prefix: str) -> Iterator[str]:
    """The names of the folders that a key lies in, below the prefix and without slashes at their ends."""
    folder = key.rpartition("/")[0]
    while len(folder) > len(prefix):
        yield folder
        folder = folder.rpartition("/")[0]
