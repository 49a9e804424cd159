"""The group of JAX processes: joining it, messages, and the exchange of arrays.

Arrays arrive bit for bit: they travel as unsigned integers through an all-gather or an all-to-all, so
that XLA's program for it cannot contain a floating-point operation.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from perdure.distribute.cluster import Cluster, ClusterOptions, await_members, with_existing
from perdure.distribute.cluster.rendezvous import ALL, local_address
from perdure.distribute.cluster.sources import join_address
from perdure.distribute.engine import Merge, sliced
from perdure.distribute.jax.programs import type_of
from perdure.distribute.key_value_group import KeyValueProcesses, lost
from perdure.errors import ClusterError, UnsupportedLeafError
from perdure.runtime.process_group import Processes, SingleProcess
from perdure.state.jax_state import weaken

# Shape, dtype and weak type of each leaf.
Avals = Sequence[tuple[tuple[int, ...], Any, bool]]


def join(
    cluster: Cluster,
    options: ClusterOptions | None = None,
    local_device_ids: Sequence[int] | None = None,
) -> Processes:
    """Become a member of the group, or of the one that `jax.distributed.initialize` made."""
    cluster = with_existing(cluster, "jax")
    if cluster.num_processes == 1:
        return SingleProcess()
    options = options or ClusterOptions.from_environment()
    if not jax.distributed.is_initialized():
        _initialize(cluster, local_device_ids, options)
    return _members(cluster.process_id, cluster.num_processes, options.operation_timeout)


initialize = join
"""For programs without a strategy."""


@functools.lru_cache(maxsize=1)
def _members(process_id: int, num_processes: int, wait_s: float) -> Processes:
    # One for all strategies of a process, because it counts the rounds of a channel.
    # A save may keep a process from a barrier for a while; the heartbeat detects a dead process.
    return KeyValueProcesses(_CoordinationService, process_id, num_processes, wait_s)


def _initialize(
    cluster: Cluster, local_device_ids: Sequence[int] | None, options: ClusterOptions
) -> None:
    await_members(cluster, options.start_timeout)
    write_from_all(cluster.process_id)
    bind = None
    if cluster.is_chief and not os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"):
        host, port = cluster.host_port
        if (address := local_address(host)) != ALL:  # JAX's default is every address
            bind = join_address(address, str(port))
    try:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            coordinator_address=cluster.coordinator,
            num_processes=cluster.num_processes,
            process_id=cluster.process_id,
            local_device_ids=local_device_ids,
            # Whole seconds, and not 0.
            initialization_timeout=math.ceil(options.start_timeout),
            heartbeat_timeout_seconds=math.ceil(options.heartbeat),
            shutdown_timeout_seconds=math.ceil(options.leave_timeout),
            coordinator_bind_address=bind,
            # Otherwise JAX would read the schedulers' variables again, and choose devices by them.
            cluster_detection_method="deactivate",
        )
    except RuntimeError as error:
        raise ClusterError(
            f"process {cluster.process_id} could not join the group of {cluster.num_processes} at "
            f"{cluster.coordinator} (from {cluster.source}): {error}"
        ) from error


_CACHE_WRITE = (
    "cache_key", "compile_time_secs", "module_name", "backend", "executable", "host_callbacks",
)  # fmt: skip


def write_from_all(process_id: int, environ: Mapping[str, str] | None = None) -> bool:
    """Let this process write to JAX's cache of compiled programs; False if nothing was changed.

    JAX lets only process 0 write. On CPU the keys name the devices, so no other process would find
    its programs, and each restart would wait for compilers. So every process writes if `perdure
    run` has set the cache on a local disk. JAX has no setting for it.
    """
    environ = os.environ if environ is None else environ
    if process_id == 0 or not environ.get("PERDURE_SHARED_CACHE"):
        return False
    from jax._src import compilation_cache, compiler

    original: Any = getattr(compiler, "_cache_write", None)
    if original is None or tuple(inspect.signature(original).parameters) != _CACHE_WRITE:
        return False

    def write(
        key: str, seconds: float, name: str, backend: Any, program: Any, callbacks: Any
    ) -> None:
        if callbacks or backend.platform != "cpu":
            return
        try:
            compilation_cache.put_executable_and_time(key, name, program, backend, int(seconds))
        except Exception as error:  # noqa: BLE001 (as in JAX: a full disk ends no training)
            warnings.warn(f"{name} was not kept in the cache: {error!r}", stacklevel=2)

    compiler._cache_write = write  # pyright: ignore[reportAttributeAccessIssue]
    return True


class _CoordinationService:
    """JAX's key-value store, which process 0 serves. Its client may be shared by threads."""

    error: type[Exception] = jax.errors.JaxRuntimeError
    timeout = "DEADLINE_EXCEEDED"

    def __init__(self) -> None:
        from jax._src import distributed

        self._client: Any = distributed.global_state.client

    def set(self, key: str, value: bytes) -> None:
        self._client.key_value_set_bytes(key, value)

    def get(self, key: str, seconds: float) -> bytes:
        return self._client.blocking_key_value_get_bytes(key, int(1000 * seconds))

    def delete(self, key: str) -> None:
        self._client.key_value_delete(key)  # only to free memory: it is never read again

    def answers(self, text: str) -> bool:
        # It fails, too, if it knows that a process is gone.
        return "UNAVAILABLE" not in text or "unhealthy" in text


