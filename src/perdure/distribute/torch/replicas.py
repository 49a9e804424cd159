"""Optimizers and in-place changes inside the function of `strategy.run`, on PyTorch.

An optimizer that steps in every replica steps once, with the sum of their gradients in the fixed tree,
as in TensorFlow. For that each replica has `.grad` of its own. Any other change that a replica makes
to a tensor from outside would depend on which replicas ran here before it, and raises StateError.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Container, Iterator
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from perdure.distribute import pytree
from perdure.distribute.engine import Guard
from perdure.distribute.lockstep import Meeting
from perdure.distribute.patches import with_subclasses, wrap
from perdure.distribute.replica_context import get_replica_context
from perdure.distribute.values import PerReplica
from perdure.errors import StateError

FORM = (
    "Replicas run one after another, so the result would depend on how many of them this process has. "
    "In the function of strategy.run, only optimizer.step() may change parameters; return other values "
    "and combine them with strategy.reduce, or change them in `update` of strategy.step, which also "
    "takes the mean of BatchNorm's statistics"
)
# They replace what they write to and read nothing of it. A replica may fill its own rows of a tensor.
_REPLACES = ("copy_", "fill_", "zero_", "index_put_", "_index_put_impl_", "_foreach_zero_")
# What a replica may do to a gradient from outside without having one of its own: `zero_grad`.
_CLEARS = ("zero_", "_foreach_zero_")
_BATCH_NORM = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
# Where the running mean and the flag for training are among their arguments.
_MEAN, _TRAINING = 3, 5


def _unnoticed(function: Callable[..., Any]) -> Callable[..., Any]:
    """What the guard itself does to `.grad` is not what a replica does to it."""

    @functools.wraps(function)
    def unnoticed(*args: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args)

    return unnoticed


class TorchGuard(Guard):
    """One `run`: the `.grad` of each replica, and the steps that they take together."""

    def __init__(self, strategy: Any) -> None:
        _install()
        self._strategy = strategy
        # Every parameter whose `.grad` a replica has used, and its `.grad` outside of replicas. A
        # tensor that a replica made, as reentrant checkpointing does, ends with it.
        self._parameters: dict[int, weakref.ref[torch.Tensor]] = {}
        self._outside: dict[int, torch.Tensor | None] = {}
        # For each replica, the `.grad` that differ from those outside.
        self._own: dict[int, dict[int, torch.Tensor | None]] = {}
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

    @contextlib.contextmanager
    def replica(self, replica: int, own: Any) -> Iterator[None]:
        storages = {_storage(leaf) for _, leaf in pytree.flatten(own) if _is_tensor(leaf)}
        self._storages[replica] = storages
        self._own[replica] = {}
        self._read[replica] = set()
        self.resume(replica)
        token = _guard.set(self)
        try:
            with _ChangeWatch(storages, self._gradients), _Attributes(self):
                yield
        finally:
            _guard.reset(token)
            self.leave(replica)

    @_unnoticed
    def leave(self, replica: int) -> None:
        own = self._own[replica]
        for number, parameter in self._live():
            if parameter.grad is not self._outside[number]:
                own[number] = parameter.grad
            else:
                own.pop(number, None)
            parameter.grad = self._outside[number]

    @_unnoticed
    def resume(self, replica: int) -> None:
        own = self._own[replica]
        for number, parameter in self._live():
            parameter.grad = own.get(number, self._outside[number])

    @_unnoticed
    def before_backward(self, replica: int, leaves: list[torch.Tensor]) -> None:
        """Have `backward` add to gradients that belong to this replica.

        What was there before `run` counts once: replica 0 has it.
        """
        for leaf in leaves:
            self._use(leaf)
            grad = leaf.grad
            if grad is not None and grad is self._outside[id(leaf)]:
                leaf.grad = grad.detach().clone() if replica == 0 else None

    @_unnoticed
    def after_backward(self, replica: int, leaves: list[torch.Tensor]) -> None:
        for leaf in leaves:
            if leaf.grad is not None and _is_tensor(leaf.grad):  # `step` refuses sparse ones
                self._storages[replica].add(_storage(leaf.grad))

    def read_gradient(self, replica: int, parameter: torch.Tensor) -> None:
        """Called as a replica reads `.grad`: remembers whether that is from outside of it."""
        if self._is_made(replica, parameter):
            return
        self._use(parameter)
        grad = parameter.grad
        if grad is not None and grad is self._outside[id(parameter)]:
            self._read[replica].add(id(parameter))
            if _is_tensor(grad) and _storage(grad) not in self._gradients:
                self._gradients[_storage(grad)] = StorageWeakRef(grad.untyped_storage())

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
                f"{_shape(parameter)}, that was there before it ran, and sets another one. What was "
                "there would be added once for each replica. Call optimizer.zero_grad() first, or let "
                "`backward` add to it, which counts it once"
            )

    def set_data(self, replica: int, tensor: torch.Tensor, data: Any) -> None:
        """Called before a replica sets `.data`: StateError, unless the tensor stays what it is."""
        if self._is_made(replica, tensor) or (
            _is_tensor(tensor)
            and _is_tensor(data)
            and (tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr())
            == (data.dtype, data.shape, data.stride(), data.data_ptr())
        ):  # as module.to(device) does where nothing is to be moved
            return
        _refuse(f"a tensor from outside of it, {_shape(tensor)},", ".data = ...")

    def _is_made(self, replica: int, tensor: torch.Tensor) -> bool:
        """Whether the tensor belongs to the replica."""
        return _is_tensor(tensor) and _storage(tensor) in self._storages[replica]

    def step(self, context: Any, optimizer: Any, apply: Callable[[], Any]) -> Any:
        """One step of an optimizer with the sum of the gradients of all replicas."""
        name = type(optimizer).__name__
        number, _ = self._optimizers.setdefault(id(optimizer), (len(self._optimizers), optimizer))
        self._compare_settings(context.replica_id_in_sync_group, optimizer, number)
        parameters = {
            f"{g}/{n}": parameter
            for g, group in enumerate(optimizer.param_groups)
            for n, parameter in enumerate(group["params"])
        }
        own, cleared = self._own_gradients(name, parameters)

        def join(values: PerReplica) -> Any:
            self._settings.pop(number, None)
            total = self._strategy.reduce("sum", values)["gradients"]
            for parameter in cleared:
                self._outside[id(parameter)] = None
            for path, parameter in parameters.items():
                if path in total:
                    self._outside[id(parameter)] = total[path]
                for each in self._own.values():
                    each.pop(id(parameter), None)
                for read in self._read.values():
                    read.discard(id(parameter))
                parameter.grad = self._outside[id(parameter)]
            return apply()

        call = f"{name}.step() of optimizer {number} with {len(own)} gradients"
        if cleared:
            call += f" and {len(cleared)} set to None"
        value = {"gradients": own, "steps": torch.ones(())}  # never without anything to add
        return context.meet(Meeting(call, value, join))

    @_unnoticed
    def _own_gradients(
        self, name: str, parameters: dict[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """The gradients that this replica has itself, and the parameters whose gradient it cleared."""
        own: dict[str, torch.Tensor] = {}
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
            own[path] = grad.detach()
        return own, cleared

    def _compare_settings(self, replica: int, optimizer: Any, number: int) -> None:
        """StateError if a replica comes to a step with other settings than the one before it.

        The groups belong to all replicas: `group["lr"] *= 0.9` in each would multiply it V times.
        """
        settings = [
            {name: _plain(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        first, expected = self._settings.setdefault(number, (replica, settings))
        for one, other in zip(expected, settings, strict=False):
            for name in one.keys() | other.keys():
                if one.get(name) != other.get(name):
                    raise StateError(
                        f"{type(optimizer).__name__}.step(): param_groups have {name} "
                        f"{other.get(name)} in logical replica {replica}, and {one.get(name)} in "
                        f"replica {first}. Replicas share them, so a change in the function of "
                        "strategy.run is made once for each replica. Change them after strategy.run, "
                        "or set a value that depends on the step alone"
                    )

    def check_merged(self, optimizer: Any) -> None:
        """StateError for a step in a merge_call that would not see the gradients of the replicas."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                pending = any(each.get(id(parameter)) is not None for each in self._own.values())
                if pending and parameter.grad is self._outside[id(parameter)]:
                    raise StateError(
                        f"{type(optimizer).__name__}.step() in a merge_call, where `.grad` is not that "
                        "of any replica. Call it in the function of strategy.run itself, which adds "
                        "the gradients, or set `.grad` to what strategy.reduce gives"
                    )

    def finish(self) -> None:
        """What no optimizer took is added over the replicas, and is then outside of them."""
        live = self._live()
        names = {number: str(n) for n, (number, _) in enumerate(live)}
        left = [
            {names[number]: grad.detach() for number, grad in own.items() if grad is not None}
            for own in self._own.values()
        ]
        total: dict[str, torch.Tensor] = {}
        if any(left):
            replicas = self._strategy.local_replicas
            values = tuple({"gradients": own, "runs": torch.ones(())} for own in left)
            total = self._strategy.reduce("sum", PerReplica(values, replicas))["gradients"]
        for number, parameter in live:
            if any(number in own for own in self._own.values()):
                parameter.grad = total.get(names[number])

    def _use(self, parameter: torch.Tensor) -> None:
        known = self._parameters.get(id(parameter))
        if known is None or known() is not parameter:
            self._forget(id(parameter))
            self._parameters[id(parameter)] = weakref.ref(parameter)
            self._outside[id(parameter)] = parameter.grad

    def _live(self) -> list[tuple[int, torch.Tensor]]:
        found = [(number, reference()) for number, reference in self._parameters.items()]
        for number, parameter in found:
            if parameter is None:
                self._forget(number)
        return [(number, parameter) for number, parameter in found if parameter is not None]

    def _forget(self, number: int) -> None:
        for table in (self._parameters, self._outside, *self._own.values()):
            table.pop(number, None)
        for read in self._read.values():
            read.discard(number)


