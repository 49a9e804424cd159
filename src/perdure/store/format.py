"""The bytes of a run directory: names, manifests, pack indexes, fingerprints (docs/FORMAT.md).

Pure functions of their inputs, no input or output. Whatever `decode_*` returns has been checked
against its own hash and against its schema; everything else raises `CorruptionError` or
`FormatVersionError`. Nothing here imports numpy, so that listing a run stays quick.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, TypeVar

import msgspec
from blake3 import blake3
from msgspec import Meta, Struct

from perdure.errors import CorruptionError, FormatVersionError

FORMAT = 1
CODEC_FORMAT = 2
"""Of manifests and packs with encoded chunks; all others stay as every reader knows them."""

LOCAL_FORMAT = 3
"""Of manifests with `local` leaves. The newest format of all."""

CHUNK_BYTES = 4 * 1024 * 1024
SCALAR_PREFIX = "py:"

MARKER = "perdure.json"
LOCK = "lock"
MANIFESTS = "checkpoints/"
PACKS = "packs/"
QUARANTINE = "quarantine/"
PINS = "pins/"
TEMP_SUFFIX = ".tmp"
MAX_STEP = 10**12 - 1

PACK_MAGIC = b"perdure-pack-1\n\0"
TRAILER_BYTES = len(PACK_MAGIC) + 8 + 32
_DIGEST_HEAD = b'{"digest":"'
_DIGEST_BYTES = len(_DIGEST_HEAD) + 64 + len('",')

_MANIFEST_NAME = re.compile(re.escape(MANIFESTS) + r"([0-9]{12})\.json")

Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
# A pattern of its own for every chunk would take longer than all the rest of reading a manifest, so
# `_check_hashes` looks at all of them at once.
Hash = Annotated[str, Meta(min_length=64, max_length=64)]
Time = Annotated[str, Meta(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$")]
PackName = Annotated[str, Meta(pattern=r"^[0-9]{12}-[0-9]{5}-[0-9a-f]{8}\.pack$")]
RecipeValue = str | int | float | bool
T = TypeVar("T")


# `gc=False`: they refer to nothing that could refer back, and a state of many small leaves makes so
# many of them that the collector would run again and again in the middle of a save.
class Chunk(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """At most CHUNK_BYTES of one leaf: its hash, and where its stored bytes lie."""

    hash: Hash
    pack: Natural
    offset: Natural
    length: Natural


class LeafRecord(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """One leaf: array bytes as chunks, or the text of a Python scalar."""

    path: str
    dtype: str
    shape: tuple[Natural, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    text: str | None = None
    size: Natural | None = None
    """Bytes of the leaf where some of its chunks are encoded, so that their lengths do not say it."""

    @property
    def nbytes(self) -> int:
        if self.text is not None:
            return len(self.text.encode())
        return self.stored_nbytes if self.size is None else self.size

    @property
    def stored_nbytes(self) -> int:
        """Bytes that its chunks take, those included that other leaves share."""
        chunks = self.chunks
        return chunks[0].length if len(chunks) == 1 else sum(chunk.length for chunk in chunks)

    def sizes(self) -> list[int]:
        """Bytes of each chunk once it is decoded."""
        if self.size is None:
            return [chunk.length for chunk in self.chunks]
        return [stop - start for start, stop in chunk_spans(self.size)]

    def hashes(self) -> list[str]:
        if self.text is not None:
            return [hash_bytes(self.text.encode())]
        chunks = self.chunks
        return [chunks[0].hash] if len(chunks) == 1 else [chunk.hash for chunk in chunks]


class PackRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """A pack that a manifest reads from."""

    name: PackName
    size: Natural


class Manifest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one checkpoint is made of. Its file is the commit.

    `local` are leaves that belong to one process and not to the state, such as its random generators.
    They are no part of the fingerprint; in all else they are leaves like the others.
    """

    format: Natural
    step: Natural
    created: Time
    fingerprint: Hash
    recipe: dict[str, RecipeValue]
    metrics: dict[str, float | None]
    packs: tuple[PackRecord, ...]
    leaves: tuple[LeafRecord, ...]
    local: tuple[LeafRecord, ...] = ()

    def every_leaf(self) -> tuple[LeafRecord, ...]:
        """The leaves of the state and the local ones: all records that refer to chunks."""
        return (*self.leaves, *self.local) if self.local else self.leaves

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def stored_nbytes(self) -> int:
        """Bytes that its chunks take in its packs, each of them counted once."""
        places = {
            (chunk.pack, chunk.offset): chunk.length
            for leaf in self.every_leaf()
            for chunk in leaf.chunks
        }
        return sum(places.values())


