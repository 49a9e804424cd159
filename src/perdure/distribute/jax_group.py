"""The group of JAX processes: joining it, talking in it, moving bytes in it.

Owns `jax.distributed`. Invariant: what an array holds when it leaves a process is what arrives in the
others, bit for bit: it travels as unsigned integers through an all-gather, so that whatever XLA makes
of the collective, there is no floating-point operation that it could contain.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from perdure.checkpoint.processes import Processes, SingleProcess
from perdure.distribute.cluster import Cluster
from perdure.distribute.processes import KeyValueProcesses, lost
from perdure.errors import ClusterError, UnsupportedLeafError

HEARTBEAT_S = 10
INITIALIZATION_S = 120
SHUTDOWN_S = 30
# A save may keep a process from a barrier for a while; a dead process is found by the heartbeat.
WAIT_MS = 600_000


def join(cluster: Cluster, local_device_ids: Sequence[int] | None = None) -> Processes:
    """Become a member of the group; nothing to do for a group of one. May be called twice."""
    if cluster.num_processes == 1:
        return SingleProcess()
    if jax.distributed.is_initialized():
        found = (jax.process_count(), jax.process_index())
        if found != (cluster.num_processes, cluster.process_id):
            raise ClusterError(
                f"jax.distributed is initialised as process {found[1]} of {found[0]}; "
                f"{cluster.source} says {cluster.process_id} of {cluster.num_processes}"
            )
    else:
        _initialize(cluster, local_device_ids)
    return _members(cluster.process_id, cluster.num_processes)


@functools.lru_cache(maxsize=1)
def _members(process_id: int, num_processes: int) -> Processes:
    # One for all strategies of a process: the rounds of a channel are counted here.
    return KeyValueProcesses(_CoordinationService, process_id, num_processes)


def _initialize(cluster: Cluster, local_device_ids: Sequence[int] | None) -> None:
    limits: dict[str, Any] = {
        "initialization_timeout": INITIALIZATION_S,
        "heartbeat_timeout_seconds": HEARTBEAT_S,
        "shutdown_timeout_seconds": SHUTDOWN_S,
    }
    known = inspect.signature(jax.distributed.initialize).parameters
    try:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            coordinator_address=cluster.coordinator,
            num_processes=cluster.num_processes,
            process_id=cluster.process_id,
            local_device_ids=local_device_ids,
            **{name: value for name, value in limits.items() if name in known},
        )
    except RuntimeError as error:
        raise ClusterError(
            f"process {cluster.process_id} could not join the group of {cluster.num_processes} at "
            f"{cluster.coordinator} (from {cluster.source}): {error}"
        ) from error


class _CoordinationService:
    """JAX's key-value store, which process 0 serves. Its client may be shared by threads."""

    def __init__(self) -> None:
        from jax._src import distributed

        self._client: Any = distributed.global_state.client

    def set(self, key: str, value: bytes) -> None:
        try:
            self._client.key_value_set_bytes(key, value)
        except jax.errors.JaxRuntimeError as error:
            raise lost("a message to the other processes", error) from error

    def get(self, key: str) -> bytes:
        try:
            return self._client.blocking_key_value_get_bytes(key, WAIT_MS)
        except jax.errors.JaxRuntimeError as error:
            raise lost("waiting for the other processes", error) from error

    def delete(self, key: str) -> None:
        # Only tidiness: a key that stays does no harm, and is never read again.
        try:
            self._client.key_value_delete(key)
        except jax.errors.JaxRuntimeError as error:
            raise lost("a message to the other processes", error) from error