# Set in the replicas of a run, and where they meet.
_guard: ContextVar[TorchGuard | None] = ContextVar("perdure_torch_guard", default=None)


class _ChangeWatch(TorchDispatchMode):
    """Raises for a change of a tensor that is from outside of the replica.

    `storages`: the memory of tensors that belong to the replica; what it makes is added. `gradients`:
    the memory of gradients from outside that a replica has read.
    """

    def __init__(self, storages: set[int], gradients: Container[int]) -> None:
        super().__init__()
        self._storages = storages
        self._gradients = gradients
        # Weak references to their memory, so that none of another tensor gets the same identity.
        self._seen: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if get_replica_context() is None:  # replicas have met, and this is done for all of them
            return func(*args, **kwargs)
        name, written, makes = _described(func)
        for number, argument, replaces in written:
            value = args[number] if number < len(args) else kwargs.get(argument)
            self._check(name, value, replaces)
        if name in _BATCH_NORM and args[_TRAINING] and args[_MEAN] is not None:
            _refuse("running_mean of a batch normalization", name)
        result = func(*args, **kwargs)
        if makes:
            for leaf in result if isinstance(result, (list, tuple)) else (result,):
                if _is_tensor(leaf):
                    storage = leaf.untyped_storage()
                    self._storages.add(storage._cdata)
                    self._seen.append(StorageWeakRef(storage))
        return result

    def _check(self, name: str, value: Any, replaces: bool) -> None:
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if not _is_tensor(tensor) or _storage(tensor) in self._storages:
                continue
            overwritten = name not in _CLEARS and _storage(tensor) in self._gradients
            if isinstance(tensor, torch.nn.Parameter) or overwritten or not replaces:
                _refuse(f"a tensor from outside of it, {_shape(tensor)},", name)


