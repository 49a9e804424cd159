"""Building the leaf entries of a manifest from the places of their chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat

from msgspec import Struct

from perdure.store.format import blocks
from perdure.store.leaf import Leaf
from perdure.store.manifest import Chunk, LeafEntry, PackEntry


class StoredChunk(Struct, frozen=True, array_like=True, gc=False):
    """Where a chunk already lies."""

    pack: str
    offset: int
    length: int


PlacedChunk = tuple[str, StoredChunk]
"""The hash of a chunk, and where it lies."""


class EntryBuilder:
    """Builds the entries of one manifest, and numbers its packs in the order in which they are met."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, packs: Iterable[str]) -> None:
        """Give each pack that has no number yet the next one, in this order."""
        for pack in packs:
            self._numbers.setdefault(pack, len(self._numbers))

    def array(
        self,
        path: str,
        dtype: str,
        shape: tuple[int, ...],
        nbytes: int,
        placed: Sequence[PlacedChunk],
    ) -> LeafEntry:
        """The entry of an array of `nbytes` bytes with these chunks."""
        numbers = self._numbers
        chunks = []
        missing = nbytes
        for digest, chunk in placed:
            if (number := numbers.get(chunk.pack)) is None:
                number = numbers[chunk.pack] = len(numbers)
            chunks.append(Chunk(digest, number, chunk.offset, chunk.length))
            missing -= chunk.length
        # Encoded chunks take fewer bytes than the array has; only then does the entry state its size.
        return LeafEntry(path, dtype, shape, tuple(chunks), None, nbytes if missing else None)

    def uncut(
        self,
        paths: Sequence[str],
        leaves: Sequence[Leaf],
        digests: Sequence[str],
        stored_chunks: Sequence[StoredChunk],
    ) -> list[LeafEntry]:
        """The entries of arrays that are one chunk each. There may be very many."""
        entries: list[LeafEntry] = []
        columns = map(blocks, (leaves, digests, stored_chunks))
        for names, arrays, hashes, stored in zip(blocks(paths), *columns, strict=True):
            packs = [chunk.pack for chunk in stored]
            self.number(dict.fromkeys(packs))
            offsets = [chunk.offset for chunk in stored]
            lengths = [chunk.length for chunk in stored]
            chunks = map(Chunk, hashes, map(self._numbers.__getitem__, packs), offsets, lengths)
            dtypes = [leaf.dtype for leaf in arrays]
            shapes = [leaf.shape for leaf in arrays]
            nbytes = [len(leaf.data) for leaf in arrays]
            if nbytes == lengths:
                entries += map(LeafEntry, names, dtypes, shapes, zip(chunks))
                continue
            sizes = [None if a == b else b for a, b in zip(lengths, nbytes, strict=True)]
            entries += map(LeafEntry, names, dtypes, shapes, zip(chunks), repeat(None), sizes)
        return entries

    def moved(self, entry: LeafEntry, place: Callable[[Chunk], StoredChunk]) -> LeafEntry:
        """An entry of another manifest, with its chunks where `place` says that they lie now."""
        if entry.text is not None:
            return entry
        placed = [(chunk.hash, place(chunk)) for chunk in entry.chunks]
        return self.array(entry.path, entry.dtype, entry.shape, entry.nbytes, placed)

    def packs(self, size: Callable[[str], int]) -> list[PackEntry]:
        """The packs that the entries read from; `size` returns the bytes of one by its name."""
        return [PackEntry(name=name, size=size(name)) for name in self._numbers]