class Marker(Struct, frozen=True):
    """Says that a directory is a run directory, and which reader it needs."""

    format: Natural
    created: str


class PackIndex(Struct, frozen=True, forbid_unknown_fields=True):
    """What a pack holds, in order and without gaps from offset 0: (hash, stored length)."""

    format: Natural
    chunks: tuple[tuple[Hash, Natural], ...]


class EncodedPackIndex(Struct, frozen=True, forbid_unknown_fields=True):
    """The same of a pack with encoded chunks: (hash, stored length, size once decoded)."""

    format: Natural
    chunks: tuple[tuple[Hash, Natural, Natural], ...]


PackedChunk = tuple[str, int, int]
"""Hash, stored length, size: equal to the length for a chunk that is stored as it is."""


class _Header(Struct):
    format: int


def hash_bytes(data: bytes | bytearray | memoryview) -> str:
    """BLAKE3-256 of `data`, 64 lower-case hexadecimal digits."""
    return blake3(data).hexdigest()


def hash_each(parts: Iterable[bytes | bytearray | memoryview]) -> list[str]:
    """`hash_bytes` of many small parts, without a call and a hasher for each."""
    hasher = blake3()
    reset, update, digest = hasher.reset, hasher.update, hasher.hexdigest
    digests = []
    for part in parts:
        reset()
        update(part)
        digests.append(digest())
    return digests


def manifest_name(step: int) -> str:
    """Name of the manifest of `step` inside a run directory."""
    return f"{MANIFESTS}{step:012d}.json"


def step_of(name: str) -> int | None:
    """Step of a manifest's name; None for a name that is not one."""
    match = _MANIFEST_NAME.fullmatch(name)
    return int(match[1]) if match else None


def pack_name(step: int, process: int, nonce: str) -> str:
    """Name of a pack inside `packs/`; `nonce` (8 hex digits) keeps a repeated save apart."""
    return f"{step:012d}-{process:05d}-{nonce}.pack"


def pack_step(name: str) -> int:
    """Step of the save that wrote a pack, from its name; -1 for a name that is not a pack's."""
    match = re.fullmatch(r"([0-9]{12})-[0-9]{5}-[0-9a-f]{8}\.pack", name)
    return int(match[1]) if match else -1


def pin_name(step: int) -> str:
    """Name of the empty object that pins `step`."""
    return f"{PINS}{step:012d}"


def time_text(seconds: float) -> str:
    """`YYYY-MM-DDTHH:MM:SSZ` of seconds since 1970."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def seconds_of(text: str) -> int:
    """Seconds since 1970 of a `time_text`; raises `ValueError` for what is not a date."""
    return int(datetime.fromisoformat(text).timestamp())


def plain_metrics(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Metrics as a manifest holds them: JSON has no NaN and no infinity, so those become null."""
    return {
        name: number if math.isfinite(number := float(value)) else None
        for name, value in metrics.items()
    }


def chunk_spans(nbytes: int) -> list[tuple[int, int]]:
    """(start, stop) of every chunk of a leaf of `nbytes` bytes; none for an empty leaf."""
    return [(at, min(at + CHUNK_BYTES, nbytes)) for at in range(0, nbytes, CHUNK_BYTES)]


def fingerprint(leaves: Iterable[tuple[str, str, Sequence[int], Sequence[str]]]) -> str:
    """Hash of (path, dtype, shape, chunk hashes) over a whole state, in path order."""
    return hash_bytes(msgspec.json.encode(sorted(leaves)))


def fingerprint_of(leaves: Iterable[LeafRecord]) -> str:
    """Fingerprint of manifest records."""
    # Without a call for each leaf: there may be very many.
    return fingerprint(
        [
            (
                leaf.path,
                leaf.dtype,
                leaf.shape,
                [chunk.hash for chunk in leaf.chunks] if leaf.text is None else leaf.hashes(),
            )
            for leaf in leaves
        ]
    )


