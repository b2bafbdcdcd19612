"""Unfinished work of one job, kept in the store so that a killed job resumes on any machine.

A journal is a row of segments, each one object of JSON lines whose first line is the digest of the rest: a torn or
foreign segment is recognised and dropped, and its rows are done again. Rows are found by their key, never by counting.
A segment's name ends with its writer's own mark, so that two writers of one journal (a killed job's last breath on another
machine) never replace each other's segments.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from draftmill.canonical import canonical_json, digest_bytes
from draftmill.store.base import Store


class Journal:
    """Rows of one job under a prefix of the store."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix.rstrip("/") + "/"
        self._next, self._writer = 0, secrets.token_hex(4)

    def rows(self) -> list[dict[str, Any]]:
        """Every whole row that was flushed, in the order of flushing; damaged segments are removed.

        Segments that go meanwhile are left out: another build has finished the job.
        """
        found: list[dict[str, Any]] = []
        for key in sorted(self._store.list(self._prefix)):
            self._next = max(self._next, _number(key) + 1)
            try:
                segment = _decode(self._store.get(key))
            except KeyError:
                continue
            if segment is None:
                self._store.delete(key)
            else:
                found += segment
        return found

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Flush rows as one segment; nothing is written for no rows."""
        lines = [canonical_json(row) for row in rows]
        if not lines:
            return
        body = "\n".join(lines).encode()
        self._store.put(
            f"{self._prefix}{self._next:08d}-{self._writer}.jsonl", digest_bytes(body).encode() + b"\n" + body
        )
        self._next += 1

    def clear(self) -> None:
        """Forget everything: the job's output is published."""
        for key in self._store.list(self._prefix):
            self._store.delete(key)


def _number(key: str) -> int:
    stem = key.rpartition("/")[2].removesuffix(".jsonl").partition("-")[0]
    return int(stem) if stem.isdigit() else -1


def _decode(data: bytes) -> list[dict[str, Any]] | None:
    digest, _, body = data.partition(b"\n")
    if digest.decode(errors="replace") != digest_bytes(body):
        return None
    return [json.loads(line) for line in body.split(b"\n")]
