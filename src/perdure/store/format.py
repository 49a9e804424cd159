"""The bytes of a run directory: names, manifests, pack indexes, fingerprints (docs/FORMAT.md).

Pure functions of their inputs, no input or output. Whatever `decode_*` returns has been checked
against its own hash and against its schema; everything else raises `CorruptionError` or
`FormatVersionError`. Nothing here imports numpy, so that listing a run stays quick.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import chain
from operator import itemgetter
from typing import Annotated, Literal, TypeVar

import msgspec
from blake3 import blake3
from msgspec import Meta, Struct

from perdure.errors import CorruptionError, FormatVersionError

FORMAT = 1
CODEC_FORMAT = 2
"""Of manifests and packs with encoded chunks; all others stay as every reader knows them."""
STRUCTURE_FORMAT = 3
"""Of manifests with `containers` or `local` leaves. The newest format of all."""

CHUNK_BYTES = 4 * 1024 * 1024
SCALAR_PREFIX = "py:"
WEAK_PREFIX = "weak:"
"""Before the dtype of a weakly typed JAX array, which gives way to the other type in arithmetic."""

MARKER = "perdure.json"
LOCK = "lock"
MANIFESTS = "checkpoints/"
PACKS = "packs/"
QUARANTINE = "quarantine/"
PINS = "pins/"
TEMP_SUFFIX = ".tmp"
MAX_STEP = 10**12 - 1
MAX_MANIFEST_BYTES = 1024 * 1024 * 1024
MAX_DIMENSIONS = 64

PACK_MAGIC = b"perdure-pack-1\n\0"
TRAILER_BYTES = len(PACK_MAGIC) + 8 + 32
_DIGEST_HEAD = b'{"digest":"'
_DIGEST_BYTES = len(_DIGEST_HEAD) + 64 + len('",')

HEAD_BYTES = _DIGEST_BYTES
"""The first bytes of a manifest, which hold its digest: equal heads are equal manifests."""
_DTYPE = re.compile(
    r"(?<![a-z0-9])(?:bool|(?:u?int|b?float|complex)([0-9]{1,3})(?:_[a-z0-9]+)*)(?![a-z0-9])"
)
_KEY_WORD_BYTES = 4
_SCALAR_TEXT = {
    "py:int": re.compile(r"-?[0-9]+"),
    "py:float": re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|inf|nan)", re.ASCII),
    "py:complex": re.compile(r"[-+0-9.eijnaf()]+"),
    "py:bool": re.compile(r"true|false"),
    "py:bytes": re.compile(r"(?:[0-9a-f]{2})*"),
    "py:none": re.compile(r""),
}
"""The text of each kind of scalar that is not free; `py:str` and kinds of a later writer are."""

_MANIFEST_NAME = re.compile(re.escape(MANIFESTS) + r"([0-9]{12})\.json")

Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
# A pattern of its own for every chunk would take longer than all the rest of reading a manifest, so
# `_check_hashes` looks at all of them at once.
Hash = Annotated[str, Meta(min_length=64, max_length=64)]
Time = Annotated[str, Meta(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z\Z")]
PackName = Annotated[str, Meta(pattern=r"^[0-9]{12}-[0-9]{5}-[0-9a-f]{8}\.pack\Z")]
Arrays = Annotated[
    str,
    Meta(
        pattern=r"^(numpy(\.generic|\.swapped)?|jax|torch(\.requires_grad|\.Parameter(\.frozen)?)?(@[a-z]+)?)\Z"
    ),
]
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


class Container(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """What the state of an object has at one path, so that the value can be built without the object.

    `keys` has the keys of a mapping in their order; a mapping without it has the keys of its paths,
    as strings in code point order. `arrays` is the class of the arrays here and below. `type` names a
    class whose values only a live object of that class can rebuild.
    """

    kind: Literal[
        "dict",
        "OrderedDict",
        "defaultdict",
        "Counter",
        "list",
        "tuple",
        "deque",
        "set",
        "frozenset",
        "torch.Size",
        "array",
        "object",
    ]
    keys: tuple[str | int, ...] | None = None
    arrays: Arrays | None = None
    factory: Literal["bool", "dict", "float", "int", "list", "set", "str", "tuple"] | None = None
    maxlen: Natural | None = None
    type: str | None = None


MAPPINGS = frozenset({"dict", "OrderedDict", "defaultdict", "Counter"})
"""The kinds of containers that have keys. Others have numbered elements, or are no containers."""


class Manifest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one checkpoint is made of. Its file is the commit.

    `containers` describes the states of objects with `load_state_dict`, by path. It is covered by the
    digest and not by the fingerprint. `local` are leaves that belong to one process and not to the
    state, such as its random generators. They are no part of the fingerprint; in all else they are
    leaves like the others.
    """

    format: Natural
    step: Natural
    created: Time
    fingerprint: Hash
    recipe: dict[str, RecipeValue]
    metrics: dict[str, float | None]
    packs: tuple[PackRecord, ...]
    leaves: tuple[LeafRecord, ...]
    containers: dict[str, Container] = msgspec.field(default_factory=dict)
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
    if len(data) > MAX_MANIFEST_BYTES:
        raise CorruptionError(
            f"{where}: a manifest has at most {MAX_MANIFEST_BYTES} bytes, found {len(data)}."
        )
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
    if manifest.step > MAX_STEP:
        raise CorruptionError(f"{where}: expected a step up to {MAX_STEP}, found {manifest.step}.")
    if manifest.containers:
        _check_containers(manifest, where)
    if manifest.local:
        if manifest.format < STRUCTURE_FORMAT:
            raise CorruptionError(
                f"{where}: it has local leaves, which format {manifest.format} does not know."
            )
        checked_fingerprint(manifest.format, manifest.packs, manifest.local, where)
    actual = checked_fingerprint(manifest.format, manifest.packs, manifest.leaves, where)
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


