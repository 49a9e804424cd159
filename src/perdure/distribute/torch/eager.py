"""PyTorch inside `strategy.run`: generators, a thread's settings, and gradients of each replica.

An optimizer that steps in every replica steps once, with the sum of their gradients in the fixed tree,
as in TensorFlow. For that each replica has `.grad` of its own. Any other change that a replica makes
to a tensor from outside raises StateError (see `change_watch`).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from perdure.digests.digest import leaf_digests_of_each
from perdure.distribute import pytree
from perdure.distribute.engine import EagerRun, Stream, SumOverReplicas, describe_leaf
from perdure.distribute.run.context import Meeting
from perdure.distribute.run.replicas import RunContext, current_run
from perdure.distribute.torch.change_watch import ChangeWatch, is_strided, refuse, storage_id
from perdure.distribute.values import PerReplica
from perdure.errors import StateError

# Of each parameter when a group first added gradients of it that no optimizer took: computed once.
_digests = WeakIdKeyDictionary()


def _unnoticed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hides what this module itself does to `.grad` from `_Attributes`."""

    @functools.wraps(function)
    def unnoticed(*args: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args)

    return unnoticed


class _Gradients:
    """The `.grad` of a parameter: outside of replicas, each replica's own, and who read that."""

    def __init__(self, parameter: torch.Tensor) -> None:
        # A tensor that a replica made, as reentrant checkpointing does, ends with it.
        self.parameter = weakref.ref(parameter)
        self.outside = parameter.grad
        self.own: dict[int, torch.Tensor | None] = {}
        self.readers: set[int] = set()