def encode_manifest(manifest: Manifest) -> bytes:
    """Canonical JSON of a manifest, its own digest first."""
    body = msgspec.json.encode(manifest, order="deterministic") + b"\n"
    return _DIGEST_HEAD + hash_bytes(body).encode() + b'",' + body[1:]


def check_encoded(data: bytes, manifest: Manifest, where: str) -> None:
    """Raise `CorruptionError` unless `data` reads back as `manifest`, by the rules of a reader.

    Its digest and its fingerprint are not computed a second time: both were made from these values.
    Nor are the digits of hashes that equal those of `manifest`.
    """
    body = b"{" + data[_DIGEST_BYTES:]
    try:
        same = msgspec.json.decode(body, type=Manifest) == manifest
    except ValueError:
        same = _manifest(body, where) == manifest  # says what is wrong
    if not same:
        raise CorruptionError(
            f"{where}: it does not read back as it was made; nothing was written."
        )


def decode_manifest(data: bytes, where: str, step: int | None = None) -> Manifest:
    """The manifest in `data`, checked; `where` names the file in errors.

    Raises `CorruptionError` for anything but the exact bytes that were committed,
    `FormatVersionError` for an intact manifest of a newer format.
    """
    body = b"{" + data[_DIGEST_BYTES:]
    found = data[:_DIGEST_BYTES]
    expected = _DIGEST_HEAD + hash_bytes(body).encode() + b'",'
    if found != expected:
        why = (
            "is empty" if not data else f"begins with {found[:24]!r} and does not match its digest"
        )
        raise CorruptionError(
            f"{where}: a manifest of {len(data)} bytes {why}; "
            f"expected {expected[:24]!r}. Run `perdure verify` on the run directory; "
            f"restore an older step meanwhile."
        )
    manifest = _manifest(body, where)
    if step is not None and manifest.step != step:
        raise CorruptionError(
            f"{where}: expected the manifest of step {step}, found {manifest.step}."
        )
    try:
        seconds_of(manifest.created)
    except ValueError:
        raise CorruptionError(f"{where}: created: {manifest.created!r} is not a date.") from None
    if manifest.local and manifest.format < LOCAL_FORMAT:
        raise CorruptionError(
            f"{where}: it has local leaves, which format {manifest.format} does not know."
        )
    packs = len(manifest.packs)
    for leaf in manifest.every_leaf():
        for chunk in leaf.chunks:
            if chunk.pack >= packs:
                raise CorruptionError(
                    f"{where}: leaf {leaf.path!r} names a pack that is not listed."
                )
        if leaf.size is not None:
            _check_lengths(manifest.format, leaf, leaf.size, where)
    actual = fingerprint_of(manifest.leaves)
    if actual != manifest.fingerprint:
        raise CorruptionError(
            f"{where}: expected fingerprint {manifest.fingerprint}, its leaves give {actual}."
        )
    return manifest


def encode_marker(created: str) -> bytes:
    """Contents of `perdure.json`."""
    return msgspec.json.encode(Marker(format=FORMAT, created=created)) + b"\n"


def decode_marker(data: bytes, where: str) -> Marker:
    """The marker in `data`; raises `FormatVersionError` or `CorruptionError`."""
    _check_version(data, where)
    return _decode(data, Marker, where)


def array_record(
    path: str, dtype: str, shape: tuple[int, ...], chunks: Sequence[Chunk], nbytes: int
) -> LeafRecord:
    """The record of an array of `nbytes` bytes."""
    record = LeafRecord(path, dtype, shape, tuple(chunks))
    if record.stored_nbytes == nbytes:
        return record
    return msgspec.structs.replace(record, size=nbytes)


def format_of(leaves: Iterable[LeafRecord], local: Sequence[LeafRecord] = ()) -> int:
    """The format of a manifest with these leaves: the lowest that can express it."""
    if local:
        return LOCAL_FORMAT
    return FORMAT if all(leaf.size is None for leaf in leaves) else CODEC_FORMAT


def encode_pack_tail(
    chunks: Sequence[tuple[str, int]], sizes: Mapping[str, int] | None = None
) -> bytes:
    """Index and trailer that follow the chunks [(hash, stored length)] of a pack.

    `sizes` has the size of each encoded chunk by its hash.
    """
    if not sizes:
        index = msgspec.json.encode(PackIndex(format=FORMAT, chunks=tuple(chunks)))
    else:
        rows = tuple((digest, length, sizes.get(digest, length)) for digest, length in chunks)
        index = msgspec.json.encode(EncodedPackIndex(format=CODEC_FORMAT, chunks=rows))
    return index + len(index).to_bytes(8, "little") + blake3(index).digest() + PACK_MAGIC


