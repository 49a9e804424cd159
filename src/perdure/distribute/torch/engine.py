"""The PyTorch engine.

Owns what PyTorch keeps globally and what decides bits: thread count, deterministic algorithms, the
random generators. Invariant: a logical replica computes with one thread count, from the same buffers,
under random numbers that are a function of (seed, step, replica). On the CPU a process may have several
devices, which are threads; of accelerators it has one.

State is changed in place, as is the habit of PyTorch, and returned.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch

from perdure.distribute import pytree
from perdure.distribute.engine import Grad, Guard, Merge, Scalar, Stream, Update, Work
from perdure.distribute.torch import buffers as torch_buffers
from perdure.distribute.torch import group as torch_group
from perdure.distribute.torch import threads as torch_threads
from perdure.distribute.torch.environment import environment, not_deterministic
from perdure.distribute.torch.replicas import TorchGuard
from perdure.errors import StateError, TopologyError
from perdure.process_group import Processes

# Threads inside an operation. Replicas in threads of their own gain more on a CPU than threads inside
# operations do (docs/DESIGN.md), and OpenMP's threads spin while they wait for each other: on a machine
# shared with other programs two of them took 2.5 to 4 times as long as one.
# OMP_NUM_THREADS does not count: torchrun sets it by the number of processes, which is topology.
THREADS = 1

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"

# glibc's malloc keeps up to this many bytes that are free, for the next step.
KEPT = 1 << 30
KEPT_BY_OLD = 32 << 20


class TorchEngine:
    """PyTorch on the devices of a process. See perdure.distribute.engine.Engine."""

    def __init__(self, devices: Any, processes: Processes, threads: int | None) -> None:
        if threads is not None and threads < 1:
            raise TopologyError(f"threads must be at least 1, got {threads}")
        self.processes = processes
        self.devices = _choose(devices)
        self.devices_per_process = tuple(
            int(count) for count in processes.gather(str(len(self.devices)).encode())
        )
        # Settings of the whole process: an operation without a deterministic form raises.
        self._threads = threads or THREADS
        torch.set_num_threads(self._threads)
        torch.use_deterministic_algorithms(True)
        # It only guards against reading what `torch.empty` left, and took 7% of a convolutional step.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
        torch.backends.cudnn.benchmark = False
        self._told = False
        self._placed: Any = None
        if self.devices[0].type == "cpu":
            keep_memory(os.environ)

    def recipe(self) -> dict[str, Scalar]:
        return environment(self.devices[0])

    def place(self, state: Any) -> list[Any]:
        if state is not self._placed:  # most often the same object in every step
            torch_buffers.refuse_sharded(state)
            self._placed = state
        return [state]

    def collect(self, values: list[Any]) -> Any:
        return values[0]

    def put(self, value: Any, device: Any) -> Any:
        def move(leaf: Any) -> Any:
            if isinstance(leaf, np.ndarray):
                leaf = torch.from_numpy(np.asarray(leaf, order="C"))
            return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

        return pytree.transform(move, value)

    def grad(self, fn: Grad, state: Any, share: Any, stream: Stream) -> Any:
        with self._seeded(stream):
            result, buffers = torch_buffers.isolated(
                state, lambda: fn(state, share, self.key(stream))
            )
        for path, leaf in pytree.flatten(result):
            if not isinstance(leaf, torch.Tensor):
                raise StateError(
                    f"{path or 'the result'}: contributions must be tensors, found "
                    f"{type(leaf).__name__}"
                )
        return {
            "contributions": pytree.transform(lambda leaf: leaf.detach(), result),
            "buffers": buffers,
        }

    def add(self, left: Any, right: Any) -> Any:
        # Never in place: one tensor may stand at two places of a tree.
        one = [leaf for _, leaf in pytree.flatten(left)]
        other = [leaf for _, leaf in pytree.flatten(right)]
        with torch.no_grad():
            sums = torch._foreach_add(one, other)  # pyright: ignore[reportPrivateImportUsage]
        return pytree.rebuild(left, iter(sums))

    def update(self, fn: Update, state: Any, total: Any, stream: Stream) -> tuple[Any, Any]:
        self._check_determinism()
        # `stream.replica` is V here: the number of terms, and a stream that no replica has.
        with self._seeded(stream):
            torch_buffers.write(state, total["buffers"], stream.replica)
            result = fn(state, total["contributions"])
        if not isinstance(result, tuple) or len(result) != 2:
            name = getattr(fn, "__name__", repr(fn))
            raise StateError(f"{name} must return (state, logs), got {type(result).__name__}")
        return result

    def runner(self) -> Callable[[Work, list[Any]], None]:
        return torch_threads.Threads(len(self.devices), self._threads)

    def together(self, grad: Grad, update: Update, replicas: int, seed: int) -> None:
        return None

    def exchange(
        self, roots: list[Any], counts: tuple[int, ...], merge: Merge | None = None
    ) -> Any:
        return torch_group.exchange(self.devices[0], roots, counts, merge)

    def call(
        self,
        fn: Callable[..., Any],
        device: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        stream: Stream | None = None,
    ) -> Any:
        def arrays(value: Any) -> Any:
            # What holds none stays the same object: a list may be there to be appended to.
            held = any(isinstance(leaf, np.ndarray) for _, leaf in pytree.flatten(value))
            return self.put(value, device) if held else value

        with contextlib.nullcontext() if stream is None else self._seeded(stream):
            return fn(*map(arrays, args), **{name: arrays(kwargs[name]) for name in kwargs})

    def guard(self, strategy: Any) -> Guard:
        return TorchGuard(strategy)

    def random_state(self) -> Any:
        return [generator.get_state() for generator in self._generators()]

    def set_random_state(self, state: Any) -> None:
        for generator, old in zip(self._generators(), state, strict=True):
            generator.set_state(old)

    def settings(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        kind = self.devices[0].type
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        autocast, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

        @contextlib.contextmanager
        def enter() -> Iterator[None]:
            with (
                torch.inference_mode(inference),
                torch.set_grad_enabled(grad),
                torch.autocast(kind, dtype, autocast),
            ):
                yield

        return enter

    def key(self, stream: Stream) -> torch.Generator:
        return torch.Generator(self.devices[0]).manual_seed(_mixed(stream))

    def map(self, fn: Callable[[Any], Any], value: Any) -> Any:
        with torch.no_grad():
            return pytree.transform(lambda leaf: fn(torch.as_tensor(leaf)), value)

    def stack(self, values: list[Any]) -> Any:
        columns = zip(*([leaf for _, leaf in pytree.flatten(v)] for v in values), strict=True)
        return pytree.rebuild(
            values[0], iter([torch.stack([torch.as_tensor(x) for x in c]) for c in columns])
        )

    def signature(self, value: Any) -> Hashable:
        return pytree.structure(value), tuple(
            (leaf.shape, leaf.dtype) for _, leaf in pytree.flatten(value)
        )

    def describe(self, value: Any) -> dict[str, str]:
        return {
            path: f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
            for path, leaf in pytree.flatten(value)
        }

    def _check_determinism(self) -> None:
        """Say it once when the program has switched off what the constructor switched on."""
        found = "" if self._told else not_deterministic(self.devices[0].type)
        if found:
            self._told = True
            warnings.warn(
                f"PyTorch runs with {found}, so that no two runs need to give the same bits. Leave it "
                "as the strategy set it",
                RuntimeWarning,
                stacklevel=3,
            )

    @contextlib.contextmanager
    def _seeded(self, stream: Stream) -> Iterator[None]:
        """The global generators under `stream`; afterwards as before.

        What the user draws between two steps must not depend on which replicas ran here.
        """
        if (own := torch_threads.own_generator()) is not None:
            own.manual_seed(_mixed(stream))
            yield
            return
        states = self.random_state()
        for generator in self._generators():
            # Not torch.manual_seed, which formats a stack trace for a CUDA that is not there.
            generator.manual_seed(_mixed(stream))
        try:
            yield
        finally:
            self.set_random_state(states)

    def _generators(self) -> list[torch.Generator]:
        generators = [torch.default_generator]
        if self.devices[0].type == "cuda":
            generators.append(torch.cuda.default_generators[self.devices[0].index])
        return generators


def _mixed(stream: Stream) -> int:
    """63 bits of (seed, step, replica), by SplitMix64 (see perdure.data.permutation)."""
    mask, value = 2**64 - 1, 0
    for part in stream:
        value = ((value + 0x9E3779B97F4A7C15) ^ part) & mask
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        value ^= value >> 31
    return value >> 1


def keep_memory(environ: Mapping[str, str]) -> bool:
    """Have glibc's malloc keep what a step frees; True where it was told so.

    Left alone it gives large blocks back to the system and takes them again in every step, page by
    page: 8,000 page faults and a third of the time of a step of the tutorial's network. What the
    environment says of malloc counts more, and other C libraries have no such setting.
    """
    if any(name in environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")) or (
        "glibc.malloc" in environ.get("GLIBC_TUNABLES", "")
    ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    trim, mmap = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    if mallopt is None:
        return False
    # glibc before 2.35 takes no more than 32 MiB. Either setting ends its own adaptation, so that
    # the one must not be made where the other was refused.
    return bool(mallopt(mmap, KEPT) or mallopt(mmap, KEPT_BY_OLD)) and bool(mallopt(trim, KEPT))


def fix_cublas(environ: MutableMapping[str, str], started: bool) -> None:
    """Give cuBLAS workspaces of a fixed size: without, its results may differ from call to call.

    TopologyError when CUDA has started without: cuBLAS reads the variable once.
    """
    if environ.get(CUBLAS, "") in (":4096:8", ":16:8"):
        return
    if started or CUBLAS in environ:
        found = f"{CUBLAS}={environ[CUBLAS]}" if CUBLAS in environ else f"no {CUBLAS}"
        raise TopologyError(
            f"CUDA has started with {found}, under which results may differ from call to call; "
            f"expected :4096:8 or :16:8. Make the strategy before anything that uses CUDA, or set "
            f"{CUBLAS}=:4096:8 in the environment"
        )
    environ[CUBLAS] = ":4096:8"


def _choose(devices: Any) -> tuple[torch.device, ...]:
    if isinstance(devices, int):
        if devices < 1:
            raise TopologyError(f"devices must be at least 1, got {devices}")
        devices = ["cpu"] * devices
    if not isinstance(devices, (list, tuple)):
        devices = ["cpu" if devices is None else devices]
    chosen: tuple[torch.device, ...] = tuple(torch.device(device) for device in devices)
    if len(chosen) == 0 or (len(chosen) > 1 and any(device.type != "cpu" for device in chosen)):
        raise TopologyError(
            f"a process has one accelerator, or any number of CPU devices, and {devices!r} was asked "
            "for; start one process per accelerator with MultiWorkerMirroredStrategy (torchrun does)"
        )
    if chosen[0].type == "cuda":
        fix_cublas(os.environ, torch.cuda.is_initialized())
    if chosen[0].type == "cuda" and not (chosen[0].index or 0) < torch.cuda.device_count():
        raise TopologyError(
            f"{chosen[0]} was asked for, and PyTorch {torch.__version__} sees "
            f"{torch.cuda.device_count()} CUDA devices here"
        )
    if chosen[0].type == "cuda" and chosen[0].index is None:
        return (torch.device("cuda", torch.cuda.current_device()),)
    return chosen
