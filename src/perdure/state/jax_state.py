"""The adapter of JAX: arrays, typed PRNG keys, abstract arrays as targets, registered pytree nodes."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from itertools import repeat
from operator import attrgetter, methodcaller
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from perdure.errors import UnsupportedLeafError
from perdure.state.adapter import Adapter, Node
from perdure.state.leaf_spec import LeafSpec
from perdure.state.leaf_values import (
    BUFFER_DTYPES,
    array_bytes,
    key_words,
    leaf_array,
    plain_value,
)
from perdure.state.per_rank import current_rank_context
from perdure.store.format import WEAK_PREFIX
from perdure.store.leaf import Leaf, numpy_dtype
from perdure.store.shard_plan import Region, Shards

_JAX_NODES = {dict, list, tuple, type(None), OrderedDict, defaultdict}
_WEAK = {"int32": 0, "int64": 0, "float32": 0.0, "float64": 0.0, "complex64": 0j, "complex128": 0j}
_NUMBERS = {"b": "py:bool", "i": "py:int", "f": "py:float", "c": "py:complex"}


_SHARDING, _DTYPE, _SHAPE, _IS_WEAK, _IS_DELETED = map(
    attrgetter, ("sharding", "dtype", "shape", "weak_type", "is_deleted")
)
_OCTETS = methodcaller("cast", "B")


def key_entry_text(entry: Any) -> str:
    """The text of one entry of a JAX key path: a key, field name or position."""
    return jax.tree_util.keystr((entry,), simple=True)


class JaxState(Adapter):
    """Turns arrays, typed keys and registered pytree nodes into leaves and nodes, and back."""

    def spec(self, value: Any) -> LeafSpec | None:
        if not isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
            return None
        if isinstance(value, jax.core.Tracer):
            raise _traced()
        name, is_abstract = _dtype_name(value.dtype), isinstance(value, jax.ShapeDtypeStruct)
        if is_abstract and name in _WIDE and not _x64():
            raise _truncated(name, value.shape)
        _require_processes(value.sharding)
        if is_abstract and value.shape == () and (value.weak_type or name == "bool"):
            # `jax.eval_shape` makes these of Python numbers: such a target takes what those take.
            name = _NUMBERS.get(value.dtype.kind, name)
        return LeafSpec(f"key<{_impl(value)}>" if name is None else name, tuple(value.shape))

    def leaf(self, value: Any) -> Leaf | None:
        if not isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
            return None
        if isinstance(value, jax.ShapeDtypeStruct):
            raise UnsupportedLeafError(
                "an abstract array has no data; it can only be part of a target."
            )
        if isinstance(value, jax.core.Tracer):
            raise _traced()
        if value.is_deleted():
            raise UnsupportedLeafError(
                "the data of this array are deleted, because it was passed to a step that donates its "
                "arguments. Save the state that the step returned, or save before the step."
            )
        return _leaf_of(value)

    def leaves(self, values: Sequence[Any]) -> Sequence[Leaf] | None:
        # The training loop waits for this: arrays of one CPU device, which take it half as long.
        if not isinstance(values[0], jax.Array):
            return None
        shardings = list(map(_SHARDING, values))
        names = list(map(BUFFER_DTYPES.get, map(_DTYPE, values)))
        shapes = list(map(_SHAPE, values))
        if (
            None in names  # keys, and dtypes whose bytes NumPy does not show
            or {*map(type, shardings)} != {SingleDeviceSharding}
            or not _is_local(shardings[0])
            or values[0].is_deleted()  # `platform` of a deleted array ends the process
            or values[0].platform() != "cpu"
            or any(map(_IS_WEAK, values))
            or any(0 in shape for shape in shapes)
        ):
            return None
        try:
            octets = map(_OCTETS, map(memoryview, values))
            deleted = map(_IS_DELETED, values)
            nothing = repeat(None)
            return list(map(Leaf, names, shapes, octets, repeat(True), nothing, nothing, deleted))
        except (RuntimeError, BufferError):  # one is deleted, which `leaf` explains, or elsewhere
            return None

    def regions(self, like: Any) -> tuple[Region, ...] | None:
        if not isinstance(like, (jax.Array, jax.ShapeDtypeStruct)):
            return None
        sharding, name = like.sharding, _dtype_name(like.dtype)
        if sharding is None or sharding.is_fully_addressable or sharding.is_fully_replicated:
            return None
        if self.misplaced(like):
            return None
        if name is None or (name in _WIDE and not _x64()):
            return None
        indices = sharding.addressable_devices_indices_map(like.shape)
        return tuple(dict.fromkeys(_region(index, like.shape) for index in indices.values()))

    def misplaced(self, like: Any) -> str:
        sharding = like.sharding if isinstance(like, jax.ShapeDtypeStruct) else None
        if sharding is None:
            return ""
        try:
            _with_rank(sharding, len(like.shape)).shard_shape(tuple(like.shape))
        except ValueError as error:
            return (
                f"expected a sharding that divides the shape {list(like.shape)}, found {sharding} "
                f"({error}). Give the target another sharding or none"
            )
        return ""

    def load(self, like: Any, leaf: Leaf) -> Any:
        if leaf.is_scalar:  # the target is the abstract value of a Python number
            return plain_value(leaf)
        if leaf.shards is not None:
            return _place_shards(like, leaf, leaf.shards)
        if leaf.dtype.startswith("key<"):
            words = key_words(leaf)
            if not words.size:
                words = words.reshape((*leaf.shape, *_key_shape(_impl(like))))
            return _place(like, jax.random.wrap_key_data(jnp.asarray(words), impl=_impl(like)))
        array = leaf_array(leaf)
        if array.dtype.name not in _WIDE or _x64():
            return _place(like, array, leaf.is_weak)
        if not isinstance(like, jax.Array):
            raise _truncated(array.dtype.name, leaf.shape)
        with jax.enable_x64(True):  # the target is a 64-bit array too, made in such a block
            return _place(like, array, leaf.is_weak)

    def abstract(self, spec: LeafSpec, *, is_weak: bool = False) -> jax.ShapeDtypeStruct:
        """A target for an array of this dtype and shape."""
        dtype: Any = spec.dtype
        if dtype.startswith("key<"):
            dtype = jax.random.key(0, impl=dtype[len("key<") : -1]).dtype
        return jax.ShapeDtypeStruct(spec.shape, dtype, weak_type=is_weak)

    def node(self, value: Any, stored: Mapping[str, LeafSpec] | None) -> Node | None:
        if type(value) in _JAX_NODES:
            return None
        children, treedef = jax.tree_util.tree_flatten_with_path(
            value, is_leaf=lambda part: part is not value
        )
        if jax.tree_util.treedef_is_leaf(treedef) and len(children) == 1 and not children[0][0]:
            return None
        return Node(
            [(key_entry_text(path[0]), child) for path, child in children],
            lambda new: jax.tree_util.tree_unflatten(treedef, new),
            code={"func": value.func} if isinstance(value, jax.tree_util.Partial) else {},
        )


def _leaf_of(value: Any) -> Leaf:
    dtype, shape = leaf_dtype(value), tuple(value.shape)
    _require_processes(value.sharding)
    context = current_rank_context()
    if context.compares_copies:
        _require_equal_copies(numbers(value))
    if not _is_local(value.sharding) and not value.is_fully_replicated:
        _require_group(value)
        if not context.compares_shards:
            return Leaf(dtype, shape, memoryview(b""), frozen=True, shards=_shards(numbers(value)))
        # Its shards are in several processes, which all have to call this.
        value = multihost_utils.process_allgather(value, tiled=True)
    data = numbers(value)
    keeps_shards = context.keeps_shards and not context.compares_shards
    # On a CPU this shares the device buffer. JAX then counts a reference from outside, so that a
    # step that donates the array works on a copy and these bytes do not change.
    shared = data is value and not value.is_deleted() and value.platform() == "cpu"
    is_donated = value.is_deleted if shared else None
    if not value.is_fully_replicated and keeps_shards:
        # To put them together here would take as long as to copy all of them.
        shards, nothing = _shards(data), memoryview(b"")
        return Leaf(dtype, shape, nothing, True, shards=shards, is_donated=is_donated)
    # Nearly every leaf; by way of NumPy it takes twice as long, and the training loop waits.
    on_one = shared and type(value.sharding) is SingleDeviceSharding
    if on_one and value.dtype in BUFFER_DTYPES and 0 not in shape:
        octets = memoryview(value).cast("B")
    else:
        octets = array_bytes(np.asarray(data))[0]
    return Leaf(dtype, shape, octets, frozen=True, is_donated=is_donated)


def _shards(array: Any) -> Shards:
    """The shards of this process, each once, in the memory of the array where that is possible."""
    parts: dict[Region, memoryview] = {}
    for shard in array.addressable_shards:
        region = _region(shard.index, array.shape)
        if region not in parts:
            parts[region] = array_bytes(np.asarray(shard.data))[0]
    return Shards(tuple(array.shape), array.dtype.itemsize, tuple(parts), tuple(parts.values()))


def _require_equal_copies(array: Any) -> None:
    if len(array.sharding.device_set) == 1:
        return
    copies: dict[Region, tuple[Any, memoryview]] = {}
    for shard in array.addressable_shards:
        data = array_bytes(np.asarray(shard.data))[0]
        device, first = copies.setdefault(_region(shard.index, array.shape), (shard.device, data))
        if first is not data and first != data:
            raise UnsupportedLeafError(
                f"the copies of this array on {device} and {shard.device} have different bits, though "
                f"its sharding ({array.sharding}) says that they are equal, and a restore gives one of "
                f"them to all devices. A `shard_map` with `check_vma=False` may return such arrays. "
                f"Save one value for each device (`out_specs=P(axis)`), or make them equal (`pmean`)."
            )


def _region(index: Any, shape: tuple[int, ...]) -> Region:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def leaf_dtype(value: Any) -> str:
    """The dtype of the leaf of an array, which may be traced."""
    name = _dtype_name(value.dtype)
    if name is None:
        return f"key<{_impl(value)}>"
    if not value.weak_type:
        return name
    if name not in _WEAK:
        raise UnsupportedLeafError(
            f"a weakly typed array of {name}, which JAX cannot create through its public "
            f"functions. Convert it: `x.astype(x.dtype)`."
        )
    return WEAK_PREFIX + name


def numbers(value: Any) -> Any:
    """The array, or the `uint32` words of typed keys."""
    return jax.random.key_data(value) if _dtype_name(value.dtype) is None else value


def _with_rank(sharding: Any, axes: int) -> Any:
    """The sharding of typed keys, which have the spec of their words with one dimension more."""
    if isinstance(sharding, NamedSharding) and len(sharding.spec) > axes:
        spec = PartitionSpec(*sharding.spec[:axes])
        return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return sharding


def _require_processes(sharding: Any) -> None:
    if isinstance(getattr(sharding, "mesh", None), AbstractMesh):
        return  # it has no devices
    if sharding is None or _is_local(sharding):
        return
    found = {device.process_index for device in sharding.device_set}
    count = current_rank_context().count
    is_fit = len(found) == count or (sharding.is_fully_replicated and len(found) > count)
    if jax.process_index() in found and (count == 1 or is_fit):
        return
    raise UnsupportedLeafError(
        f"expected an array on devices of each of the {count} processes that save or restore, among "
        f"them JAX's process {jax.process_index()}; found devices of JAX's processes {sorted(found)}. "
        f"Put the array on a mesh of the devices of all processes, or save and restore it in a group "
        f"of those processes alone."
    )


@lru_cache(256)
def _is_local(sharding: Any) -> bool:
    return sharding.is_fully_addressable


def _require_group(value: Any) -> None:
    if current_rank_context().count == 1:
        raise UnsupportedLeafError(
            f"an array with the sharding {value.sharding}, which has parts in other processes, and "
            f"this process saves alone, so that it does not have all elements. Make the manager in "
            f"every process as CheckpointManager(..., "
            f"processes=perdure.initialize_distributed('jax')), or save a copy that each has "
            f"(`jax.experimental.multihost_utils.process_allgather(x, tiled=True)` in all processes)."
        )


def _place(like: Any, array: Any, weak: bool = False) -> Any:
    sharding = _with_rank(getattr(like, "sharding", None), array.ndim)
    if sharding is not None and not sharding.is_fully_addressable:
        # Each process places its own shards, whatever the sharding of the saved array was.
        placed = jax.make_array_from_callback(like.shape, sharding, lambda index: array[index])
        return _weakly_typed(placed, sharding) if weak else placed
    if weak:
        array = _weakly_typed(array)
    if sharding is not None and getattr(like, "committed", True):
        return jax.device_put(array, sharding)
    return jnp.asarray(array)


def _place_shards(like: Any, leaf: Leaf, shards: Shards) -> Any:
    """An array with the sharding of `like`, from the shards that this process has read."""
    dtype = numpy_dtype(leaf.strong().dtype)
    parts = dict(zip(shards.regions, shards.parts, strict=True))

    def part(index: Any) -> Any:
        region = _region(index, leaf.shape)
        shape = [stop - start for start, stop in region]
        data = parts[region]
        return np.frombuffer(data, dtype).reshape(shape) if data else np.empty(shape, dtype)

    placed = jax.make_array_from_callback(leaf.shape, like.sharding, part)
    return _weakly_typed(placed, like.sharding) if leaf.is_weak else placed


def _weakly_typed(array: Any, sharding: Any = None) -> Any:
    dtype = array.dtype.name
    with jax.enable_x64(dtype in _WIDE), jax.debug_nans(False):
        if sharding is None:
            weak = weaken(jnp.asarray(array))
        else:
            weak = jax.jit(weaken, out_shardings=sharding)(array)
    if not weak.weak_type or weak.dtype != array.dtype:
        raise UnsupportedLeafError(
            f"expected JAX to make a weakly typed array of {dtype}, found {weak.aval.str_short()}; "
            f"JAX {jax.__version__} or one of its settings is not supported here. This array cannot be "
            f"restored with its type: convert it before the save, with `x.astype(x.dtype)`."
        )
    return weak


def whole_on_one_device(state: Any) -> list[str]:
    """Paths of arrays that are on one device, by default, beside sharded ones of the same shape, as
    `jax.jit(tx.init)(parameters)` makes the moments of sharded parameters."""
    try:
        found = jax.tree_util.tree_leaves_with_path(state)
    except (
        TypeError,
        ValueError,
    ):  # a dict with keys that do not sort, which no compiled step can have
        return []
    arrays = [(path, leaf) for path, leaf in found if isinstance(leaf, jax.Array)]
    sharded = {leaf.shape for _, leaf in arrays if not leaf.sharding.is_fully_replicated}
    return [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, leaf in arrays
        if leaf.shape in sharded and not leaf.committed
    ]


def elsewhere(value: Any) -> str:
    """The devices of an array, unless a restore without a target would put it there."""
    if not isinstance(value, jax.Array):
        return ""
    chosen: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    if chosen is None or isinstance(chosen, str):
        chosen = jax.local_devices(backend=chosen)[0]
    kind = value.sharding.memory_kind
    is_there = value.sharding.device_set == {chosen}
    if is_there and kind in (None, chosen.default_memory().kind):
        return ""
    names = sorted(map(str, value.sharding.device_set))
    return f"{', '.join(names)}" + (f" ({kind})" if is_there else "")


def weaken(values: Any) -> Any:
    """Weakly typed values with the same bits, because `at[...].set` keeps the type of its target."""
    zero = _WEAK[values.dtype.name]
    return jnp.broadcast_to(jnp.asarray(zero), values.shape).at[...].set(values)


def _traced() -> UnsupportedLeafError:
    return UnsupportedLeafError("a traced value; save outside of jit, where arrays are concrete.")


def _truncated(dtype: str, shape: tuple[int, ...]) -> UnsupportedLeafError:
    return UnsupportedLeafError(
        f"expected {dtype}{list(shape)}, which JAX without x64 would truncate to {_WIDE[dtype]}. "
        f"Enable x64 (`jax.config.update('jax_enable_x64', True)`), or read the checkpoint without a "
        f"target, which gives NumPy arrays, and convert this leaf."
    )


# dtypes that JAX truncates unless x64 is enabled, and what to.
_WIDE = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}


def _x64() -> bool:
    return jax.config.jax_enable_x64  # type: ignore[attr-defined]


@cache
def _key_shape(impl: str) -> tuple[int, ...]:
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl))).shape


@cache
def _dtype_name(dtype: Any) -> str | None:
    """The name of a dtype; None for typed keys."""
    return None if jnp.issubdtype(dtype, jax.dtypes.prng_key) else dtype.name


def _impl(value: Any) -> str:
    return (
        str(jax.random.key_impl(value)) if isinstance(value, jax.Array) else value.dtype._impl.name
    )


ADAPTER = JaxState()