def exchange(
    home: Any, roots: list[Any], counts: tuple[int, ...], index: int, merge: Merge | None
) -> Any:
    """The total, on the first local device of this process; see Engine.exchange.

    One flat bucket for each width of element, padded to the largest number of values of a process.
    """
    treedef = jax.tree.structure(roots[0])
    leaves = [jax.tree.leaves(root) for root in roots]
    avals = tuple(map(type_of, leaves[0]))
    buckets = _pack(leaves, max(counts))
    if merge is None or not sliced(sum(leaf.nbytes for leaf in leaves[0]), counts):
        leaves_of_all = _unpack(_move("gather", buckets, index, home), avals, counts)
        values = [[jax.tree.unflatten(treedef, root) for root in roots] for roots in leaves_of_all]
        return values if merge is None else merge(values)
    # A slice of every partial sum to each process, which adds the slices in the tree. Addition is by
    # element, so that it does not matter how the elements are cut.
    slices = _cut(buckets, avals, len(counts))
    total = merge(_typed(_move("scatter", slices, index, home), avals, counts))
    lines = _move("gather", [bits(part)[None] for part in total], index, home)
    return jax.tree.unflatten(treedef, _join(lines, avals))


def _move(how: str, buckets: list[Any], index: int, home: Any) -> list[Any]:
    """Each process's buckets ([1, ...]) to all others, or the rows of axis 1 to one process each."""
    mesh = _mesh(home.platform)
    device = mesh.devices.flat[index]
    try:
        shared = [
            jax.make_array_from_single_device_arrays(
                (mesh.size, *bucket.shape[1:]),
                NamedSharding(mesh, P("process")),
                [jax.device_put(bucket, device)],
            )
            for bucket in buckets
        ]
        # Waits, because here an error means that another process died, and not a fault of the user's
        # program.
        moved = jax.block_until_ready(_program(how, mesh)(shared))
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        raise lost("the exchange of partial sums", error) from error
    return [jax.device_put(bucket.addressable_data(0), home) for bucket in moved]


@functools.lru_cache(maxsize=4)
def _mesh(platform: str) -> Mesh:
    """One device of each process, in the order of the processes."""
    first: dict[int, Any] = {}
    for device in jax.devices(platform):
        if device.process_index not in first or device.id < first[device.process_index].id:
            first[device.process_index] = device
    return Mesh(np.array([first[p] for p in sorted(first)]), ("process",))


@functools.lru_cache(maxsize=8)
def _program(how: str, mesh: Mesh) -> Any:
    def gather(buckets: list[Any]) -> list[Any]:
        return [jax.lax.all_gather(b, "process", axis=0, tiled=True) for b in buckets]

    def scatter(buckets: list[Any]) -> list[Any]:
        return [jax.lax.all_to_all(b, "process", split_axis=1, concat_axis=0) for b in buckets]

    body, out = (gather, P()) if how == "gather" else (scatter, P(None, "process"))
    return jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=P("process"), out_specs=out, check_vma=False)
    )


def _widths(avals: Avals) -> list[list[int]]:
    """Numbers of the leaves of each element width."""
    widths: dict[int, list[int]] = {}
    for number, (_, dtype, _) in enumerate(avals):
        if not jnp.issubdtype(dtype, jnp.number) and dtype != jnp.bool_:
            raise UnsupportedLeafError(f"contributions must be numbers, found {dtype}")
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise UnsupportedLeafError(f"{dtype} contributions: pass real and imaginary part apart")
        widths.setdefault(dtype.itemsize, []).append(number)
    return list(widths.values())


def _types(avals: Avals) -> dict[Any, list[int]]:
    """Numbers of the leaves of each type."""
    types: dict[Any, list[int]] = {}
    for number, (_, dtype, _) in enumerate(avals):
        types.setdefault(jnp.dtype(dtype), []).append(number)
    return types