def format_of(
    leaves: Iterable[LeafRecord],
    containers: Mapping[str, Container] | None = None,
    local: Sequence[LeafRecord] = (),
) -> int:
    """The format of a manifest with these leaves and fields: the lowest that can express it."""
    if containers or local:
        return STRUCTURE_FORMAT
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
    if max((length for _, length, _ in chunks), default=0) > CHUNK_BYTES:
        raise CorruptionError(f"{where}: the index has a chunk of more than {CHUNK_BYTES} bytes.")
    if held != start:
        raise CorruptionError(
            f"{where}: the index describes {held} bytes of chunks, the pack holds {start}."
        )
    return chunks


def _manifest(body: bytes, where: str) -> Manifest:
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
    except (ValueError, RecursionError):  # a newer format looks like this too
        _check_version(body, where, STRUCTURE_FORMAT)
        manifest = _decode(body, Manifest, where)
    if manifest.format > STRUCTURE_FORMAT:
        _check_version(body, where, STRUCTURE_FORMAT)
    return manifest


def _check_hashes(hashes: Iterable[str], where: str) -> None:
    """Raise unless all of them, of the right length already, are lower-case hexadecimal."""
    if found := "".join(hashes).encode(errors="replace").translate(None, b"0123456789abcdef"):
        raise CorruptionError(f"{where}: expected hexadecimal hashes, found {found[:9]!r} in them.")


