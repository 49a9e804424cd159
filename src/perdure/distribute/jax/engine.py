"""The JAX engine: states, shares and partial sums on the local devices of a process.

It computes with the programs of `perdure.distribute.jax.programs`, or with programs of
`perdure.distribute.jax.fused` that are proven to be the same; everything else only moves bytes.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from perdure.distribute.engine import (
    EagerRun,
    FusedStep,
    Grad,
    Merge,
    Scalar,
    Stream,
    SumOverReplicas,
    Update,
    Work,
    in_turns,
)
from perdure.distribute.jax import group as jax_group
from perdure.distribute.jax.fused import ReferencePrograms, fused_step
from perdure.distribute.jax.programs import (
    add_program,
    as_array,
    grad_program,
    make_key,
    name_of,
    refuse_mesh,
    thread_settings,
    traced,
    update_program,
    words,
)
from perdure.distribute.jax.xla_settings import ask_for_determinism, check_determinism
from perdure.distribute.topology import tensorflow_device
from perdure.errors import TopologyError
from perdure.runtime.environment import jax_settings
from perdure.runtime.excluded_devices import without_excluded
from perdure.runtime.process_group import Processes, gather_values

Devices = int | Sequence[Any] | None


class JaxTrees:
    """See perdure.distribute.engine.Trees."""

    def flatten(self, value: Any) -> tuple[list[Any], Hashable]:
        return jax.tree.flatten(value)

    def paths(self, value: Any) -> list[str]:
        return [name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(value)]

    def map(self, fn: Callable[[Any], Any], value: Any) -> Any:
        return jax.tree.map(lambda leaf: fn(jnp.asarray(leaf)), value)


class JaxEngine:
    """JAX on some local devices of one process. See perdure.distribute.engine.Engine."""

    def __init__(self, devices: Devices, processes: Processes, threads: int | str) -> None:
        self.processes = processes
        self.trees = JaxTrees()
        asked = ask_for_determinism()
        self.devices = without_excluded(_choose(devices))
        self._deterministic = check_determinism(asked, self.devices[0].platform)
        self.devices_per_process = tuple(gather_values(processes, len(self.devices)))
        self._threads = threads
        # `NamedSharding(P())` over the local devices only: every process holds whole arrays.
        self._everywhere = NamedSharding(Mesh(np.array(self.devices), ("device",)), P())
        # The arrays of the last state, by identity, with their parts: taking them apart again costs
        # more than all else that a step does in Python.
        self._parts: dict[int, tuple[Any, Sequence[Any]]] = {}

    def recipe(self) -> dict[str, Scalar]:
        return jax_settings(self.devices[0], self._threads, self._deterministic)

    def place(self, state: Any) -> list[Any]:
        paths, treedef = jax.tree_util.tree_flatten_with_path(state)
        columns = [self._spread(path, leaf) for path, leaf in paths]
        return [
            jax.tree.unflatten(treedef, [column[d] for column in columns])
            for d in range(len(self.devices))
        ]

    def replicate(self, values: list[Any]) -> Any:
        if len(values) == 1:
            return values[0]
        columns = list(zip(*(jax.tree.leaves(value) for value in values), strict=True))
        everywhere = self._everywhere
        leaves = [
            # `make_array` would make a weak type a strong one. An array of keys has no such attribute.
            jax.device_put(column[0], everywhere)
            if getattr(column[0], "weak_type", False)
            else jax.make_array_from_single_device_arrays(column[0].shape, everywhere, column)
            for column in map(list, columns)
        ]
        self._parts = {
            id(leaf): (leaf, column) for leaf, column in zip(leaves, columns, strict=True)
        }
        return jax.tree.unflatten(jax.tree.structure(values[0]), leaves)

    def put(self, value: Any, device: Any) -> Any:
        return jax.device_put(value, device)

    def grad(self, fn: Grad, state: Any, share: Any, stream: Stream) -> Any:
        numbers = words(stream.seed), np.uint32(stream.step), np.uint32(stream.replica)
        try:
            return grad_program(fn)(state, share, *numbers)
        except ValueError as error:
            refuse_mesh(fn, error)
            raise

    def add(self, left: Any, right: Any) -> Any:
        return add_program(left, right)

    def update(self, fn: Update, state: Any, total: Any, stream: Stream) -> tuple[Any, Any]:
        try:
            return update_program(fn)(state, total)
        except ValueError as error:
            refuse_mesh(fn, error)
            raise

    def runner(self) -> Callable[[Work, list[Any]], None]:
        return _Runner(len(self.devices))

    def fused_step(self, grad: Grad, update: Update, replicas: int, seed: int) -> FusedStep | str:
        if self.processes.count > 1:
            return f"the sum goes through {self.processes.count} processes"
        programs = ReferencePrograms(grad_program(grad), add_program, update_program(update))
        return fused_step(programs, self._everywhere, replicas, words(seed))

    def eager_run(self, sum_over_replicas: SumOverReplicas) -> EagerRun:
        return JaxEagerRun(self.devices)

    def exchange(
        self, roots: list[Any], counts: tuple[int, ...], merge: Merge | None = None
    ) -> Any:
        return jax_group.exchange(self.devices[0], roots, counts, self.processes.index, merge)

    def key(self, stream: Stream) -> Any:
        return make_key(words(stream.seed), np.uint32(stream.step), np.uint32(stream.replica))

    def _spread(self, path: Any, leaf: Any) -> Sequence[Any]:
        """The same array on every local device."""
        # The array is held beside its parts, so that its identity cannot be given to another.
        if id(leaf) in self._parts:
            return self._parts[id(leaf)][1]
        if isinstance(leaf, jax.core.Tracer):
            raise traced(path)
        if isinstance(leaf, jax.Array):
            if leaf.sharding == self._everywhere:
                shards = {shard.device: shard.data for shard in leaf.addressable_shards}
                return [shards[device] for device in self.devices]
            if len(self.devices) == 1 and leaf.committed and leaf.devices() == {self.devices[0]}:
                return [leaf]
        array = as_array(path, leaf)
        return [jax.device_put(array, device) for device in self.devices]


class JaxEagerRun(EagerRun):
    """See EagerRun. JAX has no global generator, and its arrays cannot be changed in place."""

    def __init__(self, devices: Sequence[Any]) -> None:
        self._devices = devices

    def call(
        self,
        fn: Callable[..., Any],
        device: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        stream: Stream | None = None,
    ) -> Any:
        if len(self._devices) > 1:
            args, kwargs = jax.tree.map(
                functools.partial(_on, device=device), (list(args), dict(kwargs))
            )
        with jax.default_device(device):
            return fn(*args, **kwargs)

    def thread_settings(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        return thread_settings()


class _Runner:
    """Dispatches in turns; the first time in threads, because each device compiles its own copy."""

    def __init__(self, devices: int) -> None:
        self._devices = devices
        self._compiled = devices == 1

    def __call__(self, work: Work, states: list[Any]) -> None:
        if self._compiled:
            in_turns(work, states, self._devices)
            return
        settings = thread_settings()

        def drain(turns: Any) -> None:
            with settings():  # the caller's, as in all later steps
                deque(turns, 0)

        with ThreadPoolExecutor(self._devices) as pool:
            works = map(work, range(self._devices), states)
            for future in [pool.submit(drain, turns) for turns in works]:
                future.result()
        self._compiled = True


def _device(name: Any, local: list[Any]) -> Any:
    if (found := tensorflow_device(name)) is None:
        return name
    platform, number = found
    with contextlib.suppress(RuntimeError, IndexError):
        return jax.local_devices(backend=platform)[number]
    raise TopologyError(f"devices: expected devices of this process, {local}, found {name!r}.")


def _choose(devices: Devices) -> tuple[Any, ...]:
    local = jax.local_devices()
    if devices is None:
        return tuple(local)
    if isinstance(devices, int):
        if devices < 1:
            raise TopologyError(f"devices: expected at least 1, found {devices}")
        if devices > len(local):
            raise TopologyError(
                f"{devices} devices were asked for and this process has {len(local)}. On CPU, set "
                f"JAX_NUM_CPU_DEVICES={devices} before JAX starts"
            )
        return tuple(local[:devices])
    if isinstance(devices, str) and not tensorflow_device(devices):
        raise TopologyError(
            f"devices: expected a number, a list of devices or None, found {devices!r}; for instance "
            f"jax.local_devices(backend={devices!r})"
        )
    chosen = [devices] if isinstance(devices, str) else devices
    chosen = tuple(_device(each, local) for each in chosen)
    if not chosen or len(set(chosen)) != len(chosen):
        raise TopologyError(f"devices: expected different devices, found {list(chosen)}")
    foreign = [device for device in chosen if device not in local]
    if foreign:
        raise TopologyError(f"{foreign} are not devices of this process, which has {local}")
    return chosen


def _on(leaf: Any, device: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    for shard in leaf.addressable_shards:
        if shard.device == device and leaf.is_fully_replicated:
            return shard.data
    return jax.device_put(leaf, device)
