"""Reading stored chunks and checking them: the one place that decides whether a chunk is damaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from perdure.store.codec import decode, is_intact
from perdure.store.failures import DamagedChunk, is_gone
from perdure.store.format import PACKS, hash_bytes
from perdure.store.pack_index import PackedChunk


class Readable(Protocol):
    """The part of a `Storage` that chunks are read through."""

    where: str

    def read_into(self, name: str, offset: int, target: memoryview) -> int: ...


def chunk_fault(
    stored: memoryview, available: int, digest: str, size: int, target: memoryview | None = None
) -> str | None:
    """What is wrong with a chunk as it is stored, or None.

    Args:
        stored: The memory that the chunk was read into.
        available: How many bytes were read from the beginning of the chunk; fewer than it takes if
            the pack is cut short.
        digest: The hash of the chunk.
        size: Its bytes once it is decoded.
        target: Memory for the chunk. Without it, an encoded chunk is checked by its seal and not
            decompressed.
    """
    if available < len(stored):
        return f"expected {len(stored)} bytes, found {max(0, available)}; the pack is cut short"
    if len(stored) != size:
        if target is not None:
            return decode(stored, digest, target)
        intact = is_intact(stored, digest, size)
        return None if intact else f"its {len(stored)} encoded bytes do not match their seal"
    if (actual := hash_bytes(stored)) != digest:
        return f"expected hash {digest}, found {actual}"
    if target is not None:
        target[:] = stored
    return None


def read_chunks(
    source: Readable,
    pack: str,
    offset: int,
    chunks: Sequence[PackedChunk],
    *,
    decoded: bool = False,
) -> memoryview:
    """Read chunks that follow each other in a pack, and check each of them.

    Args:
        source: Where the pack is.
        pack: Its name inside `packs/`.
        offset: The place of the first chunk.
        chunks: What should be there.
        decoded: Decompress encoded chunks too, as a restore does, instead of checking their seals.

    Returns:
        The chunks as they are stored.

    Raises:
        DamagedChunk: A chunk is not what it should be, or there is no such pack.
        OSError: The pack cannot be read for another reason; nothing is known about its contents.
    """
    place = f"{source.where}/{PACKS}{pack} at offset"
    data = memoryview(bytearray(sum(length for _, length, _ in chunks)))
    try:
        available = source.read_into(PACKS + pack, offset, data)
    except OSError as error:
        if not is_gone(error):
            raise
        reason = f"{place} {offset}: expected a pack, found no such file."
        raise DamagedChunk(reason, pack, offset) from error
    start = 0
    for digest, length, size in chunks:
        target = memoryview(bytearray(size)) if decoded and length != size else None
        stored = data[start : start + length]
        if fault := chunk_fault(stored, available - start, digest, size, target):
            raise DamagedChunk(f"{place} {offset + start}: {fault}.", pack, offset + start)
        start += length
    return data