def _leaves(lines: Sequence[Any], avals: Avals, groups: Iterable[list[int]]) -> list[Any]:
    """The leaves of a value, from the unsigned integers of each group of leaves in a row."""
    leaves: list[Any] = [None] * len(avals)
    for line, numbers in zip(lines, groups, strict=True):
        start = 0
        for number in numbers:
            shape, dtype, weak = avals[number]
            stop = start + math.prod(shape)
            leaves[number] = from_bits(line[start:stop], shape, dtype, weak)
            start = stop
    return leaves


@functools.partial(jax.jit, static_argnums=1)
def _pack(roots: list[list[Any]], rows: int) -> list[Any]:
    """One array [1, rows, elements] of unsigned integers for each width. Padding is never read."""
    avals = [*map(type_of, roots[0])]
    buckets = []
    for numbers in _widths(avals):
        lines = [jnp.concatenate([bits(root[n]) for n in numbers]) for root in roots]
        lines += [lines[-1]] * (rows - len(lines))
        buckets.append(jnp.stack(lines)[None])
    return buckets


@functools.partial(jax.jit, static_argnums=(1, 2))
def _cut(buckets: list[Any], avals: Any, processes: int) -> list[Any]:
    """For each type [1, processes, rows, elements]: a slice of every value for each process."""
    whole = _unpack(buckets, avals, (buckets[0].shape[1],))[0]
    cut = []
    for numbers in _types(avals).values():
        lines = jnp.stack([jnp.concatenate([bits(row[n]) for n in numbers]) for row in whole])
        padding = -lines.shape[1] % processes
        lines = jnp.pad(lines, ((0, 0), (0, padding)))
        cut.append(lines.reshape(len(whole), processes, -1).swapaxes(0, 1)[None])
    return cut


@functools.partial(jax.jit, static_argnums=(1, 2))
def _typed(cut: list[Any], avals: Any, counts: tuple[int, ...]) -> list[list[list[Any]]]:
    """The result of `scatter`, [processes, ..., rows, elements], as values of one leaf per type."""
    types = list(_types(avals))
    lines = [c.reshape(len(counts), -1, c.shape[-1]) for c in cut]
    return [
        [
            [
                from_bits(line[p, row], line.shape[-1:], t)
                for line, t in zip(lines, types, strict=True)
            ]
            for row in range(count)
        ]
        for p, count in enumerate(counts)
    ]


@functools.partial(jax.jit, static_argnums=1)
def _join(lines: list[Any], avals: Any) -> list[Any]:
    """The leaves, from the slices of every process ([processes, elements] for each type)."""
    return _leaves([line.reshape(-1) for line in lines], avals, _types(avals).values())


@functools.partial(jax.jit, static_argnums=(1, 2))
def _unpack(buckets: list[Any], avals: Avals, counts: tuple[int, ...]) -> list[list[list[Any]]]:
    groups = _widths(avals)
    return [
        [_leaves([b[process, row] for b in buckets], avals, groups) for row in range(count)]
        for process, count in enumerate(counts)
    ]


def bits(leaf: Any) -> Any:
    """The leaf, flat, as unsigned integers of its width, but of at least one byte."""
    unsigned = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
    flat = leaf.reshape(-1)
    if (width := packed_width(leaf.dtype)) is not None:
        return jax.lax.bitcast_convert_type(flat, jnp.dtype(f"uint{width}")).astype(unsigned)
    return (
        flat.astype(unsigned)
        if leaf.dtype == jnp.bool_
        else jax.lax.bitcast_convert_type(flat, unsigned)
    )


def packed_width(dtype: Any) -> int | None:
    """Bits of an element where several share a byte (int4, float4_e2m1fn); None elsewhere."""
    info = (
        jnp.iinfo if jnp.issubdtype(dtype, jnp.integer)
        else jnp.finfo if jnp.issubdtype(dtype, jnp.floating)
        else None
    )  # fmt: skip
    width = None if info is None else int(info(dtype).bits)
    return width if width is not None and width < 8 else None


def from_bits(words: Any, shape: Any, dtype: Any, weak: bool = False) -> Any:
    """The inverse of `bits`."""
    words = words.reshape(shape)
    if (width := packed_width(dtype)) is not None:
        words = words.astype(jnp.dtype(f"uint{width}"))
    if dtype == jnp.bool_:
        return words.astype(bool)
    values = jax.lax.bitcast_convert_type(words, dtype)
    return weaken(values) if weak else values