class _Attributes(TorchFunctionMode):
    """Lets the guard know when a replica reads or sets `.grad`, or sets `.data`: no operation does."""

    def __init__(self, guard: TorchGuard) -> None:
        super().__init__()
        self._guard = guard

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        attribute = getattr(func, "__self__", None)
        if (attribute is _GRAD or attribute is _DATA) and (found := _current()) is not None:
            context, _ = found
            self._note(context.replica_id_in_sync_group, attribute, func.__name__, *args)
        return func(*args, **(kwargs or {}))

    def _note(
        self, replica: int, attribute: Any, access: str, tensor: torch.Tensor, *value: Any
    ) -> None:
        if attribute is _GRAD:
            if access == "__get__":
                self._guard.read_gradient(replica, tensor)
            else:
                grad = value[0] if access == "__set__" else None
                self._guard.set_gradient(replica, tensor, grad)
        elif access == "__set__":
            self._guard.set_data(replica, tensor, value[0])


# The descriptors of the attributes, to which the functions that a mode sees are bound.
_GRAD: Any = torch.Tensor.grad
_DATA: Any = torch.Tensor.data


def _refuse(what: str, name: str) -> NoReturn:
    context: Any = get_replica_context()
    raise StateError(
        f"logical replica {context.replica_id_in_sync_group} changes {what} in place ({name}). "
        + FORM
    )


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _plain(value: Any) -> Any:
    """A setting of an optimizer, in a form that can be compared."""
    return value.tolist() if isinstance(value, torch.Tensor) else value


