"""The bytes of a manifest: canonical JSON that begins with its digest, and whose parts fit together.

Invariant: a manifest that `decode_manifest` returns has the bytes that were committed, and its packs,
paths, shapes, chunks and containers fit together.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from itertools import compress, pairwise
from operator import itemgetter

import msgspec

from perdure.errors import CorruptionError
from perdure.store.format import (
    CHUNK_BYTES,
    FORMAT,
    PLACEHOLDER,
    SCALAR_PREFIX,
    blocks,
    check_hashes,
    check_version,
    children_of,
    chunk_spans,
    decode_json,
    escape,
    hash_bytes,
    hash_parts,
    json_parts,
    seconds_of,
)
from perdure.store.gc_pause import gc_paused
from perdure.store.manifest import (
    MAPPINGS,
    Container,
    LeafEntry,
    Manifest,
    ManifestHead,
    ManifestSummary,
    PackEntry,
)
from perdure.text import few

MAX_MANIFEST_BYTES = 1024 * 1024 * 1024
_DIGEST_HEAD = b'{"digest":"'
HEAD_BYTES = len(_DIGEST_HEAD) + 64 + len('",')
"""The first bytes of a manifest, which hold its digest: equal heads are equal manifests."""

_decoder = msgspec.json.Decoder(Manifest)
_head_decoder = msgspec.json.Decoder(ManifestHead)
_encoder = msgspec.json.Encoder(order="deterministic")
_leaves_decoder = msgspec.json.Decoder(list[LeafEntry])

LEAF_TEXT_BYTES = 128
"""About what the entry of a leaf takes."""

UNTIL_VERIFIED = " Run `perdure verify` on the run directory; restore an older step meanwhile."
"""The advice that ends the error of a damaged manifest. A check of the run leaves it out."""


def encode_manifest(manifest: Manifest) -> bytes:
    """The canonical JSON of a manifest, which begins with its digest."""
    return b"".join(_encode(manifest, map(_encoder.encode, blocks(manifest.leaves))))


def encode_checked(manifest: Manifest, where: str) -> list[bytes | memoryview]:
    """`encode_manifest` in parts, or `CorruptionError` if it does not read back as `manifest`.

    The digests are not checked again, because they were made from these values.
    """
    if manifest.containers:  # a reader would take it for damaged
        check_containers(manifest, where)

    def checked(leaves: list[LeafEntry]) -> bytes:
        text = _encoder.encode(leaves)
        try:
            same = _leaves_decoder.decode(text) == leaves
        except ValueError:
            same = decode_json(text, list[LeafEntry], where) == leaves  # names the cause
        if not same:
            raise _unequal(where)
        return text

    rest = msgspec.structs.replace(manifest, leaves=())
    if _manifest(memoryview(_encoder.encode(rest)), where) != rest:
        raise _unequal(where)
    return _encode(manifest, map(checked, blocks(manifest.leaves)))


def _encode(manifest: Manifest, leaves: Iterable[bytes]) -> list[bytes | memoryview]:
    frame = _encoder.encode(msgspec.structs.replace(manifest, leaves=PLACEHOLDER))
    parts = list(json_parts(leaves, frame))
    parts.append(b"\n")
    digest = hash_parts(parts)
    # A comma takes the place of the brace of the body.
    parts[0] = b"".join([_DIGEST_HEAD, digest.encode(), b'",', parts[0][1:]])
    return parts


def _unequal(where: str) -> CorruptionError:
    return CorruptionError(
        f"{where}: decoding it gives other values than were encoded; nothing was written."
    )


def decode_manifest(data: bytes, where: str, step: int | None = None) -> Manifest:
    """Decode and check a manifest that must have this `step`; any by default.

    Raises CorruptionError if these are not the bytes that were committed, FormatVersionError for a
    newer format.
    """
    body = _intact_body(data, where)
    with gc_paused(len(data) // LEAF_TEXT_BYTES):
        return _checked(_manifest(body, where), where, step)


def decode_head(data: bytes, where: str, step: int | None) -> ManifestHead | Manifest:
    """Check that a manifest is as it was written, and decode it without its leaves, which takes a
    tenth of the time. Raises as `decode_manifest`."""
    body = _intact_body(data, where)
    with suppress(ValueError, RecursionError):
        head = _head_decoder.decode(body)
        seconds_of(head.created)
        if (head.format, head.step) == (FORMAT, step):
            return head
    return decode_manifest(data, where, step)  # names what is wrong


def summarize(manifest: ManifestHead | Manifest, data: bytes) -> ManifestSummary:
    """The summary of a manifest; `data` are the first bytes of its file."""
    head = data[:HEAD_BYTES].decode()
    packs = {pack.name: pack.size for pack in manifest.packs}
    return ManifestSummary(head, manifest.created, manifest.metrics, packs)


def _intact_body(data: bytes, where: str) -> memoryview:
    """The JSON of a manifest without its digest, if it has that; `CorruptionError` otherwise."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise CorruptionError(
            f"{where}: a manifest has at most {MAX_MANIFEST_BYTES} bytes, found {len(data)}."
        )
    copy = bytearray(data)
    copy[HEAD_BYTES - 1 : HEAD_BYTES] = b"{"  # in the place of a comma
    body = memoryview(copy)[HEAD_BYTES - 1 :]
    actual = hash_bytes(body)
    if data[:HEAD_BYTES] != _DIGEST_HEAD + actual.encode() + b'",':
        raise CorruptionError(f"{where}: {_damage(data, actual)}.{UNTIL_VERIFIED}")
    return body


