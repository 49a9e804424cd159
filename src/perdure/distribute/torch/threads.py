"""Several local devices of one process on the CPU: a thread for each.

One replica after another is the reference. Threads are used only after a step in which both ways gave
the same bytes, and as long as no replica draws from a generator that the threads share; otherwise the
step is repeated one by one.

Each device gets a state of its own (`private_state`), over the same memory of the parameters.
Parameters and buffers of the user's own modules, which `grad` may reach in other ways (an optimizer, a
closure, a hook, a dict that has parameters as keys), refuse to take part meanwhile. If `grad` has
changed a module, a container or an object of either state, this step is repeated one by one, and all
later ones are computed so.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch._C import _autograd
from torch.utils._python_dispatch import TorchDispatchMode

from perdure.distribute import pytree
from perdure.distribute.engine import Work
from perdure.distribute.torch import state_view
from perdure.distribute.torch.first_step import FirstStep
from perdure.distribute.torch.private_state import (
    DeviceThread,
    PrivateState,
    ThreadParameter,
    content,
    device_thread,
    differs,
    in_use,
    put_back,
)
from perdure.distribute.torch.state_view import StateView, each_once
from perdure.state import process_random

# The ways to run the replicas of a step, in the order in which they are tried.
THREADS = "threads"
REDIRECTED = "threads, random numbers redirected"
ONE_BY_ONE = "one by one"
_WAYS = (THREADS, REDIRECTED, ONE_BY_ONE)


class Threads:
    """Runs the replicas of one training step on `devices` threads.

    Args:
        devices: Their number.
        threads: Inside an operation.
        view: Finds the tensors of the state; the same object as long as they are the same.
        compiled: Whether `grad` is compiled.
    """

    def __init__(
        self,
        devices: int,
        threads: int,
        view: Callable[[Any], StateView] = StateView,
        compiled: bool = False,
    ) -> None:
        self._view = view
        self._compiled = compiled
        self.way = THREADS if devices > 1 else ONE_BY_ONE
        self._devices = devices
        self._proven = False
        self._is_first = True
        self._tensors: _Tensors | None = None
        # Whether a thread has used a parameter or a buffer of the user's in this attempt.
        self._reached = False
        self._marks: dict[int, _SharedTensor] = {}
        # The caller is the first device. Each thread has an intra-op pool of its own.
        self._pool = ThreadPoolExecutor(
            max(devices - 1, 1), "device", initializer=torch.set_num_threads, initargs=(threads,)
        )

    def __call__(self, work: Work, states: list[Any]) -> None:
        """Run the work of every device to its end; started again if a way proves unfit."""
        (state,) = states
        first = FirstStep(state) if self._is_first else None
        self._compute(work, state)
        if first is not None:
            first.require_unchanged()
            self._is_first = False

    def _compute(self, work: Work, state: Any) -> None:
        tensors = self._tensors
        if self.way != ONE_BY_ONE:
            view = self._view(state)
            if tensors is None or tensors.view is not view:
                tensors = self._tensors = _Tensors(view)
        while tensors is not None and self.way != ONE_BY_ONE and not _ambient():
            try:
                copies = [
                    PrivateState(state, tensors.trained, self._compiled)
                    for _ in range(self._devices)
                ]
            except Exception:  # noqa: BLE001  of the user's classes, or a chain of objects too long
                self.way = ONE_BY_ONE
                break
            if _has_tensor_hooks(tensors.all) or not all(each.is_complete for each in copies):
                self.way = ONE_BY_ONE
            elif self._attempt(work, state, tensors, copies):
                return
        self._tensors = None
        for device in range(self._devices):
            deque(work(device, state), maxlen=0)

    def _attempt(
        self, work: Work, state: Any, tensors: _Tensors, copies: list[PrivateState]
    ) -> bool:
        """Run the step in threads; False if its results cannot be used."""
        states = [each.state for each in copies]
        watched, shared = _Watched(tensors), None if self._proven else _Shared()
        originals = _Originals(copies[0], tensors.view.optimizers, self._marks)
        self._reached = False
        try:
            with _withheld(tensors.all):
                error, digests = self._in_threads(work, states)
        except TypeError as raised:  # a class of the user's cannot be withheld
            error, digests = raised, {}
        is_one_by_one = self._reached or watched.has_new_keys() or (shared and shared.disturbed())
        is_one_by_one = originals.changed() or is_one_by_one
        is_one_by_one = is_one_by_one or any(each.has_changed() for each in copies)
        # The reference raises the error, so that it is the same for every topology.
        if watched.disturbed() or is_one_by_one or error is not None:
            self._next_way()
            if is_one_by_one:  # which no other way in threads changes
                self.way = ONE_BY_ONE
                _remove_keys(states)
            return False
        if not self._proven:
            # The step runs twice, so the contributions that remain are those of the reference.
            reference = {}
            for device in range(self._devices):
                reference |= {r: _digest(value) for r, value in work(device, state)}
            self._proven = digests == reference
            if not self._proven:
                self._next_way()
        return True

    def _in_threads(
        self, work: Work, states: list[Any]
    ) -> tuple[BaseException | None, dict[int, bytes]]:
        """The first error, and the digests of the contributions until the way is proven."""
        futures = [
            self._pool.submit(
                contextvars.copy_context().run, self._one, work, device, states[device]
            )
            for device in range(1, self._devices)
        ]
        error, digests = None, {}
        try:
            digests = self._one(work, 0, states[0])
        except Exception as raised:  # noqa: BLE001 - raised again by the reference
            error = raised
        # The exceptions of all are asked for, which waits: none computes beside what follows.
        errors = [error, *[future.exception() for future in futures]]
        error = next(filter(None, errors), None)
        for future in futures if error is None else ():
            digests |= future.result()
        return error, digests

    def _next_way(self) -> None:
        self.way, self._proven = _WAYS[_WAYS.index(self.way) + 1], False

    def _one(self, work: Work, device: int, state: Any) -> dict[int, bytes]:
        """Run one device; returns the digests of its contributions until the way is proven."""
        with _Redirect() if self.way == REDIRECTED else contextlib.nullcontext() as mode:
            thread = DeviceThread(mode.generator if mode else torch.Generator())
            token = device_thread.set(thread)
            try:
                if not self._proven:
                    return {r: _digest(value) for r, value in work(device, state)}
                deque(work(device, state), maxlen=0)
                return {}
            finally:
                device_thread.reset(token)
                self._reached |= thread.reached


class _Redirect(TorchDispatchMode):
    """Operations that would draw from the process's generator draw from this thread's.

    One that draws inside a kernel, where no mode sees it, moves the process's generator, which is
    watched.
    """

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: else several threads leave a flag of PyTorch set with which nothing is compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _draws(func) and kwargs.get("generator") is None:
            kwargs = {**kwargs, "generator": self.generator}
        return func(*args, **kwargs)


_drawing: dict[Any, bool] = {}
# PyTorch before 2.8 does not say which hooks on saved tensors there are.
_saved_tensors_hooks = getattr(_autograd, "_top_saved_tensors_default_hooks", lambda _: None)


def own_generator() -> torch.Generator | None:
    """The generator of this thread, if several devices compute at once."""
    return None if (thread := device_thread.get()) is None else thread.generator


def _draws(func: Any) -> bool:
    if func not in _drawing:
        arguments = func._schema.arguments
        _drawing[func] = any(a.name == "generator" and a.kwarg_only for a in arguments)
    return _drawing[func]


class _Tensors:
    """What a replica may compute gradients of, and buffers, each once."""

    def __init__(self, view: StateView) -> None:
        self.view = view
        self.trained = view.trained
        self.buffers = each_once(buffer for *_, buffer in view.buffers)
        self.all = each_once((*self.trained, *self.buffers))


class _SharedTensor(NamedTuple):
    """A tensor of the user's, its version, and its value then."""

    tensor: torch.Tensor
    version: int
    copy: torch.Tensor


