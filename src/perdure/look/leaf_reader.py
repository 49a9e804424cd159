"""The leaves of a checkpoint: selected by patterns, and read as NumPy arrays a chunk at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from perdure.checkpoint.address import StoredCheckpoint, with_advice
from perdure.errors import ArgumentError, CorruptionError, UnsupportedLeafError
from perdure.store.format import CHUNK_BYTES, SCALAR_PREFIX
from perdure.store.leaf import Leaf, numpy_dtype
from perdure.store.loading import stream_chunks
from perdure.store.manifest import LeafEntry, Manifest
from perdure.store.selection import Selection, held_instead
from perdure.text import printable

if TYPE_CHECKING:
    import numpy as np

KEY_PREFIX = "key<"  # of the dtype of typed random keys, whose elements are `uint32` words
ORIGIN = "origin"  # the process leaf with the note on what a checkpoint was made from, in JSON
ChunksOf = Callable[[LeafEntry], Iterator[memoryview]]  # the verified bytes in parts of 4 MiB


class Elements(NamedTuple):
    """Elements of an array leaf that follow each other from number `start`, row-major."""

    entry: LeafEntry
    start: int
    values: np.ndarray[Any, Any]


def select_leaves(
    checkpoint: StoredCheckpoint, leaves: str | Iterable[str] | None = None
) -> list[LeafEntry]:
    """The leaves of the state that patterns select, sorted by path; all of them without a pattern.

    Args:
        checkpoint: The checkpoint.
        leaves: A path or pattern, or several, as for `restore(leaves=...)`: `model`, `*/bias`,
            `model/**/kernel`.

    Raises:
        ArgumentError: A pattern selects nothing.
    """
    entries = checkpoint.manifest.leaves
    if leaves is None:
        return list(entries)
    selection = Selection(leaves)
    paths = [entry.path for entry in entries]
    refuse_unused(selection, paths, checkpoint.name)
    return [entry for entry in entries if selection.matches(entry.path)]


def refuse_unused(selection: Selection, paths: Iterable[str], where: str) -> None:
    paths = list(paths)
    if unused := selection.unused(paths):
        raise ArgumentError(
            f"{where}: no leaf matches {', '.join(map(repr, unused))}; `perdure show --tree` lists "
            f"all. It has {held_instead(paths, unused)}"
        )


def is_scalar(entry: LeafEntry) -> bool:
    return entry.text is not None


def is_floating(entry: LeafEntry) -> bool:
    """Whether it is an array of floating-point or complex numbers, of a dtype that NumPy has."""
    from perdure.look.numerics import is_inexact

    try:
        return not is_scalar(entry) and is_inexact(element_dtype(entry))
    except UnsupportedLeafError:
        return False


def scalar_value(entry: LeafEntry) -> Any:
    """The value of a scalar leaf: bool, int, float, complex, str, bytes or None.

    Raises `UnsupportedLeafError` if the leaf is an array, or this perdure does not know its type.
    """
    from perdure.state.leaf_values import plain_value  # takes long to import

    if entry.text is None:
        raise UnsupportedLeafError(
            f"leaf {entry.path!r}: expected a scalar, found an array of dtype {entry.dtype!r}. Read it "
            f"with `read_array`."
        )
    try:
        return plain_value(Leaf(entry.dtype, (), memoryview(entry.text.encode())))
    except KeyError:
        raise _unknown(entry) from None


def value_text(dtype: str, shape: tuple[int, ...] | None, text: str | None, most: int) -> str:
    """`float32[3,4]`, or `int 7` for a scalar, whose text is cut after `most` characters."""
    if text is not None:
        return f"{dtype.removeprefix(SCALAR_PREFIX)} {printable(text, most)}"
    return f"{dtype}[{','.join(map(str, shape or ()))}]"


def describe(entry: LeafEntry) -> str:
    """dtype and shape of a leaf: `float32[3,4]`, or `int` for a scalar."""
    if is_scalar(entry):
        return entry.dtype.removeprefix(SCALAR_PREFIX)
    return value_text(entry.dtype, entry.shape, None, 0)


def element_dtype(entry: LeafEntry) -> np.dtype[Any]:
    """The NumPy dtype of the elements (`uint32` of random keys), or `UnsupportedLeafError`."""
    if entry.dtype.startswith(KEY_PREFIX):
        return numpy_dtype("uint32")
    if entry.dtype.startswith(SCALAR_PREFIX):
        raise UnsupportedLeafError(
            f"leaf {entry.path!r}: expected an array, found a scalar of type {entry.dtype!r}. Read it "
            f"with `scalar_value`."
        )
    try:
        return numpy_dtype(entry.dtype)
    except UnsupportedLeafError:
        raise _unknown(entry) from None


def element_shape(entry: LeafEntry) -> tuple[int, ...]:
    """The shape of the elements of an array leaf; of random keys it ends in the words of one key."""
    if not entry.dtype.startswith(KEY_PREFIX):
        return entry.shape
    count = math.prod(entry.shape)
    return (*entry.shape, entry.nbytes // 4 // count if count else 0)


def read_elements(
    checkpoint: StoredCheckpoint,
    entries: Iterable[LeafEntry],
    chunks: Mapping[str, Iterable[int]] | None = None,
    *,
    ahead: int | None = None,
) -> Iterator[Elements]:
    """Read and verify array leaves in the given order, a chunk at a time.

    At most a few chunks of 4 MiB are in memory. Scalars and empty arrays have no chunk and are skipped.

    Args:
        checkpoint: The checkpoint.
        entries: Leaves of it.
        chunks: By path, the numbers of the chunks to read; all of them by default.
        ahead: How many reads of up to 4 MiB are under way at a time.

    Raises:
        UnsupportedLeafError: NumPy has no form of a leaf's dtype. Nothing of that leaf was read.
        CorruptionError: A chunk is damaged, or its pack is missing; the text names the leaf.
        UnreachableError: A pack cannot be read.
    """
    import numpy as np

    entries = [entry for entry in entries if not is_scalar(entry)]
    dtypes = [element_dtype(entry) for entry in entries]
    numbered = [
        (entry, number, dtype)
        for entry, dtype in zip(entries, dtypes, strict=True)
        for number in (range(len(entry.chunks)) if chunks is None else chunks.get(entry.path, ()))
    ]
    stream = _read(checkpoint, [(entry, number) for entry, number, _ in numbered], ahead)
    for (entry, number, dtype), data in zip(numbered, stream, strict=True):
        start = number * (CHUNK_BYTES // dtype.itemsize)
        yield Elements(entry, start, np.frombuffer(data, dtype))


def read_array(checkpoint: StoredCheckpoint, entry: LeafEntry) -> np.ndarray[Any, Any]:
    """One whole array leaf, read and verified, in its shape; of random keys the `uint32` words.

    Raises as `read_elements` does.
    """
    import numpy as np

    array = np.empty(element_shape(entry), element_dtype(entry))
    flat = array.reshape(-1)
    for part in read_elements(checkpoint, [entry]):
        flat[part.start : part.start + part.values.size] = part.values
    return array


def chunks_in_order(checkpoint: StoredCheckpoint, entries: Sequence[LeafEntry]) -> ChunksOf:
    """A function that yields the chunks of a leaf; it must be called in the order of `entries`."""
    numbered = [(entry, number) for entry in entries for number in range(len(entry.chunks))]
    stream = _read(checkpoint, numbered)
    return lambda entry: islice(stream, len(entry.chunks))


def _read(
    checkpoint: StoredCheckpoint, chunks: Sequence[tuple[LeafEntry, int]], ahead: int | None = None
) -> Iterator[memoryview]:
    """The verified bytes of chunks; an error for damage says what to do."""
    run = checkpoint.run
    try:
        yield from stream_chunks(run.storage, checkpoint.manifest, chunks, ahead=ahead)
    except CorruptionError as error:
        raise CorruptionError(with_advice(error, run)) from error


def origin(manifest: Manifest) -> dict[str, Any] | None:
    """What `average` or `import` noted about a checkpoint; None for one that a program saved."""
    texts = [entry.text for entry in manifest.process_leaves if entry.path == ORIGIN]
    return json.loads(texts[0]) if texts and texts[0] is not None else None


def origin_lines(manifest: Manifest) -> list[str]:
    """The same for people, a line for each checkpoint or file that this one was made from."""
    note = origin(manifest)
    if note is None:
        return []
    lines = [str(note.get("made_by"))]
    lines += [
        f"{source['run']}@{source['step']}, weight {source['weight']:.12g}"
        for source in note.get("sources", [])
    ]
    if "like" in note:
        lines.append(f"{note['like']['run']}@{note['like']['step']}, all other leaves")
    if "source" in note:
        lines.append(str(note["source"]))
    return lines


def _unknown(entry: LeafEntry) -> UnsupportedLeafError:
    return UnsupportedLeafError(
        f"leaf {entry.path!r}: this perdure and its NumPy cannot read elements of dtype "
        f"{entry.dtype!r}. Leave the leaf out, or install a newer perdure and ml_dtypes."
    )
