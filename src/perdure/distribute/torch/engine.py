"""The PyTorch engine.

A replica computes with one thread count, deterministic algorithms, equal buffers, and random
numbers that are a function of (seed, step, replica). A process has one accelerator, or CPU devices
that take turns. `update` changes the state in place.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Mapping, MutableMapping
from functools import partial
from typing import Any

import numpy as np
import torch

from perdure.distribute import pytree
from perdure.distribute.engine import (
    EagerRun,
    Grad,
    Merge,
    Scalar,
    Stream,
    SumOverReplicas,
    Update,
    Work,
)
from perdure.distribute.topology import tensorflow_device
from perdure.distribute.torch import buffers as torch_buffers
from perdure.distribute.torch import group as torch_group
from perdure.distribute.torch import optimizer_calls
from perdure.distribute.torch import state_view as torch_state
from perdure.distribute.torch.compiled import CompiledGrads, warn_of_compiled
from perdure.distribute.torch.eager import TorchEagerRun, make_generator, seed
from perdure.distribute.torch.first_step import FirstStep
from perdure.distribute.torch.state_view import StateView
from perdure.errors import StateError, TopologyError
from perdure.runtime.environment import torch_not_deterministic, torch_settings
from perdure.runtime.excluded_devices import without_excluded
from perdure.runtime.process_group import Processes, gather_values

# Threads inside an operation. Processes gain more on a CPU than threads inside operations do, and
# OpenMP's threads spin while they wait for each other: on a machine shared with other programs two of
# them took 2.5 to 4 times as long as one.
# OMP_NUM_THREADS does not count: torchrun sets it by the number of processes, which is topology.
THREADS = 1

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"

# glibc's malloc keeps up to this many bytes that are free, for the next step.
KEPT = 1 << 30
KEPT_BY_OLD = 32 << 20


class TorchTrees:
    """See perdure.distribute.engine.Trees."""

    def flatten(self, value: Any) -> tuple[list[Any], Hashable]:
        return pytree.leaves_and_structure(value)

    def paths(self, value: Any) -> list[str]:
        return [path for path, _ in pytree.flatten(value)]

    def map(self, fn: Callable[[Any], Any], value: Any) -> Any:
        with torch.no_grad():
            leaves = map(torch.as_tensor, pytree.leaves(value))
            return pytree.rebuild(value, map(fn, leaves))


class _Views(threading.local):
    """What a thread of the program knows of the state that it placed last."""

    placed: StateView | None = None
    # From the replicas of a first step to its update.
    first: FirstStep | None = None


class TorchEngine:
    """PyTorch on the devices of a process. See perdure.distribute.engine.Engine."""

    def __init__(
        self, devices: Any, processes: Processes, threads: int | None, compile: str | None = None
    ) -> None:
        if threads is not None and threads < 1:
            raise TopologyError(f"threads must be at least 1, got {threads}")
        self.processes = processes
        self.trees = TorchTrees()
        self.devices = without_excluded(_choose(devices))
        self.devices_per_process = tuple(gather_values(processes, len(self.devices)))
        # Settings of the whole process: an operation without a deterministic form raises.
        self._threads = threads or THREADS
        torch.set_num_threads(self._threads)
        torch.use_deterministic_algorithms(True)
        # It only guards against reading what `torch.empty` left, and took 7% of a convolutional step.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
        torch.backends.cudnn.benchmark = False
        self._warned = False
        self._compiled = None if compile is None else CompiledGrads(compile)
        self._views = _Views()
        if self.devices[0].type == "cpu":
            keep_memory(os.environ)

    def recipe(self) -> dict[str, Scalar]:
        recipe = torch_settings(self.devices[0])
        if self._compiled is not None:
            compiler = self._compiled.describe(self.devices[0].type)
            recipe["settings"] = f"{recipe['settings']} {compiler}".strip()
        return recipe

    def place(self, state: Any) -> list[Any]:
        view = self._views.placed
        if view is None or view.state is not state:
            torch_state.refuse_sharded(state)
        if view is None or not view.is_of(state):
            self._views.placed = self._new_view(state)
        return [state]

    def replicate(self, values: list[Any]) -> Any:
        return values[0]

    def put(self, value: Any, device: Any) -> Any:
        def move(leaf: Any) -> Any:
            if isinstance(leaf, np.ndarray):
                leaf = torch.from_numpy(np.asarray(leaf, order="C"))
            if isinstance(leaf, torch.Tensor) and leaf.device != device:
                return leaf.to(device)
            return leaf

        return pytree.transform(move, value)

    def grad(self, fn: Grad, state: Any, share: Any, stream: Stream) -> Any:
        compute = fn if self._compiled is None else partial(self._compiled, fn)
        view = self._view(state)
        restore, token = seed(self.devices[0], stream), torch_state.use_view(view)
        try:
            result, buffers = torch_buffers.isolated(
                view, share, lambda: compute(state, share, self.key(stream))
            )
        finally:
            torch_state.forget_view(token)
            restore()
        kinds: list[Any] = []

        def without_graph(leaf: Any) -> Any:
            kinds.append(leaf.layout if isinstance(leaf, torch.Tensor) else None)
            if type(leaf) is torch.Tensor and not leaf.requires_grad:
                return leaf  # from autograd.grad
            return leaf if kinds[-1] is None else leaf.detach()

        contributions = pytree.transform(without_graph, result)
        if kinds.count(torch.strided) < max(len(kinds), 1):
            raise _unusable(fn, result)
        return {"contributions": contributions, "buffers": buffers}

    def add(self, left: Any, right: Any) -> Any:
        # Never in place: one tensor may stand at two places of a tree.
        with torch.no_grad():
            sums = torch._foreach_add(pytree.leaves(left), pytree.leaves(right))  # pyright: ignore[reportPrivateImportUsage]
        return pytree.rebuild(left, iter(sums))

    def update(self, fn: Update, state: Any, total: Any, stream: Stream) -> tuple[Any, Any]:
        self._check_determinism()
        # `stream.replica` is V here: the number of terms, and a stream that no replica has.
        restore = seed(self.devices[0], stream)
        token = torch_state.use_view(self._views.placed)
        first, self._views.first = self._views.first, None
        try:
            if total["buffers"]:
                with torch_buffers.written(self._view(state), total["buffers"], stream.replica):
                    result = fn(state, total["contributions"])
            else:
                result = fn(state, total["contributions"])
        finally:
            torch_state.forget_view(token)
            restore()
        if first is not None:
            first.warn_of_outside()
        if not isinstance(result, tuple) or len(result) != 2:
            name = getattr(fn, "__name__", repr(fn))
            raise StateError(f"{name} must return (state, logs), got {type(result).__name__}")
        return result

    def runner(self) -> Callable[[Work, list[Any]], None]:
        return _InTurn(len(self.devices), self._views, self._compiled is not None)

    def fused_step(self, grad: Grad, update: Update, replicas: int, seed: int) -> str:
        for function in (grad, update):
            warn_of_compiled(function.__name__, getattr(function, "fn", function))
        return "this engine calls grad for each replica and adds one by one"

    def eager_run(self, sum_over_replicas: SumOverReplicas) -> EagerRun:
        optimizer_calls.install()
        in_group = self.processes.count > 1
        return TorchEagerRun(self.devices[0], self.put, sum_over_replicas, in_group)

    def exchange(
        self, roots: list[Any], counts: tuple[int, ...], merge: Merge | None = None
    ) -> Any:
        return torch_group.exchange(self.devices[0], roots, counts, merge)

    def key(self, stream: Stream) -> torch.Generator:
        return make_generator(self.devices[0], stream)

    def _view(self, state: Any) -> StateView:
        view = self._views.placed
        if view is None or view.state is not state or not view.is_current():
            view = self._views.placed = self._new_view(state)
        return view

    def _new_view(self, state: Any) -> StateView:
        view = StateView(state)
        if self._compiled is None:
            for part in view.parts:
                warn_of_compiled(f"a {type(part).__name__} of the state", part)
        return view

    def _check_determinism(self) -> None:
        """Warn, once, if the program has switched off what the constructor switched on."""
        if not self._warned and (setting := torch_not_deterministic(self.devices[0].type)):
            self._warned = True
            warnings.warn(
                f"PyTorch runs with {setting}, so that two runs may give different bits. Leave it as "
                "the strategy set it",
                RuntimeWarning,
                stacklevel=3,
            )


class _InTurn:
    """Runs the replicas of a step, one device after another.

    Threads would share what the process has once: generator, autocast's cache, hooks, attributes.
    """

    def __init__(self, devices: int, views: _Views, is_compiled: bool) -> None:
        self._devices = devices
        self._views = views
        self._is_compiled = is_compiled
        self._is_first = True

    def __call__(self, work: Work, states: list[Any]) -> None:
        (state,) = states
        first = FirstStep(state, self._is_compiled) if self._is_first else None
        with contextlib.nullcontext() if first is None else first.watched():
            for device in range(self._devices):
                deque(work(device, state), maxlen=0)
        if first is not None:
            first.require_unchanged()
            self._is_first = False
            self._views.first = first


def _unusable(fn: Grad, result: Any) -> StateError:
    """The error for contributions that are not dense tensors."""
    for path, leaf in pytree.flatten(result):
        if not isinstance(leaf, torch.Tensor):
            return StateError(
                f"{path or 'the result'}: contributions must be tensors, found {type(leaf).__name__}"
            )
        if leaf.layout != torch.strided:
            return StateError(
                f"{path or 'the result'}: contributions must be dense tensors, found one of layout "
                f"{leaf.layout}. Make it dense (sparse=False in an embedding, or .to_dense())"
            )
    name = getattr(fn, "__name__", repr(fn))
    return StateError(f"{name} returned no contributions: expected a tree of tensors")


def keep_memory(environ: Mapping[str, str]) -> bool:
    """Have glibc's malloc keep what a step frees; True where it was told so.

    Else large blocks are taken again in every step: a third of the time of a step of the tutorial's
    network. Settings of malloc in the environment count more.
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
    """Give cuBLAS workspaces of a fixed size, or results differ; TopologyError if too late."""
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


def _device(name: Any) -> torch.device:
    if found := tensorflow_device(name):
        return torch.device("cpu") if found[0] == "cpu" else torch.device("cuda", found[1])
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise TopologyError(
            f'devices: expected names of PyTorch, such as "cuda:0" or "cpu", found {name!r}.'
        ) from error


def _choose(devices: Any) -> tuple[torch.device, ...]:
    if isinstance(devices, int):
        if devices < 1:
            raise TopologyError(f"devices must be at least 1, got {devices}")
        devices = ["cpu"] * devices
    if not isinstance(devices, (list, tuple)):
        devices = ["cpu" if devices is None else devices]
    chosen = tuple(map(_device, devices))
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
