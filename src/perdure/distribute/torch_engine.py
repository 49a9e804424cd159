"""The PyTorch engine, and the strategies on it.

Owns what PyTorch keeps globally and what decides bits: thread count, deterministic algorithms, the
random generators. Invariant: a logical replica computes with one thread count, from the same buffers,
under random numbers that are a function of (seed, step, replica). One process has one device.

State is changed in place, as is the habit of PyTorch, and returned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from perdure.checkpoint.processes import Processes, SingleProcess
from perdure.distribute import nest, torch_buffers, torch_group
from perdure.distribute.cluster import Cluster, ClusterResolver, resolve
from perdure.distribute.engine import Grad, Scalar, Stream, Update
from perdure.distribute.strategy import Strategy
from perdure.errors import StateError, TopologyError

# On 2 cores shared with other programs, one process took 2.5 to 4 times as long for a step of the
# tutorial's network with two threads as with one (OpenMP's threads spin while they wait for each
# other). Its gradient alone, on a quieter machine, took 0.6 of the time with two; hence `threads`.
# OMP_NUM_THREADS does not count: torchrun sets it by the number of processes, which is topology.
THREADS = 1


class TorchEngine:
    """PyTorch on the one device of a process. See perdure.distribute.engine.Engine."""

    def __init__(self, device: Any, processes: Processes, threads: int | None) -> None:
        if threads is not None and threads < 1:
            raise TopologyError(f"threads must be at least 1, got {threads}")
        self.processes = processes
        self.devices = (_device(device),)
        self.devices_per_process = (1,) * processes.count
        # Settings of the whole process: an operation without a deterministic form raises.
        torch.set_num_threads(threads or THREADS)
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False

    def recipe(self) -> dict[str, Scalar]:
        return {
            "engine": "torch",
            "engine_version": f"torch {torch.__version__}",
            "platform": self.devices[0].type,
            "threads": torch.get_num_threads(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "mkldnn": bool(torch.backends.mkldnn.enabled),
            "matmul_precision": torch.get_float32_matmul_precision(),
            "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        }

    def place(self, state: Any) -> list[Any]:
        return [state]

    def collect(self, values: list[Any]) -> Any:
        return values[0]

    def put(self, value: Any, device: Any) -> Any:
        def move(leaf: Any) -> Any:
            if isinstance(leaf, np.ndarray):
                leaf = torch.from_numpy(np.ascontiguousarray(leaf))
            return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

        return nest.transform(move, value)

    def grad(self, fn: Grad, state: Any, share: Any, stream: Stream) -> Any:
        with self._seeded(stream):
            result, buffers = torch_buffers.isolated(
                state, lambda: fn(state, share, self.key(stream))
            )
        for path, leaf in nest.flatten(result):
            if not isinstance(leaf, torch.Tensor):
                raise StateError(
                    f"{path or 'the result'}: contributions must be tensors, found "
                    f"{type(leaf).__name__}"
                )
        return {
            "contributions": nest.transform(lambda leaf: leaf.detach(), result),
            "buffers": buffers,
        }

    def add(self, left: Any, right: Any) -> Any:
        # Never in place: one tensor may stand at two places of a tree.
        one = [leaf for _, leaf in nest.flatten(left)]
        other = [leaf for _, leaf in nest.flatten(right)]
        with torch.no_grad():
            sums = torch._foreach_add(one, other)  # pyright: ignore[reportPrivateImportUsage]
        return nest.rebuild(left, iter(sums))

    def update(self, fn: Update, state: Any, total: Any, stream: Stream) -> tuple[Any, Any]:
        # `stream.replica` is V here: the number of terms, and a stream that no replica has.
        with self._seeded(stream):
            torch_buffers.write(state, total["buffers"], stream.replica)
            result = fn(state, total["contributions"])
        if not isinstance(result, tuple) or len(result) != 2:
            name = getattr(fn, "__name__", repr(fn))
            raise StateError(f"{name} must return (state, logs), got {type(result).__name__}")
        return result

    def exchange(self, roots: list[Any], counts: tuple[int, ...]) -> list[list[Any]]:
        return torch_group.exchange(self.devices[0], roots, counts)

    def call(
        self, fn: Callable[..., Any], device: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        return fn(*args, **kwargs)

    def key(self, stream: Stream) -> torch.Generator:
        return torch.Generator(self.devices[0]).manual_seed(_mixed(stream))

    def map(self, fn: Callable[[Any], Any], value: Any) -> Any:
        with torch.no_grad():
            return nest.transform(lambda leaf: fn(torch.as_tensor(leaf)), value)

    def signature(self, value: Any) -> Hashable:
        return nest.structure(value), tuple(
            (leaf.shape, leaf.dtype) for _, leaf in nest.flatten(value)
        )

    def describe(self, value: Any) -> dict[str, str]:
        return {
            path: f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
            for path, leaf in nest.flatten(value)
        }

    @contextlib.contextmanager
    def _seeded(self, stream: Stream) -> Iterator[None]:
        """The global generators under `stream`; afterwards as before.

        What the user draws between two steps must not depend on which replicas ran here.
        """
        generators = [torch.default_generator]
        if self.devices[0].type == "cuda":
            generators.append(torch.cuda.default_generators[self.devices[0].index])
        states = [generator.get_state() for generator in generators]
        for generator in generators:
            # Not torch.manual_seed, which formats a stack trace for a CUDA that is not there.
            generator.manual_seed(_mixed(stream))
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def _mixed(stream: Stream) -> int:
    """63 bits of (seed, step, replica), by SplitMix64 (see perdure.data.permutation)."""
    mask, value = 2**64 - 1, 0
    for part in stream:
        value = ((value + 0x9E3779B97F4A7C15) ^ part) & mask
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        value ^= value >> 31
    return value >> 1


def _device(device: Any) -> torch.device:
    chosen = torch.device("cpu" if device is None else device)
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen


class MirroredStrategy(Strategy):
    """One process with one device.

    `devices`: None (the CPU), a device, or a list of one. For more devices start more processes, with
    MultiWorkerMirroredStrategy. `threads` is part of the recipe (default 1).
    """

    def __init__(
        self,
        devices: Any = None,
        replicas: int | None = None,
        *,
        seed: int = 0,
        threads: int | None = None,
    ) -> None:
        if isinstance(devices, int) and devices == 1:
            devices = None
        if isinstance(devices, (list, tuple)) and len(devices) == 1:
            devices = devices[0]
        if isinstance(devices, (int, list, tuple)):
            raise TopologyError(
                f"PyTorch runs one device per process, and {devices!r} was asked for; start one "
                "process per device with MultiWorkerMirroredStrategy (torchrun does)"
            )
        super().__init__(TorchEngine(devices, SingleProcess(), threads), replicas, seed=seed)


class OneDeviceStrategy(MirroredStrategy):
    """One device; by default the CPU."""

    def __init__(
        self,
        device: Any = None,
        replicas: int | None = None,
        *,
        seed: int = 0,
        threads: int | None = None,
    ) -> None:
        super().__init__(device, replicas, seed=seed, threads=threads)


class MultiWorkerMirroredStrategy(Strategy):
    """A group of processes with one device each.

    The group is `cluster_resolver`, or what the environment describes (TF_CONFIG, JAX_*, torchrun's).
    Raises WorkerLostError from a step when another process dies: save nothing, leave, and let the
    whole group be started again from the last checkpoint.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | Cluster | None = None,
        replicas: int | None = None,
        *,
        device: Any = None,
        seed: int = 0,
        threads: int | None = None,
    ) -> None:
        processes = torch_group.join(resolve(cluster_resolver))
        super().__init__(TorchEngine(device, processes, threads), replicas, seed=seed)
