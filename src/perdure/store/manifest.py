"""What a manifest says: one checkpoint, with an entry for each pack, leaf and container."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from perdure.store.format import (
    Hash,
    Metric,
    Natural,
    blocks,
    chunk_spans,
    hash_bytes,
    hash_parts,
    json_number,
    json_parts,
)
from perdure.store.log import LineReference

Time = Annotated[str, Meta(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z\Z")]
PackName = Annotated[str, Meta(pattern=r"^[0-9]{12}-[0-9]{5}-[0-9a-f]{8}\.pack\Z")]
Arrays = Annotated[
    str,
    Meta(
        pattern=r"^(numpy(\.generic|\.swapped)?|jax|torch(\.requires_grad|\.Parameter(\.frozen)?)?(@[a-z]+)?)\Z"
    ),
]
RecipeValue = str | int | float | bool


# `gc=False`: they are never part of a cycle, and a state of many small leaves makes so many of them
# that the collector would run several times during a save.
class Chunk(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """At most CHUNK_BYTES of one leaf: its hash, and where its stored bytes lie."""

    hash: Hash
    pack: Natural
    offset: Natural
    length: Natural


class LeafEntry(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """One leaf: array bytes as chunks, or the text of a Python scalar."""

    path: str
    dtype: str
    shape: tuple[Natural, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    text: str | None = None
    size: Natural | None = None
    """Bytes of the leaf, if some of its chunks are encoded and their lengths add up to less."""

    @property
    def nbytes(self) -> int:
        """Bytes of the array, or of the text of a scalar."""
        if self.text is not None:
            return len(self.text.encode())
        return self.stored_nbytes if self.size is None else self.size

    @property
    def stored_nbytes(self) -> int:
        """Bytes that its chunks take in packs, including those that other leaves share."""
        chunks = self.chunks
        return chunks[0].length if len(chunks) == 1 else sum(chunk.length for chunk in chunks)

    def sizes(self) -> list[int]:
        """Bytes of each decoded chunk."""
        if self.size is None:
            return [chunk.length for chunk in self.chunks]
        return [stop - start for start, stop in chunk_spans(self.size)]

    def hashes(self) -> list[str]:
        """The hash of each chunk; for a scalar the hash of its text."""
        if self.text is not None:
            return [hash_bytes(self.text.encode())]
        chunks = self.chunks
        return [chunks[0].hash] if len(chunks) == 1 else [chunk.hash for chunk in chunks]

    @property
    def bits(self) -> tuple[object, ...]:
        """What two leaves share if they have the same dtype, shape and bits."""
        return (self.dtype, self.shape, *self.hashes())


class PackEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """A pack that a manifest reads from."""

    name: PackName
    size: Natural


OF_TARGET: Final = "target"


class Container(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """The type of the value at one path in the state of an object, so that it can be built again.

    Attributes:
        kind: The type of the container; "array" for a leaf; "object" for a value that only a live
            object of the class `type` can rebuild.
        keys: The keys of a mapping in their order. A mapping without it has the keys of its paths, as
            strings in code point order.
        arrays: The class of the arrays at this path and below it.
        factory: The default factory of a `defaultdict`; `OF_TARGET` for a function or a class of the
            program, which is that of the target.
        maxlen: The greatest length of a `deque`.
        type: The name of a class, for "object".
        grown: Whether the run has put this value in the place of another one of its fresh target, so
            that no target decides its structure.
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
    factory: (
        Literal["bool", "dict", "float", "int", "list", "set", "str", "tuple", "target"] | None
    ) = None
    maxlen: Natural | None = None
    type: str | None = None
    grown: bool = False


MAPPINGS = frozenset({"dict", "OrderedDict", "defaultdict", "Counter"})
"""The kinds of containers that have keys. Others have numbered elements or no elements."""


class Manifest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One checkpoint. The creation of its file is the commit.

    Attributes:
        format: `FORMAT` of the writer.
        run: The id of the run, as in its marker. A copy has the id of its source, a fork its own.
        step: The step of the checkpoint.
        created: When it was saved, in UTC.
        fingerprint: The hash of paths, dtypes, shapes and chunk hashes of all `leaves`.
        recipe: Fields that describe how the state was made.
        metrics: Numbers by name.
        packs: The packs that it reads from.
        leaves: The leaves of the state, sorted by path.
        containers: The types of the states of objects with `load_state_dict`, by path. The digest of
            the file covers them, the fingerprint does not.
        process_leaves: Leaves that belong to one process and not to the state, such as its random
            generators. They are not part of the fingerprint. The key of the file is `local`.
        log: The last line of the log of the run when it was committed, which is durable. A log that
            lacks it has lost lines, or is another one.
    """

    format: Natural
    run: str
    step: Natural
    created: Time
    fingerprint: Hash
    recipe: dict[str, RecipeValue]
    metrics: dict[str, Metric]
    packs: tuple[PackEntry, ...]
    leaves: tuple[LeafEntry, ...]
    containers: dict[str, Container] = msgspec.field(default_factory=dict)
    process_leaves: tuple[LeafEntry, ...] = msgspec.field(default=(), name="local")
    log: LineReference | None = None

    def every_leaf(self) -> tuple[LeafEntry, ...]:
        """The leaves of the state and the process leaves."""
        return (*self.leaves, *self.process_leaves) if self.process_leaves else self.leaves

    @property
    def is_encoded(self) -> bool:
        """Whether some of its chunks are encoded."""
        return any(leaf.size is not None for leaf in self.every_leaf())

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def stored_nbytes(self) -> int:
        """Bytes that its chunks take in packs, each chunk counted once."""
        places = {
            (chunk.pack, chunk.offset): chunk.length
            for leaf in self.every_leaf()
            for chunk in leaf.chunks
        }
        return sum(places.values())


class ManifestHead(Struct, frozen=True):
    """The fields of a manifest that retention and a prune decide by; `Manifest` describes them."""

    format: Natural
    run: str
    step: Natural
    created: Time
    metrics: dict[str, Metric]
    packs: tuple[PackEntry, ...]


class ManifestSummary(Struct, frozen=True, gc=False):
    """The part of a manifest that a writer remembers.

    `head` is the start of its file with the digest; `packs` are sizes by name; `version` that of
    its file.
    """

    head: str
    created: str
    metrics: dict[str, Metric]
    packs: dict[str, int]
    version: str = ""


def fingerprint(leaves: Iterable[tuple[str, str, Sequence[int], Sequence[str]]]) -> str:
    """Hash of (path, dtype, shape, chunk hashes) over a whole state, in path order."""
    return hash_parts(json_parts(map(msgspec.json.encode, blocks(sorted(leaves)))))


def plain_metrics(metrics: Mapping[str, float]) -> dict[str, Metric]:
    """Metrics as a manifest, a log and `metrics.jsonl` have them."""
    return {name: json_number(float(value)) for name, value in metrics.items()}
