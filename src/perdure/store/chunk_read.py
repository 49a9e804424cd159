"""Reading stored chunks and checking them: the one place that decides whether a chunk is damaged.

Bytes that are not what they should be are read once more, not from the page cache, before that is said:
a bit that flipped on its way from the disk, or an answer that was cut short, costs no checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

from perdure.store.codec import decode, is_intact
from perdure.store.failures import DamagedChunk, is_gone
from perdure.store.format import PACKS, hash_bytes, hash_each
from perdure.store.pack_index import PackedChunk
from perdure.store.storage import Readable, read_again


def first_fault(
    data: memoryview,
    available: int,
    chunks: Sequence[PackedChunk],
    targets: Sequence[memoryview | None],
    place: str,
    again: Callable[[], int],
) -> tuple[int, str] | None:
    """Check chunks that follow each other in `data`; if one seems to be damaged, read all again first.

    Args:
        data: The memory that they were read into.
        available: How many bytes were read; fewer than they take if the pack is cut short.
        chunks: What should be there.
        targets: Memory for each decoded chunk. Without it, an encoded chunk is checked by its seal and
            not decompressed.
        place: Where the bytes come from, for the log.
        again: Fills `data` by another read (`storage.read_again`); returns how many bytes there were.

    Returns:
        The index of the first damaged chunk, and what is wrong with it; None if all are good.
    """
    if (found := _first_fault(data, available, chunks, targets)) is None:
        return None
    if (confirmed := _first_fault(data, again(), chunks, targets)) is None:
        logging.getLogger(__name__).warning(
            "%s: %s; read again, the bytes are right and are used. If this comes again, check the "
            "memory, the disk and the network of this machine.",
            place,
            found[1],
        )
    return confirmed


def _first_fault(
    data: memoryview,
    available: int,
    chunks: Sequence[PackedChunk],
    targets: Sequence[memoryview | None],
) -> tuple[int, str] | None:
    ends = list(accumulate([length for _, length, _ in chunks]))
    stored = list(map(data.__getitem__, map(slice, [0, *ends], ends)))
    # There may be very many small chunks, so all are hashed by one call. Only if that finds a
    # difference, or if some are encoded, are they checked one by one.
    plain = ends[-1] <= available and all(length == size for _, length, size in chunks)
    if plain and len(chunks) > 1 and hash_each(stored) == [digest for digest, _, _ in chunks]:
        for part, target in zip(stored, targets, strict=True):
            if target is not None:
                target[:] = part
        return None
    for index, ((digest, length, size), target) in enumerate(zip(chunks, targets, strict=True)):
        present = available - (ends[index] - length)
        if fault := _fault(stored[index], present, digest, size, target):
            return index, fault
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
        targets = [
            memoryview(bytearray(size)) if decoded and length != size else None
            for _, length, size in chunks
        ]
        again = partial(read_again, source, PACKS + pack, offset, data)
        found = first_fault(data, available, chunks, targets, f"{place} {offset}", again)
    except OSError as error:
        if not is_gone(error):
            raise
        reason = f"{place} {offset}: expected a pack, found no such file."
        raise DamagedChunk(reason, pack, offset) from error
    if found:
        index, fault = found
        offset += sum(length for _, length, _ in chunks[:index])
        raise DamagedChunk(f"{place} {offset}: {fault}.", pack, offset)
    return data


def _fault(
    stored: memoryview, present: int, digest: str, size: int, target: memoryview | None
) -> str | None:
    """What is wrong with one chunk, of which `present` bytes were read; None if it is good."""
    if present < len(stored):
        return f"expected {len(stored)} bytes, found {max(0, present)}; the pack is cut short"
    if len(stored) != size:
        if target is not None:
            return decode(stored, digest, target)
        intact = is_intact(stored, digest, size)
        return None if intact else f"its {len(stored)} encoded bytes do not match their seal"
    if (actual := hash_bytes(stored)) != digest:
        return f"expected hash {digest[:16]}, found {actual[:16]}"
    if target is not None:
        target[:] = stored
    return None
