"""What a manifest says: the records of one checkpoint, its packs, leaves and containers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from perdure.store.format import (
    CODEC_FORMAT,
    FORMAT,
    STRUCTURE_FORMAT,
    Hash,
    Natural,
    chunk_spans,
    hash_bytes,
)

Time = Annotated[str, Meta(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z\Z")]
PackName = Annotated[str, Meta(pattern=r"^[0-9]{12}-[0-9]{5}-[0-9a-f]{8}\.pack\Z")]
Arrays = Annotated[
    str,
    Meta(
        pattern=r"^(numpy(\.generic|\.swapped)?|jax|torch(\.requires_grad|\.Parameter(\.frozen)?)?(@[a-z]+)?)\Z"
    ),
]
RecipeValue = str | int | float | bool


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


def format_of(
    leaves: Iterable[LeafRecord],
    containers: Mapping[str, Container] | None = None,
    local: Sequence[LeafRecord] = (),
) -> int:
    """The format of a manifest with these leaves and fields: the lowest that can express it."""
    if containers or local:
        return STRUCTURE_FORMAT
    return FORMAT if all(leaf.size is None for leaf in leaves) else CODEC_FORMAT


def fingerprint(leaves: Iterable[tuple[str, str, Sequence[int], Sequence[str]]]) -> str:
    """Hash of (path, dtype, shape, chunk hashes) over a whole state, in path order."""
    return hash_bytes(msgspec.json.encode(sorted(leaves)))


def plain_metrics(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Metrics as a manifest holds them: JSON has no NaN and no infinity, so those become null."""
    return {
        name: number if math.isfinite(number := float(value)) else None
        for name, value in metrics.items()
    }