@functools.cache
def _described(func: Any) -> tuple[str, list[tuple[int, str, bool]], bool]:
    """Of an operation: its name, the arguments that it writes to, whether its results are new memory.

    An argument is (position, name, whether nothing of it is read).
    """
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    written = [
        (number, argument.name, argument.is_out or name in _REPLACES)
        for number, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return name, written, name == "lift_fresh" or not any(r.alias_info for r in schema.returns)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _current() -> tuple[Any, TorchGuard] | None:
    """The context of the replica whose code this is, and the guard of its run."""
    context: Any = get_replica_context()
    guard = getattr(context, "guard", None)
    return (context, guard) if isinstance(guard, TorchGuard) else None


def _install() -> None:
    """Let optimizers, schedulers, scalers and `backward` know whether a replica calls them.

    Outside of replicas they are what they were. Classes may have been made since the last time.
    """
    wrap(torch.autograd, "backward", _backward)
    for cls in with_subclasses(torch.optim.Optimizer):
        wrap(cls, "step", _optimizer_step)
    for cls in with_subclasses(torch.optim.lr_scheduler.LRScheduler):
        wrap(cls, "step", _scheduler_step)
    for cls in with_subclasses(torch.amp.GradScaler):  # pyright: ignore[reportPrivateImportUsage]
        wrap(cls, "step", _scaler_step)


def _backward(old: Any) -> Any:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if (found := _current()) is None:
            return old(tensors, *args, **kwargs)
        context, guard = found
        replica = context.replica_id_in_sync_group
        leaves = _leaves(tensors)
        guard.before_backward(replica, leaves)
        result = old(tensors, *args, **kwargs)
        guard.after_backward(replica, leaves)
        return result

    return backward


def _leaves(tensors: Any) -> list[torch.Tensor]:
    """The tensors whose `.grad` a backward pass from `tensors` may change."""
    roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    leaves = {id(t): t for t in roots if t.grad_fn is None and t.requires_grad}
    nodes = [t.grad_fn for t in roots if t.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves[id(leaf)] = leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return list(leaves.values())


def _optimizer_step(old: Any) -> Any:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (found := _current()) is None:
            if (between := _guard.get()) is not None:
                between.check_merged(self)
            return old(self, *args, **kwargs)
        if any(callable(value) for value in (*args, *kwargs.values())):
            raise StateError(
                f"{type(self).__name__}.step(closure) in a replica: it would compute the loss of one "
                "replica again after others have changed the parameters. Use strategy.step, whose "
                "`update` gets the sum of the gradients"
            )
        context, guard = found
        return guard.step(context, self, lambda: old(self, *args, **kwargs))

    return step


def _scheduler_step(old: Any) -> Any:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _current() is not None:
            raise StateError(
                f"{type(self).__name__}.step() in a replica would be made once for each replica. Call "
                "it once, after strategy.run"
            )
        return old(self, *args, **kwargs)

    return step


def _scaler_step(old: Any) -> Any:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _current() is not None and self.is_enabled():
            raise StateError(
                "GradScaler.step() in a replica: one replica would step and another one not, because "
                "each looks for overflows in its own gradients. Use strategy.step with "
                "perdure.distribute.LossScale, or bfloat16, which needs no scale"
            )
        return old(self, *args, **kwargs)

    return step
