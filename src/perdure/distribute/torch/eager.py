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
from perdure.distribute.engine import EagerRun, Stream, SumOverReplicas
from perdure.distribute.run.context import Meeting
from perdure.distribute.run.replicas import RunContext, current_run
from perdure.distribute.torch.change_watch import (
    ChangeWatch,
    form_of,
    is_strided,
    refuse,
    storage_id,
)
from perdure.distribute.torch.random_streams import remember, seeded
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
        # Every parameter whose `.grad` a replica has used, and its `.grad` outside of replicas. A
        # tensor that a replica made, as reentrant checkpointing does, ends with it.
        self._parameters: dict[int, weakref.ref[torch.Tensor]] = {}
        self._outside: dict[int, torch.Tensor | None] = {}
        # For each replica, the `.grad` that differ from those outside, by parameter.
        self._grads: dict[int, dict[int, torch.Tensor | None]] = {}
        # For each replica, the memory that belongs to it.
        self._storages: dict[int, set[int]] = {}
        # For each replica, the parameters whose `.grad` from outside it has read, and the memory of all
        # these gradients. The weak references keep the identity of that memory from being used again.
        self._read: dict[int, set[int]] = {}
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
            has_arrays = any(isinstance(leaf, np.ndarray) for _, leaf in pytree.flatten(value))
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
        storages = {storage_id(leaf) for _, leaf in pytree.flatten(arguments) if is_strided(leaf)}
        self._storages[replica] = storages
        self._grads[replica] = {}
        self._read[replica] = set()
        self.resume(replica)
        token = _of_thread.set(self)
        try:
            with ChangeWatch(storages, self._gradients), _Attributes(self):
                yield
        finally:
            _of_thread.reset(token)
            self.leave(replica)

    @_unnoticed
    def leave(self, replica: int) -> None:
        grads = self._grads[replica]
        for number, parameter in self._live():
            if parameter.grad is not self._outside[number]:
                grads[number] = parameter.grad
            else:
                grads.pop(number, None)
            parameter.grad = self._outside[number]

    @_unnoticed
    def resume(self, replica: int) -> None:
        grads = self._grads[replica]
        for number, parameter in self._live():
            parameter.grad = grads.get(number, self._outside[number])

    @_unnoticed
    def before_backward(self, replica: int, leaves: list[torch.Tensor]) -> None:
        """Have `backward` add to gradients that belong to this replica.

        Gradients from before `run` count once: replica 0 has them.
        """
        for leaf in leaves:
            self._use(leaf)
            grad = leaf.grad
            if grad is not None and grad is self._outside[id(leaf)]:
                leaf.grad = grad.detach().clone() if replica == 0 else None

    @_unnoticed
    def after_backward(self, replica: int, leaves: list[torch.Tensor]) -> None:
        for leaf in leaves:
            if leaf.grad is not None and is_strided(leaf.grad):  # `step` refuses sparse ones
                self._storages[replica].add(storage_id(leaf.grad))

    def read_gradient(self, replica: int, parameter: torch.Tensor) -> None:
        """Called as a replica reads `.grad`: remembers whether that is from outside of it."""
        if self._is_made(replica, parameter):
            return
        self._use(parameter)
        grad = parameter.grad
        if grad is not None and grad is self._outside[id(parameter)]:
            self._read[replica].add(id(parameter))
            if is_strided(grad) and storage_id(grad) not in self._gradients:
                self._gradients[storage_id(grad)] = StorageWeakRef(grad.untyped_storage())

    def set_gradient(
        self, replica: int, parameter: torch.Tensor, grad: torch.Tensor | None
    ) -> None:
        """Called before a replica sets `.grad`, which is its own from then on."""
        if self._is_made(replica, parameter):
            return
        self._use(parameter)
        outside = self._outside[id(parameter)]
        if grad is None:
            self._read[replica].discard(id(parameter))
        elif (
            outside is not None
            and parameter.grad is outside
            and id(parameter) in self._read[replica]
        ):
            raise StateError(
                f"logical replica {replica} reads the gradient of a parameter, "
                f"{form_of(parameter)}, that was there before it ran, and sets another one. What was "
                "there would be added once for each replica. Call optimizer.zero_grad() first, or let "
                "`backward` add to it, which counts it once"
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
        refuse(f"a tensor from outside of it, {form_of(tensor)},", ".data = ...")

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
                self._outside[id(parameter)] = None
            for path, parameter in parameters.items():
                if path in total:
                    self._outside[id(parameter)] = total[path]
                for grads_of_replica in self._grads.values():
                    grads_of_replica.pop(id(parameter), None)
                for read in self._read.values():
                    read.discard(id(parameter))
                parameter.grad = self._outside[id(parameter)]
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
            self._use(parameter)
            grad = parameter.grad
            if grad is self._outside[id(parameter)]:
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
            {name: _plain(value) for name, value in group.items() if name != "params"}
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
                pending = any(
                    grads.get(id(parameter)) is not None for grads in self._grads.values()
                )
                if pending and parameter.grad is self._outside[id(parameter)]:
                    raise StateError(
                        f"{type(optimizer).__name__}.step() in a merge_call, where `.grad` is not that "
                        "of any replica. Call it in the function of strategy.run itself, which adds "
                        "the gradients, or set `.grad` to what strategy.reduce gives"
                    )

    def finish(self) -> None:
        """Add the gradients that no optimizer took over the replicas; they are then outside of them."""
        live = self._live()
        all_grads = self._grads.values()
        names = self._names(
            [(n, p) for n, p in live if any(grads.get(n) is not None for grads in all_grads)]
        )
        left = [
            {names[number]: grad.detach() for number, grad in grads.items() if grad is not None}
            for grads in all_grads
        ]
        total: dict[str, torch.Tensor] = {}
        if any(left):
            values = tuple({"gradients": grads, "runs": torch.ones(())} for grads in left)
            total = self._sum_over_replicas(values)["gradients"]
        for number, parameter in live:
            if any(number in grads for grads in all_grads):
                parameter.grad = total[names[number]] if number in names else None

    def _names(self, parameters: list[tuple[int, torch.Tensor]]) -> dict[int, str]:
        """A name for each parameter, in the order of their first use.

        Processes may use them in different orders, so that in a group the values are in the names:
        these are equal everywhere. Of parameters with equal values, such as biases of zeros, all but
        the first also have the name before theirs in them. With another order of these the names
        differ, which the exchange refuses.
        """
        if not self._in_group:
            return {number: str(n) for n, (number, _) in enumerate(parameters)}
        new = [parameter for _, parameter in parameters if parameter not in _digests]
        found = leaf_digests_of_each([{"parameter": parameter.detach()} for parameter in new])
        for parameter, digests in zip(new, found, strict=True):
            _digests[parameter] = digests["parameter"].hex
        names: dict[int, str] = {}
        taken: set[str] = set()
        name = ""
        for number, parameter in parameters:
            before, name = name, _digests[parameter]
            if name in taken:
                name = blake3(f"{name} after {before}".encode()).hexdigest(16)
            taken.add(name)
            names[number] = name
        return names

    def _use(self, parameter: torch.Tensor) -> None:
        known = self._parameters.get(id(parameter))
        if known is None or known() is not parameter:
            self._forget(id(parameter))
            self._parameters[id(parameter)] = weakref.ref(parameter)
            self._outside[id(parameter)] = parameter.grad

    def _live(self) -> list[tuple[int, torch.Tensor]]:
        parameters = [(number, reference()) for number, reference in self._parameters.items()]
        for number, parameter in parameters:
            if parameter is None:
                self._forget(number)
        return [(number, parameter) for number, parameter in parameters if parameter is not None]

    def _forget(self, number: int) -> None:
        for table in (self._parameters, self._outside, *self._grads.values()):
            table.pop(number, None)
        for read in self._read.values():
            read.discard(number)


# Set in the replicas of a run, and in their collectives.
_of_thread: ContextVar[TorchEagerRun | None] = ContextVar("perdure_torch_run", default=None)


def of_this_thread() -> TorchEagerRun | None:
    """The run whose replica this is, or whose collective."""
    return _of_thread.get()


class _Attributes(TorchFunctionMode):
    """Reports that a replica reads or sets `.grad`, or sets `.data`, which no operation shows."""

    def __init__(self, run: TorchEagerRun) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        attribute = getattr(func, "__self__", None)
        if (attribute is _GRAD or attribute is _DATA) and (context := current_run()) is not None:
            self._note(context.replica_id_in_sync_group, attribute, func.__name__, *args)
        return func(*args, **(kwargs or {}))

    def _note(
        self, replica: int, attribute: Any, access: str, tensor: torch.Tensor, *value: Any
    ) -> None:
        if attribute is _GRAD:
            if access == "__get__":
                self._run.read_gradient(replica, tensor)
            else:
                grad = value[0] if access == "__set__" else None
                self._run.set_gradient(replica, tensor, grad)
        elif access == "__set__":
            self._run.set_data(replica, tensor, value[0])


# The descriptors of the attributes, to which the functions that a mode sees are bound.
_GRAD: Any = torch.Tensor.grad
_DATA: Any = torch.Tensor.data


def _plain(value: Any) -> Any:
    """A setting of an optimizer, in a form that can be compared."""
    return value.tolist() if isinstance(value, torch.Tensor) else value
