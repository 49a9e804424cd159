"""Several local devices of one process on the CPU: a thread for each.

One replica after another is the reference. Threads are used only after a step in which both ways gave
the same bytes, and as long as no replica draws from a generator that the threads share; otherwise the
step is repeated one by one.

Each device gets the user's state with modules of its own, over the same memory of the parameters:
`.grad`, buffers and attributes that a forward pass writes are then private. Parameters and buffers of
the user's own modules, which `grad` may reach in other ways (an optimizer, a closure, a hook, a dict
that has parameters as keys), refuse to take part meanwhile. Objects that are neither modules nor
containers are shared, so `grad` must not write to them.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import dataclasses
import functools
import gc
import hashlib
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch._C import _autograd
from torch.utils._python_dispatch import TorchDispatchMode

from perdure.checkpoint import Checkpoint
from perdure.distribute import pytree
from perdure.distribute.engine import Work
from perdure.distribute.torch import state_view
from perdure.distribute.torch.first_step import FirstStep
from perdure.distribute.torch.state_view import StateView
from perdure.errors import StateError
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
            copies = [_Private(state, self._compiled) for _ in range(self._devices)]
            if _has_tensor_hooks(tensors.all) or not all(each.is_complete for each in copies):
                self.way = ONE_BY_ONE
            elif self._attempt(work, state, tensors, copies):
                return
        self._tensors = None
        for device in range(self._devices):
            deque(work(device, state), maxlen=0)

    def _attempt(self, work: Work, state: Any, tensors: _Tensors, copies: list[_Private]) -> bool:
        """Run the step in threads; False if its results cannot be used."""
        states = [each.state for each in copies]
        watched, shared = _Watched(tensors), None if self._proven else _Shared()
        self._reached = False
        try:
            with _withheld(tensors.all):
                error, digests = self._in_threads(work, states)
        except TypeError as raised:  # a class of the user's cannot be withheld
            error, digests = raised, {}
        is_one_by_one = self._reached or watched.has_new_keys() or (shared and shared.disturbed())
        is_one_by_one = is_one_by_one or any(each.has_other_attributes() for each in copies)
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
            thread = _Thread(mode.generator if mode else torch.Generator())
            token = _thread.set(thread)
            try:
                if not self._proven:
                    return {r: _digest(value) for r, value in work(device, state)}
                deque(work(device, state), maxlen=0)
                return {}
            finally:
                _thread.reset(token)
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


@dataclasses.dataclass
class _Thread:
    """What a thread of a device has.

    Attributes:
        generator: The generator to seed in place of the process's, which is watched.
        reached: Whether it has used a parameter or a buffer of the user's.
    """

    generator: torch.Generator
    reached: bool = False


_thread: contextvars.ContextVar[_Thread | None] = contextvars.ContextVar("thread", default=None)
_drawing: dict[Any, bool] = {}
_PLAIN = frozenset((bool, int, float, complex, str, type(None)))
_CONTAINERS = frozenset((dict, list, deque))
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_MISSING = object()
# PyTorch before 2.8 does not say which hooks on saved tensors there are.
_saved_tensors_hooks = getattr(_autograd, "_top_saved_tensors_default_hooks", lambda _: None)


def own_generator() -> torch.Generator | None:
    """The generator of this thread, if several devices compute at once."""
    return None if (thread := _thread.get()) is None else thread.generator


def _draws(func: Any) -> bool:
    if func not in _drawing:
        arguments = func._schema.arguments
        _drawing[func] = any(a.name == "generator" and a.kwarg_only for a in arguments)
    return _drawing[func]


class _Tensors:
    """Parameters and buffers of the modules in a state, each once."""

    def __init__(self, view: StateView) -> None:
        self.view = view
        self.parameters = _each_once(view.parameters.values())
        self.buffers = _each_once(buffer for *_, buffer in view.buffers)
        self.all = _each_once((*self.parameters, *self.buffers))


def _each_once(values: Iterable[Any]) -> list[Any]:
    return list({id(value): value for value in values}.values())


class _Watched:
    """Objects that the threads share: the process's generator, `.grad` and buffers of the state."""

    def __init__(self, tensors: _Tensors) -> None:
        self._random = torch.default_generator.get_state()
        self._grads = [(p, p.grad) for p in tensors.parameters]
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


def _in_use() -> StateError:
    """The error for a use of the user's parameters and buffers while several devices compute."""
    if (thread := _thread.get()) is not None:
        thread.reached = True  # the user's code may catch the error
    return StateError(
        "a parameter or a buffer of the state was used by another thread while a step computes on "
        "several devices of this process. Use it between two steps, or copy it there for the other "
        "thread (copy.deepcopy(model.state_dict()))"
    )


