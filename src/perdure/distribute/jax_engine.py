"""The JAX engine, and the strategies on it.

Owns the three compiled computations. Invariant: grad, add and update are separate single-device
executables; step and replica are runtime values; nothing that depends on the topology is in any of
them. Between devices only bytes move.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from perdure.distribute import jax_group
from perdure.distribute.cluster import Cluster, ClusterResolver, resolve
from perdure.distribute.engine import Grad, Scalar, Stream, Update
from perdure.distribute.jax_threads import pin
from perdure.distribute.processes import Processes, SingleProcess
from perdure.distribute.strategy import Strategy
from perdure.errors import StateError, TopologyError

Devices = int | Sequence[Any] | None

# `rbg` keys give other bits on other topologies; threefry does not.
_PRNG = "threefry2x32"


class JaxEngine:
    """JAX on some local devices of one process. See perdure.distribute.engine.Engine."""

    def __init__(self, devices: Devices, processes: Processes, threads: int | str) -> None:
        self.processes = processes
        self.devices = _choose(devices)
        self.devices_per_process = tuple(
            int(count) for count in processes.gather(str(len(self.devices)).encode())
        )
        self._threads = threads
        # `NamedSharding(P())` over the local devices only: every process holds whole arrays.
        self._everywhere = NamedSharding(Mesh(np.array(self.devices), ("device",)), P())
        # The arrays of the last state, by identity, with their parts: taking them apart again costs
        # more than all else that a step does in Python.
        self._parts: dict[int, tuple[Any, Sequence[Any]]] = {}

    def recipe(self) -> dict[str, Scalar]:
        return {
            "engine": "jax",
            "engine_version": f"jax {jax.__version__}, jaxlib {jax.lib.__version__}",
            "platform": self.devices[0].platform,
            "threads": self._threads,
            "x64": bool(jax.config.jax_enable_x64),
            "matmul_precision": str(jax.config.jax_default_matmul_precision),
            "threefry_partitionable": bool(jax.config.jax_threefry_partitionable),
        }

    def place(self, state: Any) -> list[Any]:
        paths, treedef = jax.tree_util.tree_flatten_with_path(state)
        columns = [self._spread(path, leaf) for path, leaf in paths]
        return [
            jax.tree.unflatten(treedef, [column[d] for column in columns])
            for d in range(len(self.devices))
        ]

    def collect(self, values: list[Any]) -> Any:
        if len(values) == 1:
            return values[0]
        columns = list(zip(*(jax.tree.leaves(value) for value in values), strict=True))
        leaves = [
            jax.make_array_from_single_device_arrays(
                column[0].shape, self._everywhere, list(column)
            )
            for column in columns
        ]
        self._parts = {
            id(leaf): (leaf, column) for leaf, column in zip(leaves, columns, strict=True)
        }
        return jax.tree.unflatten(jax.tree.structure(values[0]), leaves)

    def put(self, value: Any, device: Any) -> Any:
        return jax.device_put(value, device)

    def grad(self, fn: Grad, state: Any, share: Any, stream: Stream) -> Any:
        return _grad_program(fn)(
            state, share, _words(stream.seed), np.uint32(stream.step), np.uint32(stream.replica)
        )

    def add(self, left: Any, right: Any) -> Any:
        return _add_program(left, right)

    def update(self, fn: Update, state: Any, total: Any, stream: Stream) -> tuple[Any, Any]:
        return _update_program(fn)(state, total)

    def exchange(self, roots: list[Any], counts: tuple[int, ...]) -> list[list[Any]]:
        return jax_group.exchange(self.devices[0], roots, counts, self.processes.index)

    def call(
        self, fn: Callable[..., Any], device: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if len(self.devices) > 1:
            args, kwargs = jax.tree.map(
                functools.partial(_on, device=device), (list(args), dict(kwargs))
            )
        with jax.default_device(device):
            return fn(*args, **kwargs)

    def key(self, stream: Stream) -> Any:
        return _key(_words(stream.seed), np.uint32(stream.step), np.uint32(stream.replica))

    def map(self, fn: Callable[[Any], Any], value: Any) -> Any:
        return jax.tree.map(lambda leaf: fn(jnp.asarray(leaf)), value)

    def signature(self, value: Any) -> Hashable:
        leaves, treedef = jax.tree.flatten(value)
        return treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)

    def describe(self, value: Any) -> dict[str, str]:
        return {
            _name(path): f"{leaf.dtype}{list(leaf.shape)}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(value)
        }

    def _spread(self, path: Any, leaf: Any) -> Sequence[Any]:
        """The same array on every local device."""
        # The array is held beside its parts, so that its identity cannot be given to another.
        if id(leaf) in self._parts:
            return self._parts[id(leaf)][1]
        if isinstance(leaf, jax.Array) and not leaf.aval.weak_type:
            if leaf.sharding == self._everywhere:
                shards = {shard.device: shard.data for shard in leaf.addressable_shards}
                return [shards[device] for device in self.devices]
            if len(self.devices) == 1 and leaf.committed and leaf.devices() == {self.devices[0]}:
                return [leaf]
        return [jax.device_put(_strong(path, leaf), device) for device in self.devices]


@functools.lru_cache(maxsize=64)
def _grad_program(fn: Grad) -> Callable[..., Any]:
    """`fn` with its key. Kept, so that all strategies over one function share its executables."""

    @jax.jit
    def grad(state: Any, share: Any, seed: Any, step: Any, replica: Any) -> Any:
        contributions = fn(state, share, _key(seed, step, replica))
        if not jax.tree.leaves(contributions):
            raise StateError(f"{_called(fn)} returned no contributions: expected a tree of arrays")
        return jax.tree.map(_without_weak_type, contributions)

    return grad


@functools.lru_cache(maxsize=64)
def _update_program(fn: Update) -> Callable[..., Any]:
    @jax.jit
    def update(state: Any, total: Any) -> tuple[Any, Any]:
        result = fn(state, total)
        if not isinstance(result, tuple) or len(result) != 2:
            raise StateError(f"{_called(fn)} must return (state, logs), got {type(result).__name__}")
        new, logs = jax.tree.map(_without_weak_type, result)
        _same_form(fn, state, new)
        return new, logs

    return update


@jax.jit
def _add_program(left: Any, right: Any) -> Any:
    return jax.tree.map(jnp.add, left, right)


def _key(seed: Any, step: Any, replica: Any) -> Any:
    key = jax.random.wrap_key_data(jnp.asarray(seed), impl=_PRNG)
    return jax.random.fold_in(jax.random.fold_in(key, step), replica)


def _words(seed: int) -> Any:
    # As jax.random.key(seed, impl="threefry2x32"), which drops the high word without x64.
    return np.array([seed >> 32, seed & 0xFFFFFFFF], dtype=np.uint32)


def _without_weak_type(leaf: Any) -> Any:
    """Weak types are lost in a checkpoint: after a resume the step would be another program."""
    leaf = jnp.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf
    return jax.lax.convert_element_type(leaf, leaf.dtype)


def _strong(path: Any, leaf: Any) -> Any:
    """A leaf of the user's, as an array whose dtype does not give way in promotions."""
    if isinstance(leaf, jax.Array):
        return _without_weak_type(leaf)
    try:
        array = np.asarray(leaf)
    except (TypeError, ValueError):
        array = None
    if array is None or array.dtype.kind in "OSUMm":
        raise StateError(
            f"{_name(path)}: every leaf of a state must be an array or a number, found "
            f"{type(leaf).__name__}; keep other values outside, or as static fields"
        )
    return array


