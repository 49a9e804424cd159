"""Building the leaf records of a manifest from the places of their chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from perdure.store.manifest import Chunk, LeafRecord, PackRecord


class Held(Struct, frozen=True, gc=False):
    """Where a chunk already lies."""

    pack: str
    offset: int
    length: int


class RecordBuilder:
    """Builds the records of one manifest, and numbers its packs in the order in which they are met."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def array(
        self,
        path: str,
        dtype: str,
        shape: tuple[int, ...],
        nbytes: int,
        digests: Sequence[str],
        places: Mapping[str, Held],
    ) -> LeafRecord:
        """The record of an array of `nbytes` bytes with the chunks `digests`, of which `places` has
        the place of each."""
        # A save calls this for each of its leaves.
        numbers = self._numbers
        chunks = []
        missing = nbytes
        for digest in digests:
            place = places[digest]
            if (number := numbers.get(place.pack)) is None:
                number = numbers[place.pack] = len(numbers)
            chunks.append(Chunk(digest, number, place.offset, place.length))
            missing -= place.length
        # Encoded chunks take fewer bytes than the array has; only then does the record state its size.
        return LeafRecord(path, dtype, shape, tuple(chunks), None, nbytes if missing else None)

    def moved(self, record: LeafRecord, place: Callable[[Chunk], Held]) -> LeafRecord:
        """A record of another manifest, with its chunks where `place` says that they lie now."""
        if record.text is not None:
            return record
        places = {chunk.hash: place(chunk) for chunk in record.chunks}
        return self.array(
            record.path, record.dtype, record.shape, record.nbytes, record.hashes(), places
        )

    def packs(self, size: Callable[[str], int]) -> list[PackRecord]:
        """The packs that the records read from; `size` returns the bytes of one by its name."""
        return [PackRecord(name=name, size=size(name)) for name in self._numbers]