class _Originals:
    """The modules, containers, objects and arrays of the user's that threads have copies of, or share.

    A closure, a hook or an attribute of a library's object may lead `grad` to them.

    Args:
        private: The state of one thread.
        optimizers: Those of the user's, which the threads share.
        known: The marks of tensors in earlier steps, by identity; replaced by those of this one.
    """

    def __init__(
        self, private: PrivateState, optimizers: list[Any], known: dict[int, _SharedTensor]
    ) -> None:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._contents = [(value, content(value)) for value in (*private.originals, *groups)]
        self._hooks = private.hooks
        self._arrays = [(array, array.copy()) for array in private.arrays]
        self._marks = {id(t): _marked(t, known) for t in private.tensors if _counts_changes(t)}
        known.clear()
        known.update(self._marks)

    def changed(self) -> bool:
        """Whether any of them has; they are put back."""
        changed = [pair for pair in self._contents if differs(*pair)]
        for value, given in changed:
            put_back(value, given)
        arrays = [(array, old) for array, old in self._arrays if array.tobytes() != old.tobytes()]
        for array, old in arrays:
            array[...] = old
        marks = [mark for mark in self._marks.values() if mark.tensor._version != mark.version]
        with torch.no_grad():
            for mark in marks:
                mark.tensor.copy_(mark.copy)
        has_hooks = any(len(table) != count for table, count in self._hooks)
        return bool(changed or arrays or marks or has_hooks)


def _counts_changes(tensor: torch.Tensor) -> bool:
    if tensor.is_inference() or tensor.is_meta or tensor.layout is not torch.strided:
        return False
    return tensor.is_leaf  # others are results of an earlier forward pass


