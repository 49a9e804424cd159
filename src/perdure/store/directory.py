"""A run directory as one process knows it: what it has seen, the places of chunks, and damage."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from perdure.errors import CorruptionError, PruneError
from perdure.store.entry_builder import StoredChunk
from perdure.store.failures import DamagedChunk
from perdure.store.manifest import Manifest, PackEntry
from perdure.store.run_log import RunLog
from perdure.store.storage import Storage
from perdure.store.view import View, ViewCache


class Directory:
    """A run directory as one process knows it: views, where each chunk is stored, and damage.

    No save depends on a chunk in a `damaged` pack; `suspects` are those whose other chunks have not
    been checked since; `bad` are (pack, offset) of damaged chunks. `durable` and `loaded` are the
    steps that this process has written under its lock, or read.
    """

    def __init__(self, storage: Storage, log: RunLog | None = None) -> None:
        self.storage = storage
        self.log = RunLog(storage) if log is None else log
        self.durable: set[int] = set()
        self.loaded: set[int] = set()
        self.damaged: dict[str, str] = {}
        self.suspects: set[str] = set()
        self.bad: dict[tuple[str, int], str] = {}
        self.forget()

    def forget(self) -> None:
        """Forget what is there, after another writer or an operation that stopped in the middle."""
        self._cache = ViewCache()
        self._stored_chunks: dict[str, StoredChunk] | None = None

    def changed(self) -> None:
        """Let the next look list the packs again: something was moved or replaced."""
        self._cache.packs = self._stored_chunks = None

    def contents(self, *, whole: bool = True) -> View:
        """A new look at everything; raises `PruneError` if the storage fails.

        Without `whole`, only what has changed since the last look is read, and no pack is looked
        for that the one writer has not seen.
        """
        try:
            view = View(self.storage, self.log, self._cache, whole=whole)
            view.list_all()
            if view.missing and not whole:  # another writer has moved the chunks
                self._cache.packs = None
                view = View(self.storage, self.log, self._cache)
                view.list_all()
        except OSError as error:
            raise PruneError(
                f"{self.storage.where}: cannot be listed: {error}. Nothing was changed; try again."
            ) from error
        return view

    # ------------------------------------------------------------ what the writer did

    def added(self, manifest: Manifest, head: bytes, located: Mapping[str, StoredChunk]) -> None:
        """Note that a manifest was committed, or replaced: its first bytes, and its new chunks."""
        if self._stored_chunks is not None:
            self._stored_chunks.update(located)
        self._cache.add(manifest, head)

    def removed(self, steps: Collection[int], packs: Collection[str]) -> None:
        """Note that manifests and packs were deleted."""
        self.durable.difference_update(steps)
        self._drop_places(packs)
        self._cache.remove(packs)

    # ------------------------------------------------------------ chunks and damage

    def distrust(self, error: CorruptionError) -> None:
        """Note a damaged chunk: saves that need chunks of its pack write them again."""
        if not isinstance(error, DamagedChunk):
            return
        if error.offset >= 0:
            self.bad[error.pack, error.offset] = str(error)
        self.distrust_pack(error.pack, str(error))

    def distrust_pack(self, pack: str, reason: str) -> None:
        """Note a damaged pack: no later save depends on a chunk in it."""
        if pack in self.damaged:
            return
        self.damaged[pack] = reason
        self.suspects.add(pack)
        self._drop_places({pack})

    def stored_chunks(self, *, fresh: bool = False) -> dict[str, StoredChunk]:
        """Places of the chunks of the newest readable checkpoints, by hash, in packs not known to be
        damaged.

        `agrees` tells afterwards whether these packs still have their size. A process beside the
        one writer asks for `fresh` ones.
        """
        if fresh:
            self._cache.sizes.clear()
            self.changed()
        if self._stored_chunks is None:
            view = View(self.storage, self.log, self._cache)
            for pack, reason in view.log.damaged.items():
                self.distrust_pack(pack, reason)
            if self.storage.lists_versions:
                _ = view.packs  # one listing has the sizes of all
            stored: dict[str, StoredChunk] = {}
            for manifest in view.newest.values():
                stored.update(self._places(view, manifest))
            self._stored_chunks = stored
        return self._stored_chunks

    def agrees(self, packs: Iterable[PackEntry]) -> bool:
        """Whether packs have the sizes that `stored_chunks` relied on."""
        sizes = self._cache.sizes
        return all(sizes.get(pack.name, pack.size) == pack.size for pack in packs)

    def _drop_places(self, packs: Collection[str]) -> None:
        if self._stored_chunks is not None and packs:
            stored = self._stored_chunks
            for digest in [key for key, place in stored.items() if place.pack in packs]:
                del stored[digest]

    def _places(self, view: View, manifest: Manifest) -> Iterator[tuple[str, StoredChunk]]:
        """(hash, place) of the chunks of a manifest that a save may depend on."""
        packs = manifest.packs
        usable = [pack.name not in self.damaged and _is_whole(view, pack) for pack in packs]
        for leaf in manifest.every_leaf():
            for chunk in leaf.chunks:
                if usable[chunk.pack]:
                    name = packs[chunk.pack].name
                    yield chunk.hash, StoredChunk(name, chunk.offset, chunk.length)


def _is_whole(view: View, pack: PackEntry) -> bool:
    """Whether a pack has the size that a manifest states."""
    try:
        return view.pack_size(pack.name) == pack.size
    except OSError:
        return False
