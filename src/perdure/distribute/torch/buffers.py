"""Buffers that a logical replica's forward pass changes in place, as contributions.

Each logical replica starts from the same buffers, and its changes are summed in the tree like
gradients. So statistics such as BatchNorm's are those of V replicas, however many of them one process
runs.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import sys
from collections.abc import Callable, Collection, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from perdure.checkpoint import Checkpoint
from perdure.distribute import pytree
from perdure.errors import StateError

# The search for modules does not enter these.
_CLOSED = (
    Tensor, str, bytes, int, float, complex, type, FunctionType, MethodType, ModuleType,
    torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.Generator,
)  # fmt: skip


_PLAIN = frozenset((Tensor, nn.Parameter))
_TABLES = operator.attrgetter("_parameters", "_buffers", "_modules")
_ENTRIES = operator.methodcaller("items")
_COUNT = operator.attrgetter("_version")
# What `grad` must not change in place, and why.
_PARAMETER = (
    "parameter. Only update may change parameters, because grad runs once for each logical replica"
)
_TENSOR = (
    "tensor of the state in place. Only update may change the state, because grad runs once for each "
    "logical replica: return what each replica contributes, whose sum update gets"
)
BATCH = (
    "tensor of its batch in place, which may be the memory of the dataset, and a replica may be "
    "computed more than once. Compute a new tensor: x = x / 255 for x.div_(255)"
)
# An entry beside the names of buffers, which never have a slash.
CHANGED = "/changed"


def modules(state: Any) -> list[tuple[str, nn.Module]]:
    """Every outermost module in a state, with its path: in containers, dataclasses and objects."""
    return list(_modules(state, "", set()))


def _modules(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if value is None or isinstance(value, _CLOSED) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield path, value
        return
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, (list, tuple)):
        children = enumerate(value)
    elif dataclasses.is_dataclass(value):
        children = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    else:
        children = getattr(value, "__dict__", {}).items()
    for name, child in list(children):
        yield from _modules(child, f"{path}.{name}" if path else str(name), seen)


def refuse_sharded(state: Any) -> None:
    """StateError, with its path, for a tensor that is sharded over processes (DTensor)."""
    dtensor = sys.modules.get("torch.distributed.tensor")
    if dtensor is None:
        return
    leaves: list[tuple[str, Any]] = [*_tensors(state)]
    for path, module in modules(state):
        for inner, leaf in itertools.chain(module.named_parameters(), module.named_buffers()):
            leaves.append((".".join(filter(None, (path, inner))), leaf))
    for path, leaf in leaves:
        if isinstance(leaf, dtensor.DTensor) and not all(p.is_replicate() for p in leaf.placements):
            raise StateError(
                f"{path}: {list(leaf.shape)} is a DTensor that is sharded ({leaf.placements}). "
                "Strategies are data-parallel: every process holds the whole model. Train a model that "
                "is sharded by its parameters (FSDP, tensor parallel) with your own loop and "
                "perdure.CheckpointManager"
            )


def _buffers(found: list[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    for path, module in found:
        for inner, part in module.named_modules():
            if isinstance(part, nn.SyncBatchNorm):
                raise StateError(
                    f"{'.'.join(filter(None, (path, inner)))}: SyncBatchNorm adds up statistics over "
                    "the processes inside the forward pass, in an order that depends on how many "
                    "there are; the bits would change with the topology. Use BatchNorm: its "
                    "statistics are then those of each logical replica"
                )
            for key, buffer in part._buffers.items():
                if buffer is not None:
                    yield ".".join(filter(None, (path, inner, key))), part, key, buffer


def _tensors(state: Any) -> list[tuple[str, Tensor]]:
    """The tensors of a state outside of modules, with their paths."""
    values = vars(state) if isinstance(state, Checkpoint) else state
    leaves = [(path.replace("/", "."), leaf) for path, leaf in pytree.flatten(values)]
    return [(path, leaf) for path, leaf in leaves if isinstance(leaf, Tensor)]


def _loose(state: Any) -> list[Tensor]:
    values = vars(state) if isinstance(state, Checkpoint) else state
    return [leaf for leaf in pytree.leaves_and_structure(values)[0] if isinstance(leaf, Tensor)]


def _same(one: list[Any], other: list[Any]) -> bool:
    """Whether they are the same objects."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