def _same_form(fn: Update, old: Any, new: Any) -> None:
    """A state that changes its form compiles the step anew, and cannot be restored into itself."""

    def form(tree: Any) -> dict[str, str]:
        return {
            _name(path): f"{leaf.dtype}{list(leaf.shape)}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }

    before, after = form(old), form(new)
    if jax.tree.structure(old) == jax.tree.structure(new) and before == after:
        return
    differ = [
        f"{path}: {before.get(path, 'nothing')} became {after.get(path, 'nothing')}"
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path)
    ]
    raise StateError(
        f"{_called(fn)} must return a state of the form that it got: "
        + ("; ".join(differ[:10]) or "the containers differ")
    )


def _on(leaf: Any, device: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    for shard in leaf.addressable_shards:
        if shard.device == device and leaf.is_fully_replicated:
            return shard.data
    return jax.device_put(leaf, device)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/") or "the state"


def _called(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", repr(fn))


def _choose(devices: Devices) -> tuple[Any, ...]:
    local = jax.local_devices()
    if devices is None:
        return tuple(local)
    if isinstance(devices, int):
        if not 1 <= devices <= len(local):
            raise TopologyError(
                f"{devices} devices were asked for and this process has {len(local)}. On CPU, set "
                f"JAX_NUM_CPU_DEVICES={devices} before JAX starts"
            )
        return tuple(local[:devices])
    chosen = tuple(devices)
    if not chosen or len(set(chosen)) != len(chosen):
        raise TopologyError(f"devices must be a list of different devices, got {list(chosen)}")
    foreign = [device for device in chosen if device not in local]
    if foreign:
        raise TopologyError(f"{foreign} are not devices of this process, which has {local}")
    return chosen


class MirroredStrategy(Strategy):
    """The local devices of one process; each holds the whole state.

    `devices`: all (None), the first n (a number), or a list. `threads` is the size of the CPU's
    thread pool, which is part of the recipe (default: PJRT_NPROC, or 8).
    """

    def __init__(
        self,
        devices: Devices = None,
        replicas: int | None = None,
        *,
        seed: int = 0,
        threads: int | None = None,
    ) -> None:
        pool = pin(threads)
        super().__init__(JaxEngine(devices, SingleProcess(), pool), replicas, seed=seed)


class OneDeviceStrategy(MirroredStrategy):
    """One device; by default the first."""

    def __init__(
        self,
        device: Any = None,
        replicas: int | None = None,
        *,
        seed: int = 0,
        threads: int | None = None,
    ) -> None:
        devices = 1 if device is None else [device]
        super().__init__(devices, replicas, seed=seed, threads=threads)


class MultiWorkerMirroredStrategy(Strategy):
    """The devices of a group of processes. Make it before anything else that uses JAX.

    The group is `cluster_resolver`, or what the environment describes (TF_CONFIG, JAX_*, torchrun's).
    Raises WorkerLostError from a step when another process dies: save nothing, leave with os._exit,
    and let the whole group be started again from the last checkpoint.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | Cluster | None = None,
        replicas: int | None = None,
        *,
        devices: Devices = None,
        seed: int = 0,
        threads: int | None = None,
        local_device_ids: Sequence[int] | None = None,
    ) -> None:
        cluster = resolve(cluster_resolver)
        pool = pin(threads)
        processes = jax_group.join(cluster, local_device_ids)
        super().__init__(JaxEngine(devices, processes, pool), replicas, seed=seed)
