"""Building the leaf entries of a manifest from the places of their chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from perdure.store.manifest import Chunk, LeafEntry, PackEntry


class Held(Struct, frozen=True, gc=False):
    """Where a chunk already lies."""

    pack: str
    offset: int
    length: int


PlacedChunk = tuple[str, Held]
"""The hash of a chunk, and where it lies."""


class EntryBuilder:
    """Builds the entries of one manifest, and numbers its packs in the order in which they are met."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def array(
        self,
        path: str,
        dtype: str,
        shape: tuple[int, ...],
        nbytes: int,
        placed: Sequence[PlacedChunk],
    ) -> LeafEntry:
        """The entry of an array of `nbytes` bytes with these chunks."""
        # A save calls this for each of its leaves.
        numbers = self._numbers
        if len(placed) == 1:
            digest, place = placed[0]
            if (number := numbers.get(place.pack)) is None:
                number = numbers[place.pack] = len(numbers)
            length = place.length
            chunk = Chunk(digest, number, place.offset, length)
            return LeafEntry(
                path, dtype, shape, (chunk,), None, None if length == nbytes else nbytes
            )
        chunks = []
        missing = nbytes
        for digest, place in placed:
            if (number := numbers.get(place.pack)) is None:
                number = numbers[place.pack] = len(numbers)
            chunks.append(Chunk(digest, number, place.offset, place.length))
            missing -= place.length
        # Encoded chunks take fewer bytes than the array has; only then does the entry state its size.
        return LeafEntry(path, dtype, shape, tuple(chunks), None, nbytes if missing else None)

    def moved(self, entry: LeafEntry, place: Callable[[Chunk], Held]) -> LeafEntry:
        """An entry of another manifest, with its chunks where `place` says that they lie now."""
        if entry.text is not None:
            return entry
        placed = [(chunk.hash, place(chunk)) for chunk in entry.chunks]
        return self.array(entry.path, entry.dtype, entry.shape, entry.nbytes, placed)

    def packs(self, size: Callable[[str], int]) -> list[PackEntry]:
        """The packs that the entries read from; `size` returns the bytes of one by its name."""
        return [PackEntry(name=name, size=size(name)) for name in self._numbers]