def _damage(data: bytes, actual: str) -> str:
    """What is wrong with a manifest whose body has the hash `actual`."""
    if not data:
        return "expected a manifest, found an empty file"
    recorded = data[len(_DIGEST_HEAD) : HEAD_BYTES - 2].decode(errors="replace")
    if not data.startswith(_DIGEST_HEAD) or set(recorded) - set("0123456789abcdef"):
        return f"expected a manifest, which begins with its hash, found {len(data)} other bytes"
    shown = 16 if recorded[:16] != actual[:16] else len(actual)
    return (
        f"a manifest of {len(data)} bytes: expected hash {recorded[:shown]}, found {actual[:shown]}"
    )


def _checked(manifest: Manifest, where: str, step: int | None) -> Manifest:
    """The manifest, if its parts fit together."""
    if step is not None and manifest.step != step:
        raise CorruptionError(
            f"{where}: expected the manifest of step {step}, found {manifest.step}."
        )
    try:
        seconds_of(manifest.created)
    except ValueError:
        raise CorruptionError(f"{where}: created: {manifest.created!r} is not a date.") from None
    if manifest.containers:
        check_containers(manifest, where)
    if manifest.process_leaves:
        checked_fingerprint(manifest.packs, manifest.process_leaves, where)
    actual = checked_fingerprint(manifest.packs, manifest.leaves, where)
    if actual != manifest.fingerprint:
        raise CorruptionError(
            f"{where}: expected fingerprint {manifest.fingerprint[:16]}, its leaves "
            f"give {actual[:16]}."
        )
    return manifest


def _manifest(body: memoryview, where: str) -> Manifest:
    try:
        manifest = _decoder.decode(body)
    except (ValueError, RecursionError):  # a newer format looks like this too
        check_version(body, where)
        manifest = decode_json(body, Manifest, where)
    if manifest.format > FORMAT:
        check_version(body, where)
    return manifest


# ------------------------------------------------------------ the parts fit together

MAX_DIMENSIONS = 64

_Row = tuple[str, str, tuple[int, ...], Sequence[str]]
"""What the fingerprint covers of a leaf: path, dtype, shape and hashes."""

_DTYPE = re.compile(
    r"(?:weak:)?(?:bool|u?int(1|2|4|8|16|32|64)|b?float(16|32|64)|float([468])_[a-z0-9]+"
    r"|complex(32|64|128))"
)
"""The dtypes whose width is known by their name."""
_DTYPE_NAME = re.compile(r"[a-z][a-z0-9_.:<>\[\]]*")
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


def checked_fingerprint(packs: Sequence[PackEntry], leaves: Sequence[LeafEntry], where: str) -> str:
    """The fingerprint of a manifest whose parts fit together, or `CorruptionError`.

    A digest only shows that a file is as its writer left it. After this check its sizes can be
    trusted: no leaf needs more memory than its shape says, no path hides another one, and no chunk
    lies outside its pack.
    """
    if len({pack.name for pack in packs}) < len(packs):
        raise CorruptionError(f"{where}: a pack is listed twice.")
    check = _LeafCheck(len(packs), where)
    rows = map(check.rows, blocks(leaves))
    digest = hash_parts(json_parts(map(msgspec.json.encode, rows)))
    for (dtype, shape, length), path in check.shapes.items():
        if not 0 < length <= CHUNK_BYTES or not holds(dtype, shape, length):
            raise CorruptionError(
                f"{where}: leaf {path!r}: {dtype}{list(shape)} does not fit into one chunk of "
                f"{length} bytes."
            )
    for entry, end in zip(packs, check.ends, strict=True):
        if end > entry.size:
            raise CorruptionError(
                f"{where}: a chunk ends at byte {end} of {entry.name}, which has {entry.size} bytes."
            )
    _check_paths(check.paths, where)
    return digest