class TorchEagerRun(EagerRun):
    """See EagerRun. Keeps the `.grad` of each replica, and adds them at the steps of optimizers."""

    def __init__(
        self,
        device: torch.device,
        put: Callable[..., Any],
        sum_over_replicas: SumOverReplicas,
        in_group: bool = False,
    ) -> None:
        self._device = device
        self._in_group = in_group
        self._put = put
        self._sum_over_replicas = sum_over_replicas
        # By identity, every parameter whose `.grad` a replica has used.
        self._parameters: dict[int, _Gradients] = {}
        # For each replica, the memory that belongs to it.
        self._storages: dict[int, set[int]] = {}
        # The memory of gradients from outside that a replica has read. The weak references keep its
        # identity from being used again.
        self._gradients: dict[int, StorageWeakRef] = {}
        # The number of each optimizer by its identity, which the optimizer beside it keeps from being
        # used again.
        self._optimizers: dict[int, tuple[int, Any]] = {}
        # The settings of an optimizer (learning rates) in the first replica that came to its step.
        self._settings: dict[int, tuple[int, Any]] = {}

    def call(
        self,
        fn: Callable[..., Any],
        device: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        stream: Stream | None = None,
    ) -> Any:
        def arrays(value: Any) -> Any:
            # A value without arrays stays the same object: a list may be there to be appended to.
            has_arrays = any(isinstance(leaf, np.ndarray) for leaf in pytree.leaves(value))
            return self._put(value, device) if has_arrays else value

        with contextlib.nullcontext() if stream is None else seeded(self._device, stream):
            return fn(*map(arrays, args), **{name: arrays(kwargs[name]) for name in kwargs})

    def random_state(self) -> Callable[[], None]:
        return remember(self._device)

    def thread_settings(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        kind = self._device.type
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

    @contextlib.contextmanager
    def replica(self, replica: int, arguments: Any) -> Iterator[None]:
        storages = set(map(storage_id, filter(is_strided, pytree.leaves(arguments))))
        self._storages[replica] = storages
        self.resume(replica)
        token = _thread_run.set(self)
        try:
            with ChangeWatch(storages, self._gradients), _Attributes(self):
                yield
        finally:
            _thread_run.reset(token)
            self.leave(replica)

    @_unnoticed
    def leave(self, replica: int) -> None:
        for parameter, known in self._live():
            if parameter.grad is not known.outside:
                known.own[replica] = parameter.grad
            else:
                known.own.pop(replica, None)
            parameter.grad = known.outside

    @_unnoticed
    def resume(self, replica: int) -> None:
        for parameter, known in self._live():
            parameter.grad = known.own.get(replica, known.outside)

    @_unnoticed
    def before_backward(self, replica: int, leaves: list[torch.Tensor]) -> None:
        """Have `backward` add to gradients that belong to this replica.

        Gradients from before `run` count once: replica 0 has them.
        """
        for leaf in leaves:
            if leaf.grad is self._known_gradients(leaf).outside and leaf.grad is not None:
                leaf.grad = leaf.grad.detach().clone() if replica == 0 else None

    @_unnoticed
    def after_backward(self, replica: int, leaves: list[torch.Tensor]) -> None:
        for leaf in leaves:
            if leaf.grad is not None and is_strided(leaf.grad):  # `step` refuses sparse ones
                self._storages[replica].add(storage_id(leaf.grad))

    def read_gradient(self, replica: int, parameter: torch.Tensor) -> None:
        """Called as a replica reads `.grad`: remembers whether that is from outside of it."""
        if self._is_made(replica, parameter):
            return
        known, grad = self._known_gradients(parameter), parameter.grad
        if grad is not None and grad is known.outside:
            known.readers.add(replica)
            if is_strided(grad) and storage_id(grad) not in self._gradients:
                self._gradients[storage_id(grad)] = StorageWeakRef(grad.untyped_storage())

    def set_gradient(
        self, replica: int, parameter: torch.Tensor, grad: torch.Tensor | None
    ) -> None:
        """Called before a replica sets `.grad`, which is its own from then on."""
        if self._is_made(replica, parameter):
            return
        known = self._known_gradients(parameter)
        if grad is None:
            known.readers.discard(replica)
        elif parameter.grad is known.outside is not None and replica in known.readers:
            raise StateError(
                f"logical replica {replica} reads the gradient of a parameter, "
                f"{describe_leaf(parameter)}, that was there before it ran, and sets another one. What "
                "was there would be added once for each replica. Call optimizer.zero_grad() first, or "
                "let `backward` add to it, which counts it once"
            )

    def set_data(self, replica: int, tensor: torch.Tensor, data: Any) -> None:
        """Called before a replica sets `.data`: StateError, unless the tensor stays what it is."""
        if self._is_made(replica, tensor) or (
            is_strided(tensor)
            and is_strided(data)
            and (tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr())
            == (data.dtype, data.shape, data.stride(), data.data_ptr())
        ):  # as module.to(device) does where nothing is to be moved
            return
        refuse(f"a tensor from outside of it, {describe_leaf(tensor)},", ".data = ...")

    def _is_made(self, replica: int, tensor: torch.Tensor) -> bool:
        """Whether the tensor belongs to the replica."""
        return is_strided(tensor) and storage_id(tensor) in self._storages[replica]

    def step(self, context: RunContext, optimizer: Any, apply: Callable[[], Any]) -> Any:
        """One step of an optimizer with the sum of the gradients of all replicas."""
        name = type(optimizer).__name__
        number, _ = self._optimizers.setdefault(id(optimizer), (len(self._optimizers), optimizer))
        self._compare_settings(context.replica_id_in_sync_group, optimizer, number)
        parameters = {
            f"{g}/{n}": parameter
            for g, group in enumerate(optimizer.param_groups)
            for n, parameter in enumerate(group["params"])
        }
        grads, cleared = self._gradients_of_replica(name, parameters)

        def join(_: Any, values: PerReplica) -> Any:
            self._settings.pop(number, None)
            total = self._sum_over_replicas(values.values)["gradients"]
            for parameter in cleared:
                self._known_gradients(parameter).outside = None
            for path, parameter in parameters.items():
                known = self._known_gradients(parameter)
                known.outside = parameter.grad = total.get(path, known.outside)
                known.own.clear()
                known.readers.clear()
            return apply()

        call = f"{name}.step() of optimizer {number} with {len(grads)} gradients"
        if cleared:
            call += f" and {len(cleared)} set to None"
        value = {"gradients": grads, "steps": torch.ones(())}  # never without anything to add
        return context.meet(Meeting(call, value, join))

    @_unnoticed
    def _gradients_of_replica(
        self, name: str, parameters: dict[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """The gradients that this replica has itself, and the parameters whose gradient it cleared."""
        grads: dict[str, torch.Tensor] = {}
        cleared: list[torch.Tensor] = []
        for path, parameter in parameters.items():
            grad = parameter.grad
            if grad is self._known_gradients(parameter).outside:
                continue
            if grad is None:
                cleared.append(parameter)
                continue
            if grad.layout is not torch.strided:
                raise StateError(
                    f"the gradient of parameter {path} of {name} is sparse, and has no sum in the "
                    "tree; make the layer with sparse=False"
                )
            grads[path] = grad.detach()
        return grads, cleared

    def _compare_settings(self, replica: int, optimizer: Any, number: int) -> None:
        """StateError if a replica comes to a step with other settings than the one before it.

        The groups belong to all replicas: `group["lr"] *= 0.9` in each would multiply it V times.
        """
        settings = [
            {
                name: value.tolist() if isinstance(value, torch.Tensor) else value
                for name, value in group.items()
                if name != "params"
            }
            for group in optimizer.param_groups
        ]
        first, expected = self._settings.setdefault(number, (replica, settings))
        for before, now in zip(expected, settings, strict=False):
            for name in before.keys() | now.keys():
                if before.get(name) != now.get(name):
                    raise StateError(
                        f"{type(optimizer).__name__}.step(): param_groups have {name} "
                        f"{now.get(name)} in logical replica {replica}, and {before.get(name)} in "
                        f"replica {first}. Replicas share them, so a change in the function of "
                        "strategy.run is made once for each replica. Change them after strategy.run, "
                        "or set a value that depends on the step alone"
                    )

    def check_merged(self, optimizer: Any) -> None:
        """StateError for a step in a merge_call that would not see the gradients of the replicas."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                known = self._parameters.get(id(parameter))
                if (
                    known is not None
                    and any(grad is not None for grad in known.own.values())
                    and parameter.grad is known.outside
                ):
                    raise StateError(
                        f"{type(optimizer).__name__}.step() in a merge_call, where `.grad` is not that "
                        "of any replica. Call it in the function of strategy.run itself, which adds "
                        "the gradients, or set `.grad` to what strategy.reduce gives"
                    )

    def finish(self) -> None:
        """Add the gradients that no optimizer took over the replicas; they are then outside of them."""
        changed = [(parameter, known) for parameter, known in self._live() if known.own]
        given = [
            (parameter, known.own)
            for parameter, known in changed
            if any(grad is not None for grad in known.own.values())
        ]
        names = self._names([parameter for parameter, _ in given])
        total: dict[str, torch.Tensor] = {}
        if given:
            values = tuple(
                {
                    "gradients": {
                        name: grad.detach()
                        for name, (_, own) in zip(names, given, strict=True)
                        if (grad := own.get(replica)) is not None
                    },
                    "runs": torch.ones(()),
                }
                for replica in self._storages
            )
            total = self._sum_over_replicas(values)["gradients"]
        for parameter, _ in changed:
            parameter.grad = None
        for name, (parameter, _) in zip(names, given, strict=True):
            parameter.grad = total[name]

    def _names(self, parameters: list[torch.Tensor]) -> list[str]:
        """A name for each parameter, in the order of their first use.

        Processes may use them in different orders, so in a group the values are in the names. Of
        equal values all but the first also have the name before theirs; another order gives other
        names, which the exchange refuses.
        """
        if not self._in_group:
            return [str(number) for number in range(len(parameters))]
        new = [parameter for parameter in parameters if parameter not in _digests]
        found = leaf_digests_of_each([{"parameter": parameter.detach()} for parameter in new])
        for parameter, digests in zip(new, found, strict=True):
            _digests[parameter] = digests["parameter"].hex
        names: list[str] = []
        name = ""
        for parameter in parameters:
            before, name = name, _digests[parameter]
            if name in names:
                name = blake3(f"{name} after {before}".encode()).hexdigest(16)
            names.append(name)
        return names

    def _known_gradients(self, parameter: torch.Tensor) -> _Gradients:
        known = self._parameters.get(id(parameter))
        if known is None or known.parameter() is not parameter:
            known = self._parameters[id(parameter)] = _Gradients(parameter)
        return known

    def _live(self) -> list[tuple[torch.Tensor, _Gradients]]:
        found = [(known.parameter(), known) for known in self._parameters.values()]
        live = [(parameter, known) for parameter, known in found if parameter is not None]
        if len(live) < len(found):
            self._parameters = {id(parameter): known for parameter, known in live}
        return live


# Set in the replicas of a run, and in their collectives.
_thread_run: ContextVar[TorchEagerRun | None] = ContextVar("perdure_torch_run", default=None)


def run_of_this_thread() -> TorchEagerRun | None:
    """The run whose replica this is, or whose collective."""
    return _thread_run.get()


class _Attributes(TorchFunctionMode):
    """Reports that a replica reads or sets `.grad`, or sets `.data`, which no operation shows."""

    def __init__(self, run: TorchEagerRun) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The descriptor of an attribute, to which the function that a mode sees is bound.
        attribute = getattr(func, "__self__", None)
        if (attribute is _GRAD or attribute is _DATA) and (context := current_run()) is not None:
            replica, access = context.replica_id_in_sync_group, func.__name__
            if attribute is _DATA and access == "__set__":
                self._run.set_data(replica, *args)
            elif attribute is _GRAD and access == "__get__":
                self._run.read_gradient(replica, args[0])
            elif attribute is _GRAD:
                self._run.set_gradient(replica, args[0], args[1] if access == "__set__" else None)
        return func(*args, **(kwargs or {}))


_GRAD: Any = torch.Tensor.grad
_DATA: Any = torch.Tensor.data


def make_generator(device: torch.device, stream: Stream) -> torch.Generator:
    """A generator of its own, whose numbers are a function of `stream`."""
    return torch.Generator(device).manual_seed(_mixed(stream))


def remember(device: torch.device) -> Callable[[], None]:
    """Remembers the state of the global generators; the result puts it back."""
    states = [(generator.set_state, generator.get_state()) for generator in _generators(device)]

    def restore() -> None:
        for set_state, state in states:
            set_state(state)

    return restore


def seed(device: torch.device, stream: Stream) -> Callable[[], None]:
    """Put the global generators under `stream`; the result puts them back, for draws between steps."""
    number = _mixed(stream)
    restore = remember(device)
    for generator in _generators(device):
        # Not torch.manual_seed, which formats a stack trace for a CUDA that is not there.
        generator.manual_seed(number)
    return restore


@contextlib.contextmanager
def seeded(device: torch.device, stream: Stream) -> Iterator[None]:
    """`seed` for the code inside."""
    restore = seed(device, stream)
    try:
        yield
    finally:
        restore()


@functools.cache
def _generators(device: torch.device) -> tuple[torch.Generator, ...]:
    if device.type != "cuda":
        return (torch.default_generator,)
    return torch.default_generator, torch.cuda.default_generators[device.index]


@functools.lru_cache(64)
def _mixed(stream: Stream) -> int:
    """63 bits of (seed, step, replica), by SplitMix64 (see perdure.data.permutation)."""
    seed, step, replica = stream
    return _mix(_mix(_mix(0, seed), step), replica) >> 1


@functools.lru_cache(8)
def _mix(value: int, part: int) -> int:
    mask = 2**64 - 1
    value = ((value + 0x9E3779B97F4A7C15) ^ part) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)