def index_span(trailer: bytes, size: int, where: str) -> tuple[int, int]:
    """(offset, length) of the index of a pack of `size` bytes, from its last TRAILER_BYTES."""
    length = int.from_bytes(trailer[:8], "little")
    if len(trailer) < TRAILER_BYTES or trailer[40:] != PACK_MAGIC or length > size - TRAILER_BYTES:
        raise CorruptionError(
            f"{where}: a pack of {size} bytes does not end in a pack trailer; it is cut short or "
            f"was changed. The checkpoints that need it cannot be restored."
        )
    return size - TRAILER_BYTES - length, length


def decode_pack_index(
    index: bytes, trailer: bytes, start: int, where: str
) -> tuple[PackedChunk, ...]:
    """What a pack holds whose chunks end at byte `start`, checked against its trailer.

    Raises `CorruptionError`, and `FormatVersionError` for a pack of a newer format.
    """
    if blake3(index).digest() != trailer[8:40]:
        raise CorruptionError(f"{where}: the index of the pack does not match its hash.")
    chunks: tuple[PackedChunk, ...]
    if _check_version(index, where, CODEC_FORMAT) == FORMAT:
        pairs = _decode(index, PackIndex, where).chunks
        chunks = tuple((digest, length, length) for digest, length in pairs)
    else:
        chunks = _decode(index, EncodedPackIndex, where).chunks
        for digest, length, size in chunks:
            if not length <= size <= CHUNK_BYTES:
                raise CorruptionError(
                    f"{where}: the index gives {length} bytes to chunk {digest} of {size} bytes."
                )
    _check_hashes([digest for digest, _, _ in chunks], where)
    held = sum(length for _, length, _ in chunks)
    if held != start:
        raise CorruptionError(
            f"{where}: the index describes {held} bytes of chunks, the pack holds {start}."
        )
    return chunks


def _manifest(body: bytes, where: str) -> Manifest:
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
    except ValueError:  # also what a newer format looks like, which has to be said as such
        _check_version(body, where)
        manifest = _decode(body, Manifest, where)
    if manifest.format > LOCAL_FORMAT:
        _check_version(body, where)
    hashes = [chunk.hash for leaf in manifest.every_leaf() for chunk in leaf.chunks]
    _check_hashes([manifest.fingerprint, *hashes], where)
    return manifest


def _check_hashes(hashes: Iterable[str], where: str) -> None:
    """Raise unless all of them, of the right length already, are lower-case hexadecimal."""
    if found := "".join(hashes).encode(errors="replace").translate(None, b"0123456789abcdef"):
        raise CorruptionError(f"{where}: expected hexadecimal hashes, found {found[:9]!r} in them.")


def _check_lengths(version: int, leaf: LeafRecord, size: int, where: str) -> None:
    """Raise unless the stored lengths of a leaf with encoded chunks are what its size allows."""
    lengths = [chunk.length for chunk in leaf.chunks]
    # Counted first: the spans of a size that is not true could take all memory.
    sizes = leaf.sizes() if -(-size // CHUNK_BYTES) == len(lengths) else []
    fits = sizes != lengths and all(map(int.__le__, lengths, sizes))
    if not (sizes and fits) or leaf.text is not None or version < CODEC_FORMAT:
        raise CorruptionError(
            f"{where}: leaf {leaf.path!r} of {size} bytes cannot lie in {len(lengths)} chunks of "
            f"together {sum(lengths)} bytes in format {version}."
        )


def _check_version(data: bytes, where: str, newest: int = LOCAL_FORMAT) -> int:
    version = _decode(data, _Header, where).format
    if version > newest:
        raise FormatVersionError(
            f"{where}: written in format {version}; this perdure reads up to format {newest}. "
            f"Nothing was changed. Install a newer perdure to use it."
        )
    return version


def _decode(data: bytes, kind: type[T], where: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except ValueError as error:  # msgspec's own errors, and UnicodeDecodeError
        raise CorruptionError(
            f"{where}: not a valid {kind.__name__.strip('_').lower()}: {error}"
        ) from None