def checked_fingerprint(
    version: int, packs: Sequence[PackRecord], leaves: Sequence[LeafRecord], where: str
) -> str:
    """The fingerprint of a manifest, once its packs, paths, shapes and places fit together.

    A digest shows only that a file is as its writer left it. After this check the sizes in it can be
    trusted: no leaf needs other memory than its shape says, no path hides another one, and no chunk
    lies outside of its pack. Raises `CorruptionError` otherwise.
    """
    if len({pack.name for pack in packs}) < len(packs):
        raise CorruptionError(f"{where}: a pack is listed twice.")
    rows = []
    paths = []
    # A model has many leaves and few shapes: each distinct combination is checked once.
    shapes: dict[tuple[str, tuple[int, ...], int], str] = {}
    # The chunk that ends last in a pack stands for all others there.
    ends = [0] * len(packs)
    path = ""
    try:
        for leaf in leaves:
            path, dtype, shape, chunks = leaf.path, leaf.dtype, leaf.shape, leaf.chunks
            paths.append(path)
            if len(chunks) == 1 and leaf.size is None and leaf.text is None:
                chunk = chunks[0]
                length, pack = chunk.length, chunk.pack
                end = chunk.offset + length
                shapes[dtype, shape, length] = path
                if end > ends[pack]:
                    ends[pack] = end
                rows.append((path, dtype, shape, [chunk.hash]))
                continue
            _check_leaf(version, leaf, where)
            for chunk in chunks:
                ends[chunk.pack] = max(ends[chunk.pack], chunk.offset + chunk.length)
            rows.append((path, dtype, shape, leaf.hashes()))
    except IndexError:
        raise CorruptionError(f"{where}: leaf {path!r} names a pack that is not listed.") from None
    for (dtype, shape, length), path in shapes.items():
        if not 0 < length <= CHUNK_BYTES or not _holds(dtype, shape, length):
            raise CorruptionError(
                f"{where}: leaf {path!r}: {dtype}{list(shape)} does not fit into one chunk of "
                f"{length} bytes."
            )
    for record, end in zip(packs, ends, strict=True):
        if end > record.size:
            raise CorruptionError(
                f"{where}: a chunk ends at byte {end} of {record.name}, which has {record.size} bytes."
            )
    _check_paths(paths, where)
    _check_hashes(chain.from_iterable(map(itemgetter(3), rows)), where)
    return hash_bytes(msgspec.json.encode(rows))


def _check_paths(paths: list[str], where: str) -> None:
    """Raise unless the paths are sorted, and each of them is a place of its own in a tree."""
    if sorted(paths) != paths:
        raise CorruptionError(f"{where}: the leaves are not sorted by path.")
    # With a slash at its end, a path comes directly before all paths below it.
    closed = sorted([f"{path}/" for path in paths])
    if any(map(str.startswith, closed[1:], closed)):
        at = next(at for at, path in enumerate(closed[1:]) if path.startswith(closed[at]))
        raise CorruptionError(
            f"{where}: {closed[at][:-1]!r} is the path of a leaf, and {closed[at + 1][:-1]!r}, of "
            f"another leaf, is the same or lies below it."
        )
    joined = "".join(closed[1:] if paths[:1] == [""] else closed)
    if joined.startswith("/") or "//" in joined:
        raise CorruptionError(f"{where}: the path of a leaf has a part without a name.")