def exchange(home: Any, roots: list[Any], counts: tuple[int, ...], index: int) -> list[list[Any]]:
    """The values of every process, on `home`, the first local device of this one.

    An all-gather of one flat bucket for each width of element, padded to the largest number of
    values of a process.
    """
    treedef = jax.tree.structure(roots[0])
    avals = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(roots[0]))
    mesh = _mesh(home.platform)
    rows = max(counts)
    own = mesh.devices.flat[index]
    buckets = _pack([jax.tree.leaves(root) for root in roots], rows)
    try:
        shared = [
            jax.make_array_from_single_device_arrays(
                (len(counts), *bucket.shape[1:]),
                NamedSharding(mesh, P("process")),
                [jax.device_put(bucket, own)],
            )
            for bucket in buckets
        ]
        # Waits, because this is the place where the death of another process can be told from a
        # fault of the user's program.
        gathered = jax.block_until_ready(_gather(mesh)(shared))
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        raise lost("the exchange of partial sums", error) from error
    local = [jax.device_put(bucket.addressable_data(0), home) for bucket in gathered]
    leaves = _unpack(local, avals, counts)
    return [[jax.tree.unflatten(treedef, root) for root in process] for process in leaves]


@functools.lru_cache(maxsize=4)
def _mesh(platform: str) -> Mesh:
    """One device of each process, in the order of the processes."""
    first: dict[int, Any] = {}
    for device in jax.devices(platform):
        if device.process_index not in first or device.id < first[device.process_index].id:
            first[device.process_index] = device
    return Mesh(np.array([first[p] for p in sorted(first)]), ("process",))


@functools.lru_cache(maxsize=4)
def _gather(mesh: Mesh) -> Any:
    def body(buckets: list[Any]) -> list[Any]:
        return [jax.lax.all_gather(b, "process", axis=0, tiled=True) for b in buckets]

    return jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=P("process"), out_specs=P(), check_vma=False)
    )


def _widths(avals: Sequence[tuple[tuple[int, ...], Any]]) -> dict[int, list[int]]:
    """Numbers of the leaves of each element width."""
    widths: dict[int, list[int]] = {}
    for number, (_, dtype) in enumerate(avals):
        if not jnp.issubdtype(dtype, jnp.number) and dtype != jnp.bool_:
            raise UnsupportedLeafError(f"contributions must be numbers, found {dtype}")
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise UnsupportedLeafError(f"{dtype} contributions: pass real and imaginary part apart")
        widths.setdefault(dtype.itemsize, []).append(number)
    return widths


@functools.partial(jax.jit, static_argnums=1)
def _pack(roots: list[list[Any]], rows: int) -> list[Any]:
    """One array [1, rows, elements] of unsigned integers for each width. Padding is never read."""
    avals = [(leaf.shape, leaf.dtype) for leaf in roots[0]]
    buckets = []
    for width, numbers in _widths(avals).items():
        lines = [jnp.concatenate([_bits(root[n], width) for n in numbers]) for root in roots]
        lines += [lines[-1]] * (rows - len(lines))
        buckets.append(jnp.stack(lines)[None])
    return buckets


@functools.partial(jax.jit, static_argnums=(1, 2))
def _unpack(
    buckets: list[Any],
    avals: tuple[tuple[tuple[int, ...], Any], ...],
    counts: tuple[int, ...],
) -> list[list[list[Any]]]:
    processes: list[list[list[Any]]] = [
        [[None] * len(avals) for _ in range(count)] for count in counts
    ]
    for bucket, numbers in zip(buckets, _widths(avals).values(), strict=True):
        for process, count in enumerate(counts):
            for row in range(count):
                start = 0
                for number in numbers:
                    shape, dtype = avals[number]
                    size = int(np.prod(shape))
                    words = bucket[process, row, start : start + size].reshape(shape)
                    start += size
                    processes[process][row][number] = (
                        words.astype(bool)
                        if dtype == jnp.bool_
                        else jax.lax.bitcast_convert_type(words, dtype)
                    )
    return processes


def _bits(leaf: Any, width: int) -> Any:
    unsigned = jnp.dtype(f"uint{8 * width}")
    flat = leaf.reshape(-1)
    return (
        flat.astype(unsigned)
        if leaf.dtype == jnp.bool_
        else jax.lax.bitcast_convert_type(flat, unsigned)
    )