class _LeafCheck:
    """What is checked about all leaves together, collected while each is checked by itself."""

    def __init__(self, packs: int, where: str) -> None:
        self.paths: list[str] = []
        self.shapes: dict[tuple[str, tuple[int, ...], int], str] = {}
        self.ends = [0] * packs
        self._where = where

    def rows(self, leaves: Sequence[LeafEntry]) -> list[_Row]:
        """What the fingerprint covers of these leaves; raises `CorruptionError`."""
        rows: list[_Row] = []
        hashes: list[str] = []
        shapes, ends = self.shapes, self.ends
        path = ""
        last_dtype, last_shape, last_length = "", (), -1
        try:
            for leaf in leaves:
                path, dtype, shape, chunks = leaf.path, leaf.dtype, leaf.shape, leaf.chunks
                if len(chunks) == 1 and leaf.size is None and leaf.text is None:
                    chunk = chunks[0]
                    digest, length, pack = chunk.hash, chunk.length, chunk.pack
                    end = chunk.offset + length
                    if length != last_length or dtype != last_dtype or shape != last_shape:
                        shapes[dtype, shape, length] = path
                        last_dtype, last_shape, last_length = dtype, shape, length
                    if end > ends[pack]:
                        ends[pack] = end
                    hashes.append(digest)
                    rows.append((path, dtype, shape, (digest,)))
                    continue
                _check_leaf(leaf, self._where)
                for chunk in chunks:
                    ends[chunk.pack] = max(ends[chunk.pack], chunk.offset + chunk.length)
                rows.append((path, dtype, shape, leaf.hashes()))
                hashes += rows[-1][3]
        except IndexError:
            raise CorruptionError(
                f"{self._where}: leaf {path!r} names a pack that is not listed."
            ) from None
        check_hashes(hashes, self._where)
        self.paths += map(itemgetter(0), rows)
        return rows


def _check_paths(paths: list[str], where: str) -> None:
    """Raise unless the paths are sorted and lead to different leaves of a tree."""
    if sorted(paths) != paths:
        raise CorruptionError(f"{where}: the leaves are not sorted by path.")
    # All paths that begin with one follow it directly: the next one shows whether there are any.
    for upper, lower in compress(pairwise(paths), map(str.startswith, paths[1:], paths)):
        below = f"{upper}/"
        if upper != lower < below:  # such as "a-b", which is between "a" and "a/b"
            index = bisect_left(paths, below)
            lower = paths[index] if index < len(paths) else ""
        if lower == upper or lower.startswith(below):
            raise CorruptionError(
                f"{where}: {upper!r} is the path of a leaf, and {lower!r}, of another leaf, is "
                f"the same or lies below it."
            )
    named = paths[1:] if paths[:1] == [""] else paths
    if named and "//" in f"/{'/'.join(named)}/":
        raise CorruptionError(f"{where}: the path of a leaf has a part without a name.")


def _check_leaf(leaf: LeafEntry, where: str) -> None:
    """Raise unless a leaf is a scalar with a valid text, or an array cut into chunks by the rules."""
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
    # The count comes first, because the spans of a wrong size could take all memory.
    fits = -(-size // CHUNK_BYTES) == len(lengths)
    if fits:
        sizes = [stop - start for start, stop in chunk_spans(size)]
        if leaf.size is None:
            fits = lengths == sizes
        else:
            fits = lengths != sizes and all(
                0 < length <= most for length, most in zip(lengths, sizes, strict=True)
            )
    if not (fits and holds(leaf.dtype, leaf.shape, size)):
        raise CorruptionError(
            f"{where}: leaf {leaf.path!r}: {leaf.dtype}{list(leaf.shape)} of {size} bytes cannot lie "
            f"in {len(lengths)} chunks of together {sum(lengths)} bytes."
        )


def holds(dtype: str, shape: tuple[int, ...], nbytes: int) -> bool:
    """Whether an array of this dtype and shape takes this number of bytes."""
    if len(shape) > MAX_DIMENSIONS:
        return False
    count = math.prod(shape)
    if dtype.startswith("key<"):
        # The implementation of a key decides how many words it has.
        row = count * _KEY_WORD_BYTES
        return nbytes % row == 0 and nbytes > 0 if row else not nbytes
    item = item_bytes(dtype)
    if item is not None:
        return count * item == nbytes
    # Of a later writer: its elements have some number of whole bytes.
    if not _DTYPE_NAME.fullmatch(dtype):
        return False
    return nbytes % count == 0 and nbytes > 0 if count else not nbytes


def item_bytes(dtype: str) -> int | None:
    """Bytes of one element of a dtype by its name, at least 1; None for a dtype not known here."""
    match = _DTYPE.fullmatch(dtype)
    if match is None:
        return None
    return max(1, int(next(filter(None, match.groups()), 8)) // 8)


def check_containers(manifest: Manifest, where: str) -> None:
    """Raise unless the containers and the leaves make up one tree."""
    leaves = {leaf.path for leaf in manifest.leaves}
    children = children_of([*leaves, *manifest.containers])
    wrong = [
        f"{path!r} ({container.kind})"
        for path, container in manifest.containers.items()
        if not _is_sound(container, path in leaves, children.get(path, ()))
    ]
    if wrong:
        raise CorruptionError(f"{where}: the containers do not fit the leaves: {few(wrong)}.")


def _is_sound(container: Container, is_leaf: bool, below: Collection[str]) -> bool:
    """Whether a container can have these children, given as the last parts of their paths."""
    kind, keys = container.kind, container.keys
    if kind == "array":
        return is_leaf and (keys, container.factory, container.maxlen) == (None,) * 3
    if kind == "object":
        named = container.type is not None and (container.factory, container.maxlen) == (None,) * 2
        # An attribute with an empty container or a logger has no leaf.
        return named and (keys is None or {escape(str(key)) for key in keys} >= set(below))
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
