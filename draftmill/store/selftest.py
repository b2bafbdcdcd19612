"""Can a store do what a build needs? Asked before the first job, because days later it would be too late.

Each lack is one sentence that says what it would have meant. Claims and the loser of a race depend on conditional puts,
which some S3 services take and silently ignore.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, cast

from draftmill.errors import UserError
from draftmill.store.base import ObjectInfo, Store

if TYPE_CHECKING:
    from draftmill.store.s3 import S3Store


def check_store(store: Store, key: str, *, max_skew_s: float) -> None:
    """Write, read, create and remove one object `key`. Raises UserError for the first thing the store does not do."""
    try:
        stored = _check_round(store, key, secrets.token_bytes(16))
        _check_clock(store, stored.modified - time.time(), max_skew_s)
        _check_creation(store, key)
        if stored.etag:
            _check_match(cast("S3Store", store), key, stored.etag)
    finally:
        store.delete(key)


def _check_round(store: Store, key: str, data: bytes) -> ObjectInfo:
    store.put(key, data)
    if store.get(key) != data or key not in store.list(key):
        raise UserError(
            f"{store.url} does not show at once what was stored in it: finished work would seem to be lost, so use a store "
            "that is consistent after each write."
        )
    found = store.info(key)
    assert found is not None
    if found.etag and not found.sha256:
        raise UserError(
            f"{store.url} does not keep metadata of objects: damage could not be told from work of another build, so use "
            "a store that keeps them."
        )
    return found


def _check_clock(store: Store, skew_s: float, max_skew_s: float) -> None:
    if abs(skew_s) > max_skew_s:
        raise UserError(
            f"{store.url} has a clock that differs by {abs(skew_s):.0f} s from this host's, more than "
            f"{max_skew_s:g} s (s3.max_clock_skew_s): set this host's clock, or ages of claims and unfinished work are wrong."
        )


def _check_creation(store: Store, key: str) -> None:
    if store.create(key, b"second"):
        raise UserError(
            f"{store.url} ignores If-None-Match and lets one build overwrite another's objects: use a store that honours "
            "conditional puts (AWS S3, SeaweedFS, MinIO, Ceph), or one build at a time on a local folder."
        )
    store.delete(key)
    if not store.create(key, b"new"):
        raise UserError(
            f"{store.url} refuses a conditional put of an object that does not exist: nothing could ever be published in "
            "it, so use another store."
        )


def _check_match(store: S3Store, key: str, stale: str) -> None:
    wrong = store.put_matching(key, b"third", f'"{stale}"') or not store.replace(key, b"third", b"new")
    store.delete(key)
    if wrong or store.put_matching(key, b"fourth", f'"{stale}"'):
        raise UserError(
            f"{store.url} does not honour If-Match, so that two builds could both claim one job: use a store that does."
        )