class ThreadParameter(nn.Parameter):
    """The parameter of one thread, whose hash is that of the user's parameter.

    So a dict or a set of the user's that has the user's parameter as a key compares the two, which is
    an error as every use of the user's parameter is.
    """

    _hash: int | None = None

    def __hash__(self) -> int:
        return id(self) if self._hash is None else self._hash

    def __eq__(self, other: Any) -> Any:
        # A key that another thread has left, or the user's parameter beside one.
        if self is not other and isinstance(other, nn.Parameter) and hash(other) == hash(self):
            raise _in_use()
        return super().__eq__(other)


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
        raise _in_use()

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


class _Private:
    """A state around modules of its own.

    Attributes:
        state: The state of one thread.
        is_complete: Whether all modules in it are its own.
    """

    def __init__(self, state: Any, compiled: bool) -> None:
        memo: dict[int, Any] = {}
        # Each module with the attributes that it was given.
        self._made: list[tuple[nn.Module, dict[str, Any]]] = []
        # Containers among them, with those of the user.
        self._containers: list[tuple[Any, Any]] = []
        self.state = self._around(state, memo)
        # A compiled program is of the types that it has seen, and the reference has parameters.
        for number, new in memo.items() if not compiled else ():
            if type(new) is nn.Parameter:
                own: Any = new
                own.__class__, own._hash = ThreadParameter, number
        made = {id(new) for new in memo.values()}
        # Other modules may be in objects that are not containers.
        self.is_complete = all(id(module) in made for _, module in state_view.modules(self.state))

    def has_other_attributes(self) -> bool:
        """Whether `grad` has changed a plain value of a module or a container that it has.

        A counter of calls may decide nothing in the first step, and would begin again in each.
        """
        are_same = (_holds_the_same(*pair) for pair in self._containers)
        return not all(are_same) or not all(_has_the_same(*pair) for pair in self._made)

    def _around(self, value: Any, memo: dict[int, Any]) -> Any:
        if isinstance(value, nn.Module):
            return self._module(value, memo)
        if (children := pytree.children(value)) is not None:
            return pytree.remake(value, {name: self._around(v, memo) for name, v in children})
        if isinstance(value, Checkpoint):
            return Checkpoint(**{name: self._around(v, memo) for name, v in vars(value).items()})
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            changes = {
                f.name: new
                for f in dataclasses.fields(value)
                if (new := self._around(old := getattr(value, f.name), memo)) is not old
            }
            if changes:
                value = copy.copy(value)
                for name, new in changes.items():
                    object.__setattr__(value, name, new)
        return value

    def _module(self, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        """The same module with its own `.grad`, buffers and attributes, over the same parameters."""
        if id(module) in memo:
            return memo[id(module)]
        memo[id(module)] = own = object.__new__(type(module))
        given = module.__dict__ | {
            "_parameters": {k: _parameter(p, memo) for k, p in module._parameters.items()},
            "_buffers": {k: _copy(b, memo) for k, b in module._buffers.items()},
            "_modules": {k: m and self._module(m, memo) for k, m in module._modules.items()},
        }
        for name, value in given.items():
            if type(value) in _CONTAINERS and name not in _OF_EVERY_MODULE:
                given[name] = copied = memo.setdefault(id(value), copy.copy(value))
                self._containers.append((copied, value))
        own.__dict__.update(given)
        self._made.append((own, given))
        return own


def _holds_the_same(new: Any, old: Any) -> bool:
    """Whether a container holds what it held, under the same keys."""
    if len(new) != len(old) or not all(map(_is_same, new, old)):
        return False
    return not isinstance(new, dict) or all(map(_is_same, new.values(), old.values()))


def _has_the_same(module: nn.Module, given: dict[str, Any]) -> bool:
    """Whether the plain values among the attributes of a module are those that it was given."""
    now = vars(module)
    if len(now) == len(given) and all(map(operator.is_, now.values(), given.values())):
        return True
    plain = [name for name, value in now.items() if type(value) in _PLAIN]
    return all(_is_same(now[name], given.get(name, _MISSING)) for name in plain)


def _is_same(new: Any, old: Any) -> bool:
    return new is old or (type(new) is type(old) and type(new) in _PLAIN and new == old)


def _parameter(parameter: Any, memo: dict[int, Any]) -> Any:
    if parameter is not None and id(parameter) not in memo:
        memo[id(parameter)] = own = nn.Parameter(parameter.detach(), parameter.requires_grad)
        if attributes := vars(parameter):  # that the user has set
            vars(own).update(attributes)
    return None if parameter is None else memo[id(parameter)]


def _copy(buffer: Any, memo: dict[int, Any]) -> Any:
    if buffer is not None and id(buffer) not in memo:
        memo[id(buffer)] = buffer.detach().clone()
    return None if buffer is None else memo[id(buffer)]


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
