"""The prompt index: which shards the sources form, what they were made of, and what became of every record.

The index is loaded in every parse of the Snakefile, so it is one small JSON; it is brought up to date only when a
source's digest or a setting that decides shards has changed. Shards are written before the index that names them.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from draftmill import layout
from draftmill.config import Config
from draftmill.digests import SETTLED_S, DigestCache
from draftmill.errors import UserError
from draftmill.prompts.bad import check_share
from draftmill.prompts.examine import Source
from draftmill.prompts.files import SourceFile, check_unchanged, find, unreadable
from draftmill.prompts.history import Kin, Members, extended, keys_of, kin_of, load_kin, publish
from draftmill.prompts.record import Rules
from draftmill.prompts.scan import Counts, CountTokens, Progress, ShardEntry, check_splits, scan
from draftmill.prompts.workers import Workers, with_workers
from draftmill.prompts.write import write_shards
from draftmill.store.base import Store

__all__ = ["Index", "ShardEntry", "SourceEntry", "bring_up_to_date", "kin", "load"]

# Raised by hand when the same sources and settings would give other shards.
INDEX_VERSION = 1
DIGESTS = "digests.json"


@dataclasses.dataclass(frozen=True, slots=True)
class SourceEntry:
    """One file that was read: its path as configured, label, size in bytes and digest."""

    path: str
    label: str
    size: int
    digest: str


@dataclasses.dataclass(frozen=True, slots=True)
class Index:
    """The shards in order, train before held-out, and all they were made from."""

    version: int
    spec: dict[str, Any]
    sources: tuple[SourceEntry, ...]
    counts: Counts
    shards: tuple[ShardEntry, ...]
    # Of an index made anew; the store has it for the one it holds. No part of what the index says.
    kin: Kin | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def train(self) -> tuple[ShardEntry, ...]:
        """The shards that are trained on."""
        return tuple(shard for shard in self.shards if shard.split == "train")

    @property
    def held_out(self) -> tuple[ShardEntry, ...]:
        """The shards that are kept for evaluation."""
        return tuple(shard for shard in self.shards if shard.split == "held_out")


_ADAPTER = TypeAdapter(Index)


def load(store: Store) -> Index | None:
    """The index in the store; None if there is none or it is of another version."""
    try:
        data = store.get(layout.INDEX)
    except KeyError:
        return None
    try:
        if json.loads(data)["version"] != INDEX_VERSION:
            return None
        return _ADAPTER.validate_json(data)
    except (ValidationError, ValueError, KeyError, TypeError):
        raise UserError(f"{layout.INDEX} in {store.url} is not readable: delete it and build again.") from None


def bring_up_to_date(
    config: Config,
    store: Store,
    *,
    write: bool,
    limit_tokens: int,
    tokenizer: str,
    count_tokens: CountTokens,
    cache_dir: Path,
    progress: Progress | None = None,
) -> Index:
    """The index of the configured sources as they are now.

    `limit_tokens` is the longest prompt in tokens, `tokenizer` the identity of what counts them. `count_tokens` takes a
    canonical record (with its answer, if answers are kept) and returns what counts against that limit; it is called in
    this process and only for records whose bytes leave a doubt.
    `progress` hears (phase, done, total): bytes while reading, rows while writing. With `write`, missing shards are
    published and then the index; without it nothing is written at all. Raises UserError for a fault of a source, too
    many bad records, or an empty split.
    """
    sources = _sources(config)
    cache = DigestCache(cache_dir / DIGESTS, write=write, settled_s=SETTLED_S)
    entries = tuple(SourceEntry(s.file.path, s.file.label, s.file.size, digest_of(s.file, cache)) for s in sources)
    cache.save()
    spec = spec_of(config, limit_tokens, tokenizer)
    index = load(store)
    current = index is not None and index.spec == spec and index.sources == entries
    if index is not None and current and not (write and _missing(index, store)):
        _check(index.counts, config)
        return index

    def make(workers: Workers | None) -> Index:
        result = scan(sources, config.prompts, limit_tokens, count_tokens, progress, workers)
        check_unchanged(source.file for source in sources)
        _check(result.counts, config)
        shards = {entry.name: keys_of([result.ids[n] for n in numbers]) for entry, numbers in result.shards}
        members = extended(store, shards)
        listed = tuple(entry for entry, _ in result.shards)
        made = Index(INDEX_VERSION, spec, entries, result.counts, listed, kin_of(members))
        if write:
            write_shards(result, store, _missing(made, store), progress, workers)
            _publish(made, members, store)
        return made

    return with_workers(sum(source.file.size for source in sources if source.by_lines), make)


def digest_of(file: SourceFile, cache: DigestCache) -> str:
    """A local file's 'sha256:<hex>'; of an object its ETag, which costs no download. Raises UserError like read()."""
    if file.remote:
        return f"etag:{file.stamp}"
    try:
        return cache.digest(Path(file.path))
    except OSError as error:
        raise unreadable(file.path, error) from None


def _check(counts: Counts, config: Config) -> None:
    check_share(counts.bad, counts.judged, config.prompts.max_bad)
    check_splits(counts, config.prompts.held_out)


def _sources(config: Config) -> list[Source]:
    return [
        Source(file, Rules(source.field, source.answers, config.prompts.system))
        for source in config.prompts.sources
        for file in find(source.path, source.name, config.s3)
    ]


def spec_of(config: Config, limit_tokens: int, tokenizer: str) -> dict[str, Any]:
    """All that decides the index beside the sources' content; max_bad only decides whether to go on."""
    return {
        **config.prompts.model_dump(mode="json", exclude={"max_bad"}),
        "limit_tokens": limit_tokens,
        "tokenizer": {"identity": tokenizer, "chat_template_args": config.target.chat_template_args},
    }


def _missing(index: Index, store: Store) -> set[str]:
    present = store.list("prompts/")
    return {shard.name for shard in index.shards if layout.prompts(shard.name) not in present}


def _publish(index: Index, members: Members, store: Store) -> None:
    publish(store, members, index.kin or {})
    said = dataclasses.asdict(dataclasses.replace(index, kin=None))
    del said["kin"]
    store.put(layout.INDEX, (json.dumps(said, indent=1, ensure_ascii=False) + "\n").encode())


def kin(index: Index, store: Store) -> Kin:
    """Which other shards hold prompts of the index's shards (prompts/history.py)."""
    return index.kin if index.kin is not None else load_kin(store)
