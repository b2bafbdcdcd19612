"""One name for every store: a folder, or s3://bucket/prefix."""

from __future__ import annotations

from pathlib import Path

from draftmill.store.base import Store
from draftmill.store.local import LocalStore
from draftmill.store.settings import S3Settings

SCHEME = "s3://"


def is_s3(url: str) -> bool:
    """Whether a store's name means S3."""
    return url.startswith(SCHEME)


def open_store(url: str, s3: S3Settings | None = None) -> Store:
    """The store of that name; nothing is asked of it yet. boto3 is imported for S3 only."""
    if not is_s3(url):
        return LocalStore(Path(url))
    from draftmill.store.s3 import S3Store

    return S3Store(url, s3 or S3Settings())