class StateView:
    """The tensors of a state, which take longer to find than a small model to compute.

    Attributes:
        state: The state.
        parameters: Those of all modules, by path.
        buffers: (path, module that has it, key, tensor) of each.
        tensors: Those outside of modules.
        parts: All modules.
    """

    def __init__(self, state: Any) -> None:
        self.state = state
        self._found = modules(state)
        self.tensors = _loose(state)
        self.parts = [part for _, module in self._found for part in module.modules()]
        self._held = self._tables()
        self.buffers = list(_buffers(self._found))
        self.parameters = {
            f"{path}.{name}" if path else name: parameter
            for path, module in self._found
            for name, parameter in module.named_parameters()
        }

    def is_of(self, state: Any) -> bool:
        """Whether it is of this state, which has the same modules and other tensors as before."""
        return (
            state is self.state
            and modules(state) == self._found
            and _same(_loose(state), self.tensors)
        )

    def is_current(self) -> bool:
        """Whether the modules have the same parameters, buffers and modules in them as before."""
        lengths, held = self._tables()
        return lengths == self._held[0] and _same(held, self._held[1])

    def _tables(self) -> tuple[list[int], list[Any]]:
        """What the modules hold: the sizes of their tables, and every name and value in these.

        Compared by identity, without a loop in Python.
        """
        tables = list(itertools.chain.from_iterable(map(_TABLES, self.parts)))
        entries = itertools.chain.from_iterable(map(_ENTRIES, tables))
        return [*map(len, tables)], [*itertools.chain.from_iterable(entries)]


class Unchanged:
    """The tensors of a value outside of modules, and whether one of them changes in place.

    Args:
        value: A state or a batch.
        tensors: The tensors, if they were looked up before.
    """

    def __init__(self, value: Any, tensors: list[Tensor] | None = None) -> None:
        self._value = value
        self._tensors = _loose(value) if tensors is None else tensors
        self._versions = _versions(self._tensors)

    def require(self, what: str) -> None:
        """StateError with the path of a tensor that changed; `what` says what it is."""
        if _versions(self._tensors) != self._versions:
            for tensor in _changed(self._tensors, self._versions):
                paths = (path for path, leaf in _tensors(self._value) if leaf is tensor)
                raise StateError(f"{next(paths, '') or 'the batch'}: grad changed this {what}")


def _versions(tensors: Collection[Tensor]) -> list[Any]:
    """Values that change with every change in place, and with `tensor.data = ...`."""
    if not tensors:
        return []
    if _PLAIN.issuperset(map(type, tensors)) and not any(map(Tensor.is_inference, tensors)):
        return [*zip(map(_COUNT, tensors), map(Tensor.data_ptr, tensors), strict=False)]
    return [
        (
            0 if tensor.is_inference() else tensor._version,
            tensor.data_ptr() if type(tensor) in _PLAIN else 0,
        )
        for tensor in tensors
    ]


def _changed(tensors: Collection[Tensor], versions: list[Any]) -> Iterator[Tensor]:
    for tensor, old, new in zip(tensors, versions, _versions(tensors), strict=True):
        if old != new:
            yield tensor


def isolated(view: StateView, grad: Callable[[], Any]) -> tuple[Any, dict[str, Tensor]]:
    """(result of `grad`, its buffers by name); the state itself is put back as it was.

    One more entry counts, for each buffer, whether it changed: buffers that no replica changed are not
    written afterwards, because V equal values divided by V may give another value. Values are compared,
    because BatchNorm's kernel does not raise the version of the tensors that it writes.
    """
    before = [(*entry, entry[-1].clone()) for entry in view.buffers]
    tensors = Unchanged(view.state, view.tensors)
    parameters = view.parameters.values()
    versions = _versions(parameters)
    grads = [parameter.grad for parameter in parameters]
    # With backward() in `grad`, each replica finds its own gradients in `.grad` and no others.
    for parameter, old in zip(parameters, grads, strict=True):
        if old is not None:
            parameter.grad = None
    after: dict[str, Tensor] = {}
    changed: list[bool] = []
    without_mean: list[str] = []
    try:
        result = grad()
    finally:
        for name, part, key, buffer, value in before:
            now = part._buffers[key]
            assert now is not None
            differs = not torch.equal(now, value)
            if value.dtype != torch.bool:
                changed.append(differs)
                after[name] = now.detach().clone() if differs else value
            elif differs:
                without_mean.append(name)
            if differs or now is not buffer:
                part._buffers[key] = buffer
                with torch.no_grad():
                    buffer.copy_(value)
        for parameter, old in zip(parameters, grads, strict=True):
            if parameter.grad is not old:
                parameter.grad = old
    if _versions(parameters) != versions:
        first = next(_changed(parameters, versions))
        name = next(name for name, parameter in view.parameters.items() if parameter is first)
        raise StateError(f"{name}: grad changed this {_PARAMETER}")
    tensors.require(_TENSOR)
    if without_mean:
        raise StateError(f"{without_mean[0]}: grad changed this buffer of bool, which has no mean")
    return result, {**after, CHANGED: torch.tensor(changed, dtype=torch.int64)} if after else {}


def write(view: StateView, totals: dict[str, Tensor], replicas: int) -> None:
    """Put the mean over the replicas into the buffers that one of them changed.

    Integers (num_batches_tracked) are divided as integers: all replicas count alike.
    """
    names = [name for name in totals if name != CHANGED]
    changed = {n for n, count in zip(names, totals[CHANGED].tolist(), strict=True) if count}
    with torch.no_grad():
        for name, _, _, buffer in view.buffers:
            if name in changed:
                total = totals[name]
                whole = not (total.is_floating_point() or total.is_complex())
                buffer.copy_(total // replicas if whole else total / replicas)
