"""A run directory as one process knows it: the last view, the places of chunks, and damage."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from perdure.errors import CorruptionError, PruneError
from perdure.store.entry_builder import StoredChunk
from perdure.store.failures import DamagedChunk
from perdure.store.manifest import Manifest, PackEntry
from perdure.store.run_log import RunLog
from perdure.store.storage import Storage
from perdure.store.view import View


class Directory:
    """A run directory as one process knows it: the last view, the places of chunks, and damage.

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
        self._sizes: dict[str, int] = {}
        self._view: View | None = None
        self._is_current = False
        self._stored_chunks: dict[str, StoredChunk] | None = None

    def changed(self) -> None:
        """Let the next view be a new look: something was moved, pinned or replaced."""
        self._is_current, self._stored_chunks = False, None

    def view(self) -> View:
        """The view that the one writer remembers, or a new look."""
        if self._view is None or not self._is_current or self._view.is_outdated:
            self._look()
        assert self._view is not None
        return self._view

    def contents(self, *, fresh: bool = True, whole: bool = True) -> View:
        """A view in which everything is listed; raises `PruneError` if the storage fails.

        Args:
            fresh: Look again. Without it the one writer does not look at the storage.
            whole: Read every manifest and list every pack with its size, as for a reader. Without it
                no pack is looked for that the one writer has not seen.
        """
        try:
            view = self._look(whole=whole) if fresh else self.view()
            view.list_all()
            if view.missing and not fresh:  # a compaction may have moved the chunks
                view = self._look(whole=whole, packs=True)
                view.list_all()
        except OSError as error:
            raise PruneError(
                f"{self.storage.where}: cannot be listed: {error}. Nothing was changed; try again."
            ) from error
        self._is_current = not (view.unknown or view.lost or view.broken)
        return view

    def _look(self, *, whole: bool = False, packs: bool = False) -> View:
        """Look again; at the packs only if `packs` or `whole`, or if they were not listed yet."""
        known, self._is_current = self._view, True
        self._view = View(self.storage, self.log, self._sizes, known, whole=whole, packs=packs)
        return self._view

    # ------------------------------------------------------------ what the writer did

    def added(self, manifest: Manifest, head: bytes, located: Mapping[str, StoredChunk]) -> None:
        """Note that a manifest was committed, or replaced: its first bytes, and its new chunks."""
        if self._stored_chunks is not None:
            self._stored_chunks.update(located)
        self._sizes.update((pack.name, pack.size) for pack in manifest.packs)
        if self._view is not None:
            self._view = self._view.with_added(manifest, head)

    def removed(self, steps: Collection[int], packs: Collection[str]) -> None:
        """Note that manifests and packs were deleted."""
        self.durable.difference_update(steps)
        self._drop_places(packs)
        if self._view is not None:
            self._view = self._view.without(steps, packs)
        for pack in packs:
            self._sizes.pop(pack, None)

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
            self._sizes.clear()
            self._stored_chunks = None
            self._look(packs=True)
        if self._stored_chunks is None:
            view = self.view()
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
        return all(self._sizes.get(pack.name, pack.size) == pack.size for pack in packs)

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
