"""One object of the storage."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from snakemake_interface_storage_plugins.io import IOCacheStorageInterface, Mtime
from snakemake_storage_plugin_s3 import StorageObject as S3Object

from draftmill.store.s3_wire import SHA256, Stored, Uploader, sha256_file
from snakemake_storage_plugin_s3lean.provider import folders_of


class StorageObject(S3Object):  # type: ignore[misc]
    """A file, or a folder of files, in a bucket."""

    # What is there -------------------------------------------------------------------------------------------------

    def get_inventory_parent(self) -> str:
        """What is listed to learn of this object, by the name that Snakemake's cache uses."""
        return str(self.cache_key(f"{self.bucket}/{self.provider.folder(self.bucket, self.key)}".rstrip("/")))

    async def inventory(self, cache: IOCacheStorageInterface) -> None:
        """Tell Snakemake of everything below the prefix. What is not told of is missing, without a request."""
        parent, prefix = self.get_inventory_parent(), self.provider.folder(self.bucket, self.key)
        finished: set[str] = getattr(cache.exists_in_storage, "has_inventory", set())
        if parent in finished:
            return
        self.provider.list(self.bucket, prefix)
        for (bucket, key), entry in self.provider.known.items():
            if bucket == self.bucket and key.startswith(prefix):
                self._tell(cache, key, entry, prefix)
        cache.exists_in_storage[parent] = True
        finished.add(parent)

    def _tell(self, cache: IOCacheStorageInterface, key: str, entry: Stored, prefix: str) -> None:
        name = self.cache_key(f"{self.bucket}/{key}")
        cache.exists_in_storage[name], cache.size[name] = True, entry.size
        cache.mtime[name] = Mtime(storage=entry.modified)
        for folder in folders_of(key, prefix):
            name = self.cache_key(f"{self.bucket}/{folder}")
            cache.exists_in_storage[name] = True
            before = cache.mtime[name].storage() if name in cache.mtime else None
            cache.mtime[name] = Mtime(storage=max(before or 0.0, entry.modified))

    def exists(self) -> bool:
        """Whether there is such an object, or are objects below it."""
        return self._entry() is not None or self.is_dir()

    def mtime(self) -> float:
        """When the object was changed; of a folder, its youngest object."""
        return self._sure().modified

    def size(self) -> int:
        """Bytes of the object, or of all below it."""
        return self._sure().size

    def _sure(self) -> Stored:
        found = self._entry()
        if found is not None:
            return found
        inside = list(self.get_subkeys())
        if not inside:
            raise FileNotFoundError(self.print_query)
        return Stored(sum(item.size for item in inside), max(item.last_modified.timestamp() for item in inside))

    def _entry(self) -> Stored | None:
        """What is known of the object, asked for if nothing is."""
        found: Stored | None = self.provider.known.get(self._name)
        if found is not None or (self._listed and self.provider.alone()):
            return found
        reply = self._head()
        if reply is not None:
            self.provider.known[self._name] = found = _stored(reply)
        return found

    @property
    def _listed(self) -> bool:
        return (self.bucket, self.provider.folder(self.bucket, self.key)) in self.provider.listed

    def _head(self) -> Any:
        return self.provider.ask(lambda: self.provider.client.head_object(Bucket=self.bucket, Key=self.key))

    @property
    def _name(self) -> tuple[str, str]:
        return self.bucket, self.key

    def is_dir(self) -> bool:
        """Whether there are objects below this name; asked only where no listing and no `directory()` can tell."""
        provider = self.provider
        if self._name in provider.known or self._name in provider.folders:
            return self._name in provider.folders
        if self._listed and "directory" not in getattr(getattr(self, "_iofile", None), "flags", {}):
            return False
        return any(True for _ in self.get_subkeys())

    def get_subkeys(self) -> Iterator[Any]:
        """The objects below this name."""
        found = self.provider.ask(lambda: list(super(StorageObject, self).get_subkeys()))
        return iter(found or ())

    # Transfers -----------------------------------------------------------------------------------------------------

    async def managed_retrieve(self) -> None:
        """Retrieve in a thread: Snakemake starts the retrievals of a job's inputs together but would run them in turn."""
        retrieve = super().managed_retrieve
        try:
            await asyncio.get_running_loop().run_in_executor(self.provider.pool, lambda: asyncio.run(retrieve()))
        except (asyncio.CancelledError, KeyboardInterrupt):
            # Ctrl-C: the thread must not go on waiting for a storage that is away.
            self.provider.nap.end()
            raise

    def retrieve_object(self) -> None:
        """Bring the object to its local path."""
        if self.is_dir():
            self.provider.patience(super().retrieve_object)
        else:
            self._download()

    def _download(self) -> None:
        path = str(self.local_path())
        self.provider.patience(lambda: self.provider.client.download_file(self.bucket, self.key, path))

    def store_object(self) -> None:
        """Publish the local file. An object that another run has stored since this one was planned wins."""
        path = self.local_path()
        if path.is_dir():
            return self._store_folder(path)
        self.provider.known[self._name] = self._store(path) or self._lose()
        # Snakemake removes a failed job's outputs, and one whose next output cannot be stored has failed. What its job has
        # published stays, for the next try and for other runs.
        if not self.provider.settings.look_first or self._name in self.provider.temporary:
            self.provider.own.add(self._name)

    def _store(self, path: Path) -> Stored | None:
        """What stands in the storage for the file, sent if it was not there; None if another run has stored others."""
        digest, settings = sha256_file(path), self.provider.settings
        # Jobs that publish by themselves have settled among runs what stands there.
        planned = self._name in self.provider.own and not settings.look_first
        # A large file is not sent only to learn that it was too late, nor one that its job has sent.
        look = settings.look_first or path.stat().st_size > settings.multipart_threshold
        there = self._head() if look else None
        if there is not None and _digest(there) == digest:
            return _stored(there)
        if there is not None and not planned:
            return None
        only_new = not planned or (look and there is None)
        uploader: Uploader = self.provider.uploader(self.bucket)
        return uploader.upload(self.key, path, {SHA256: digest}, only_new=only_new)

    def _lose(self) -> Stored:
        """Take the bytes of the run that was faster."""
        self.provider.logger.info(f"Another run has stored {self.print_query} before: its bytes are taken.")
        self._download()
        return _stored(self._head())

    def _store_folder(self, folder: Path) -> None:
        uploader = self.provider.uploader(self.bucket)
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            key = f"{self.key}/{path.relative_to(folder).as_posix()}"
            uploader.upload(key, path, {SHA256: sha256_file(path)}, only_new=False)
            self.provider.folders.add(self._name)

    def remove(self) -> None:
        """Remove what was there when the run was planned or was stored by it; what appeared since is another's."""
        if self._name in self.provider.own:
            self._remove(self.key)
            self.provider.known.pop(self._name, None)
            self.provider.own.discard(self._name)
        elif self._name in self.provider.folders:
            self.provider.folders.discard(self._name)
            for item in self.get_subkeys():
                self._remove(item.key)

    def _remove(self, key: str) -> None:
        self.provider.ask(lambda: self.provider.client.delete_object(Bucket=self.bucket, Key=key))


def _stored(reply: Any) -> Stored:
    return Stored(reply["ContentLength"], reply["LastModified"].timestamp())


def _digest(reply: Any) -> str | None:
    """The sha256 that is stored beside an object; some storages write the names of metadata in capitals."""
    found = {name.lower(): value for name, value in reply.get("Metadata", {}).items()}
    return found.get(SHA256)
