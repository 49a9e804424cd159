"""`Leaf` and `Leaves`: what crosses between the live state and the store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from perdure.errors import UnsupportedLeafError
from perdure.store.format import SCALAR_PREFIX, WEAK_PREFIX, chunk_spans, hash_bytes
from perdure.store.manifest import Container
from perdure.store.manifest_json import item_bytes
from perdure.store.shard_plan import ChunkBytes, Region, Shards, assembled_chunks, whole

if TYPE_CHECKING:
    import numpy as np


# `gc=False`: bytes refer to nothing, and a save has so many leaves that collections would take long.
class Leaf(Struct, frozen=True, gc=False):
    """One array, or one Python scalar, as bytes.

    Attributes:
        dtype: A NumPy or ml_dtypes name (`float32`, `bfloat16`); `weak:` and such a name for a weakly
            typed JAX array; `key<impl>` for a typed PRNG key, whose data are `uint32` words; or
            `py:kind` for a scalar whose `data` is UTF-8 text.
        shape: The shape of the array, or of the array of keys; `()` for a scalar.
        data: One-dimensional unsigned bytes in row-major, little-endian order. Small arrays
            have `bytes`, because a memoryview takes more time and memory than their elements.
        frozen: Whether these bytes never change, so that a background save needs no copy of them.
        region: The part of the array that `data` has; None for all of it. A leaf with a region is only
            compared, never saved.
        shards: Of an array that lies in several processes or on several devices, the shards of this
            process. `data` is empty then. Such a leaf is only saved, or restored into such an array.
        is_donated: Of bytes in the memory of an array that a step may be given (donated): whether it
            was. A step cannot use that memory as long as something holds these bytes.
        axes: The axes of the array in memory, from the largest stride down; None if they are in the
            order of the shape, or if nobody knows.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytes
    frozen: bool = False
    region: Region | None = None
    shards: Shards | None = None
    is_donated: Callable[[], bool] | None = None
    axes: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of `data`, or of the whole array that `shards` belong to."""
        return len(self.data) if self.shards is None else self.shards.nbytes

    @property
    def is_scalar(self) -> bool:
        """Whether this is a Python scalar."""
        return self.dtype.startswith(SCALAR_PREFIX)

    @property
    def is_weak(self) -> bool:
        """Whether this is a weakly typed JAX array."""
        return self.dtype.startswith(WEAK_PREFIX)

    def strong(self) -> Leaf:
        """The same bits without the weak type, for code that does not use JAX."""
        dtype = self.dtype.removeprefix(WEAK_PREFIX)
        return Leaf(dtype, self.shape, self.data, self.frozen, shards=self.shards)

    @property
    def text(self) -> str:
        """The text of a scalar."""
        return bytes(self.data).decode()

    def describe(self) -> str:
        """`float32[3,4]`, or `int 7` for a scalar."""
        if self.is_scalar:
            return f"{self.dtype.removeprefix(SCALAR_PREFIX)} {self.text}"
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    def hashes(self) -> list[str]:
        """The hash of each chunk; for a scalar the hash of its text."""
        if self.is_scalar:
            return [hash_bytes(self.data)]
        return [hash_bytes(whole(chunk)) for chunk in self.chunks()]

    def chunks(self) -> list[ChunkBytes]:
        """The bytes of each chunk of an array whose elements are all in this process."""
        if self.shards is not None:
            return assembled_chunks(self.shards)
        return [self.data[start:stop] for start, stop in chunk_spans(len(self.data))]

    def copy(self) -> Leaf:
        """The same leaf over memory of its own."""
        return Leaf(self.dtype, self.shape, memoryview(bytes(self.data)), True, axes=self.axes)


class RemoteLeaf(Struct, frozen=True, gc=False):
    """A leaf whose bytes another process has: what a fingerprint and a free-space check need."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    digests: tuple[str, ...]

    @classmethod
    def of(cls, leaf: Leaf) -> RemoteLeaf:
        """What the others get to know of a leaf of this process."""
        return cls(leaf.dtype, leaf.shape, leaf.nbytes, tuple(leaf.hashes()))

    @property
    def is_scalar(self) -> bool:
        return self.dtype.startswith(SCALAR_PREFIX)

    def hashes(self) -> list[str]:
        return list(self.digests)


AnyLeaf = Leaf | RemoteLeaf


def total_bytes(leaves: Iterable[AnyLeaf]) -> int:
    """The sum of `nbytes`. Nearly every leaf has all of its bytes, and a call for each takes longer."""
    return sum(
        [
            len(leaf.data) if type(leaf) is Leaf and leaf.shards is None else leaf.nbytes
            for leaf in leaves
        ]
    )


class Leaves(dict[str, Leaf]):
    """The leaves of a state by path, and the containers of its objects, which `dict(leaves)` loses."""

    def __init__(
        self,
        leaves: Mapping[str, Leaf] | None = None,
        containers: Mapping[str, Container] | None = None,
    ) -> None:
        super().__init__(leaves or {})
        self.containers = dict(containers or {})

    def select(self, wants: Callable[[str], bool]) -> Leaves:
        """The leaves and containers at the paths that `wants` accepts."""
        leaves = {path: leaf for path, leaf in self.items() if wants(path)}
        containers = {path: entry for path, entry in self.containers.items() if wants(path)}
        return Leaves(leaves, containers)


def containers_of(leaves: Mapping[str, AnyLeaf]) -> dict[str, Container]:
    """The containers of `Leaves`; none for a plain mapping."""
    return leaves.containers if isinstance(leaves, Leaves) else {}


@lru_cache(256)
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a leaf's dtype name (bfloat16, float8 too), or `UnsupportedLeafError`."""
    import numpy as np  # not needed to list a run

    name = name.removeprefix(WEAK_PREFIX)
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError):
        import ml_dtypes

        dtype = np.dtype(getattr(ml_dtypes, name, object))
    # A name such as `U8` or `f4,i4` means something to NumPy that no leaf has, and the width of
    # `float128` (g, G) depends on the machine.
    is_known = dtype.kind in "biuV" or (dtype.kind in "fc" and dtype.char not in "gG")
    if dtype.name != name or not is_known or dtype.itemsize != item_bytes(name):
        raise UnsupportedLeafError(
            f"dtype {name!r} has no NumPy form here; restore into a template of the framework that "
            f"wrote it."
        )
    return dtype