def _marked(tensor: torch.Tensor, known: dict[int, _SharedTensor]) -> _SharedTensor:
    mark = known.get(id(tensor))
    if mark is None or mark.tensor is not tensor or mark.version != tensor._version:
        mark = _SharedTensor(tensor, tensor._version, tensor.detach().clone())
    return mark


class _Watched:
    """Objects that the threads share: the process's generator, `.grad` and buffers of the state."""

    def __init__(self, tensors: _Tensors) -> None:
        self._random = torch.default_generator.get_state()
        self._grads = [(p, p.grad) for p in tensors.trained]
        self._versions = [p._version for p, _ in self._grads]
        self._buffers = [(b, b.detach().clone()) for b in tensors.buffers]
        self._optimizers = tensors.view.optimizers
        self._sizes = [len(optimizer.state) for optimizer in self._optimizers]

    def has_new_keys(self) -> bool:
        """Whether an optimizer has more entries: its `state` makes one for each key it is asked for."""
        return self._sizes != [len(optimizer.state) for optimizer in self._optimizers]

    def disturbed(self) -> bool:
        """Whether any of them changed; they are put back."""
        changed = False
        if not torch.equal(torch.default_generator.get_state(), self._random):
            torch.default_generator.set_state(self._random)
            changed = True
        for parameter, grad in self._grads:
            if parameter.grad is not grad:
                parameter.grad = grad
                changed = True
        for buffer, value in self._buffers:
            if not torch.equal(buffer, value):
                with torch.no_grad():
                    buffer.copy_(value)
                changed = True
        return changed or self._versions != [p._version for p, _ in self._grads]


class _Shared:
    """Generators of the process that take too long to read in every step."""

    def __init__(self) -> None:
        self._states = process_random.encode(process_random.capture())

    def disturbed(self) -> bool:
        """Whether a thread drew from one of them; they are put back."""
        now = process_random.encode(process_random.capture())
        changed = [name for name in ("python", "numpy") if now[name] != self._states[name]]
        for name in changed:
            process_random.restore_generator(name, self._states[name])
        return bool(changed)


def _has_tensor_hooks(tensors: list[Any]) -> bool:
    """Whether a tensor has hooks of its own, which those of the threads do not have."""
    return any(t._backward_hooks or t._post_accumulate_grad_hooks for t in tensors)


def _remove_keys(states: list[Any]) -> None:
    """Remove parameters of threads from the dicts and sets that have them as keys.

    A `defaultdict` such as `optimizer.state` takes the keys that it is asked for.
    """
    modules = [module for state in states for _, module in state_view.modules(state)]
    own = [p for module in modules for p in module.parameters()]
    # Those of earlier steps, too: an entry may have been noticed only now.
    own += [each for each in gc.get_objects() if type(each) is ThreadParameter]
    numbers = {id(parameter) for parameter in own}
    for holder in gc.get_referrers(*own):
        if isinstance(holder, dict):
            for key in [key for key in holder if id(key) in numbers]:
                del holder[key]
        elif isinstance(holder, set):
            for key in [key for key in holder if id(key) in numbers]:
                holder.remove(key)


@functools.cache
def _withheld_class(kind: type) -> type:
    def refuse(*_: Any, **__: Any) -> Any:
        raise in_use()

    return type(kind.__name__, (kind,), {"__torch_function__": classmethod(refuse)})


@contextlib.contextmanager
def _withheld(tensors: list[Any]) -> Iterator[None]:
    """Make every use of the user's parameters and buffers an error.

    The threads have others over the same memory. Gradients would not flow to those if `grad` reached
    the user's, and a check at the first step would not see what begins later. Raises `TypeError` for a
    class that cannot be exchanged.
    """
    changed: list[tuple[Any, type]] = []
    try:
        for tensor in tensors:
            kind = type(tensor)
            tensor.__class__ = _withheld_class(kind)
            changed.append((tensor, kind))
        yield
    finally:
        for tensor, kind in changed:
            tensor.__class__ = kind


def _ambient() -> bool:
    """Whether the calling thread has a mode that other threads would not have."""
    return (
        torch.is_autocast_enabled("cpu")
        or not torch.is_grad_enabled()
        or torch.is_inference_mode_enabled()
        or torch._C._len_torch_function_stack() > 0
        or torch._C._len_torch_dispatch_stack() > 0
        or _saved_tensors_hooks(True) is not None
        or _autograd._saved_tensors_hooks_get_disabled_error_message() is not None
    )


def _digest(value: Any) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for path, leaf in pytree.flatten(value):
        digest.update(f"{path} {leaf.dtype} {tuple(leaf.shape)}".encode())
        digest.update(leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.digest()
