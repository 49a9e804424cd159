"""The index at the end of a pack, which says what the pack holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
from blake3 import blake3
from msgspec import Struct

from perdure.errors import CorruptionError
from perdure.store.format import (
    CHUNK_BYTES,
    FORMAT,
    PLACEHOLDER,
    Hash,
    Natural,
    blocks,
    check_hashes,
    check_version,
    decode_json,
    json_parts,
)

PACK_MAGIC = b"perdure-pack-1\n\0"
TRAILER_BYTES = len(PACK_MAGIC) + 8 + 32


class PackIndex(Struct, frozen=True, forbid_unknown_fields=True):
    """The chunks of a pack, in order and without gaps from offset 0."""

    format: Natural
    chunks: tuple[tuple[Hash, Natural, Natural], ...]


PackedChunk = tuple[str, int, int]
"""Hash, stored length, and size once decoded; both are equal for a chunk that is not encoded."""


def encode_pack_tail(chunks: Iterable[PackedChunk]) -> bytes:
    """`pack_tail` in one piece."""
    return b"".join(pack_tail(chunks))


def pack_tail(chunks: Iterable[PackedChunk]) -> Iterator[bytes | memoryview]:
    """Index and trailer that follow the chunks of a pack, in parts."""
    frame = {"format": FORMAT, "chunks": PLACEHOLDER}
    length, hasher = 0, blake3()
    for part in json_parts(map(msgspec.json.encode, blocks(chunks)), msgspec.json.encode(frame)):
        length += len(part)
        hasher.update(part)
        yield part
    yield length.to_bytes(8, "little") + hasher.digest() + PACK_MAGIC


def index_span(trailer: bytes, size: int, where: str) -> tuple[int, int]:
    """(offset, length) of the index of a pack of `size` bytes, from its last TRAILER_BYTES."""
    length = int.from_bytes(trailer[:8], "little")
    if len(trailer) < TRAILER_BYTES or trailer[40:] != PACK_MAGIC or length > size - TRAILER_BYTES:
        raise CorruptionError(
            f"{where}: a pack of {size} bytes does not end in a pack trailer; it is cut short or "
            f"was changed."
        )
    return size - TRAILER_BYTES - length, length


def decode_pack_index(
    index: bytes, trailer: bytes, start: int, where: str
) -> tuple[PackedChunk, ...]:
    """Decode and check the index of a pack whose chunks end at byte `start`.

    Raises CorruptionError, or FormatVersionError for a newer format.
    """
    if blake3(index).digest() != trailer[8:40]:
        raise CorruptionError(f"{where}: the index of the pack does not match its hash.")
    check_version(index, where)
    chunks = decode_json(index, PackIndex, where).chunks
    for digest, length, size in chunks:
        if not length <= size <= CHUNK_BYTES:
            raise CorruptionError(
                f"{where}: the index gives {length} bytes to chunk {digest[:16]} of {size} bytes."
            )
    check_hashes([digest for digest, _, _ in chunks], where)
    held = sum(length for _, length, _ in chunks)
    if held != start:
        raise CorruptionError(
            f"{where}: the index describes {held} bytes of chunks, the pack holds {start}."
        )
    return chunks