def _check_leaf(version: int, leaf: LeafRecord, where: str) -> None:
    """Raise unless one leaf is a scalar whose text can be read, or an array cut by the rules."""
    if leaf.text is not None or leaf.dtype.startswith(SCALAR_PREFIX):
        form = _SCALAR_TEXT.get(leaf.dtype)
        text = leaf.text
        if leaf.shape or leaf.chunks or leaf.size is not None or text is None:
            wrong = "is a scalar, and has a shape or chunks, or no text"
        elif not leaf.dtype.startswith(SCALAR_PREFIX):
            wrong = f"has the text of a scalar and the dtype {leaf.dtype!r}"
        elif form is not None and not form.fullmatch(text):
            wrong = f"has a text that is no {leaf.dtype}: {text[:40]!r}"
        else:
            return
        raise CorruptionError(f"{where}: leaf {leaf.path!r} {wrong}.")
    lengths = [chunk.length for chunk in leaf.chunks]
    size = sum(lengths) if leaf.size is None else leaf.size
    # Counted first: the spans of a size that is not true could take all memory.
    fits = -(-size // CHUNK_BYTES) == len(lengths)
    if fits:
        sizes = [stop - start for start, stop in chunk_spans(size)]
        if leaf.size is None:
            fits = lengths == sizes
        else:
            fits = (
                version >= CODEC_FORMAT
                and lengths != sizes
                and all(0 < length <= most for length, most in zip(lengths, sizes, strict=True))
            )
    if not (fits and _holds(leaf.dtype, leaf.shape, size)):
        raise CorruptionError(
            f"{where}: leaf {leaf.path!r}: {leaf.dtype}{list(leaf.shape)} of {size} bytes cannot lie "
            f"in {len(lengths)} chunks of together {sum(lengths)} bytes in format {version}."
        )


def _holds(dtype: str, shape: tuple[int, ...], nbytes: int) -> bool:
    """Whether an array of this dtype and shape takes so many bytes."""
    if len(shape) > MAX_DIMENSIONS:
        return False
    count = math.prod(shape)
    if dtype.startswith("key<"):
        # How many words a key has is up to its implementation.
        row = count * _KEY_WORD_BYTES
        return nbytes % row == 0 and nbytes > 0 if row else not nbytes
    item = item_bytes(dtype)
    return item is not None and count * item == nbytes


def item_bytes(dtype: str) -> int | None:
    """Bytes of one element of a dtype by its name; None for a name that says no width.

    An element narrower than a byte takes one (docs/FORMAT.md).
    """
    match = _DTYPE.search(dtype)
    if match is None:
        return None
    return max(1, int(match[1]) // 8) if match[1] else 1


def _check_containers(manifest: Manifest, where: str) -> None:
    """Raise unless the containers and the leaves are one tree."""
    leaves = {leaf.path for leaf in manifest.leaves}
    children = children_of([*leaves, *manifest.containers])
    wrong = [
        f"{path!r} ({container.kind})"
        for path, container in manifest.containers.items()
        if not _is_sound(container, path in leaves, children.get(path, ()))
    ]
    if wrong or manifest.format < STRUCTURE_FORMAT:
        raise CorruptionError(
            f"{where}: format {manifest.format}: the containers do not fit the leaves: "
            f"{', '.join(wrong[:5]) or 'expected none in this format'}."
        )


def _is_sound(container: Container, is_leaf: bool, below: Collection[str]) -> bool:
    """Whether a container can have these children, given as the last parts of their paths."""
    kind, keys = container.kind, container.keys
    if kind in ("array", "object"):
        named = container.arrays if kind == "array" else container.type
        extras = (keys, container.factory, container.maxlen)
        return named is not None and extras == (None,) * 3 and (is_leaf or kind == "object")
    if (
        is_leaf
        or (keys is not None and kind not in MAPPINGS)
        or (container.factory is not None and kind != "defaultdict")
        or (container.maxlen is not None and kind != "deque")
    ):
        return False
    if keys is not None:
        return len(keys) == len(below) and {escape(str(key)) for key in keys} == set(below)
    return kind in MAPPINGS or set(map(str, range(len(below)))) == set(below)


def children_of(paths: Iterable[str]) -> dict[str, list[str]]:
    """The last parts of the paths below each path, in the order in which they are met first."""
    children: dict[str, dict[str, None]] = {}
    for path in paths:
        while path:
            parent, _, last = path.rpartition("/")
            known = children.setdefault(parent, {})
            if last in known:
                break
            known[last] = None
            path = parent
    return {path: list(parts) for path, parts in children.items()}


def escape(key: str) -> str:
    """A key as a part of a path."""
    return key.replace("%", "%25").replace("/", "%2F")


def unescape(part: str) -> str:
    """The inverse of `escape`."""
    return part.replace("%2F", "/").replace("%25", "%")


def _check_version(data: bytes, where: str, newest: int = CODEC_FORMAT) -> int:
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
    # msgspec's own errors, UnicodeDecodeError, and values nested deeper than Python's stack
    except (ValueError, RecursionError) as error:
        raise CorruptionError(
            f"{where}: not a valid {kind.__name__.strip('_').lower()}: {error}"
        ) from None
