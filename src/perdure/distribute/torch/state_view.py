"""The modules, parameters, buffers and other tensors of a state, found once.

Invariant: before they are used again, everything that the search has read is compared by identity.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from types import FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ProxyTypes

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from perdure.checkpoint.checkpoint import Checkpoint
from perdure.distribute import pytree
from perdure.errors import StateError

# The search for modules does not enter these.
_CLOSED = (
    Tensor, str, bytes, int, float, complex, type, FunctionType, MethodType, ModuleType,
    Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.Generator,
)  # fmt: skip

# Where the search for attributes ends: levels below a module, and values in all.
_DEPTH, _MOST_VALUES = 3, 20_000
# What every module has.
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))

_MEMBERS = (nn.Module, Optimizer)
_TABLES = operator.attrgetter("_parameters", "_buffers", "_modules")
_flat = itertools.chain.from_iterable
_NAMES, _VALUES = operator.methodcaller("keys"), operator.methodcaller("values")


def instances(state: Any, kinds: Any) -> list[tuple[str, Any]]:
    """Objects of some types in a state, outside of modules, with their paths."""
    return list(_instances(state, kinds, "", {}))


def _instances(
    value: Any, kinds: Any, path: str, seen: dict[int, Any]
) -> Iterator[tuple[str, Any]]:
    wanted = isinstance(value, kinds)
    if value is None or id(value) in seen or (not wanted and isinstance(value, _CLOSED)):
        return
    seen[id(value)] = value
    if wanted or isinstance(value, nn.Module):
        if wanted:
            yield path, value
        return
    for name, child in list(_children(value)):
        yield from _instances(child, kinds, f"{path}.{name}" if path else str(name), seen)


def _children(value: Any) -> Iterable[tuple[Any, Any]]:
    """(name, child) of each child that the search enters."""
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    if dataclasses.is_dataclass(value):
        return ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    return getattr(value, "__dict__", {}).items()


def attributes(state: Any) -> dict[str, Tensor]:
    """The tensors that objects of the state and its modules have as attributes, by path.

    Those of modules may also be in containers and objects a few levels below. Not all of very many.
    """
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    pending: deque[tuple[str, Any, int]] = deque()
    for path, module in instances(state, nn.Module):
        for inner, part in module.named_modules():
            where = ".".join(filter(None, (path, inner)))
            own = [entry for entry in vars(part).items() if entry[0] not in _MODULE_ATTRIBUTES]
            pending.extend((f"{where}.{n}" if where else n, value, 0) for n, value in own)
    while pending and len(seen) < _MOST_VALUES:
        path, value, depth = pending.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        kind = type(value)  # isinstance would ask a proxy for its object
        if issubclass(kind, Tensor):
            found[path] = value
        elif depth < _DEPTH and not issubclass(kind, (*_CLOSED, *ProxyTypes, nn.Module)):
            if isinstance(value, (dict, list, tuple)):
                inside = _children(value)
            else:  # what a library keeps in a module may lead to all of its own objects
                hidden = path.rpartition(".")[2].startswith("_")
                inside = () if hidden else getattr(value, "__dict__", {}).items()
            entries = itertools.islice(inside, _MOST_VALUES)
            pending.extend((f"{path}.{name}", child, depth + 1) for name, child in entries)
    return found | dict(instances(state, Tensor))


def refuse_sharded(state: Any) -> None:
    """StateError, with its path, for a tensor that is sharded over processes (DTensor)."""
    dtensor = sys.modules.get("torch.distributed.tensor")
    if dtensor is None:
        return
    leaves: list[tuple[str, Any]] = [*named_tensors(state)]
    for path, module in instances(state, nn.Module):
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


def named_tensors(value: Any) -> list[tuple[str, Tensor]]:
    """The tensors of a state or a batch outside of modules, with their paths."""
    values = vars(value) if isinstance(value, Checkpoint) else value
    leaves = [(path.replace("/", "."), leaf) for path, leaf in pytree.flatten(values)]
    return [(path, leaf) for path, leaf in leaves if isinstance(leaf, Tensor)]


def tensors(value: Any) -> list[Tensor]:
    """The same without their paths."""
    values = vars(value) if isinstance(value, Checkpoint) else value
    return [leaf for leaf in pytree.leaves(values) if isinstance(leaf, Tensor)]


def same(one: list[Any], other: list[Any]) -> bool:
    """Whether they are the same objects."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


class StateView:
    """The tensors of a state.

    `parameters` are the parameters of all modules by path, `buffers` (path, module, key, tensor) of
    dense buffers, `fixed` the other buffers, `tensors` the tensors outside of modules. `trained`: the
    tensors of which a replica may compute gradients, each once. `watched`: what `grad` must not change.
    `is_used`: a `grad` that used it has returned.
    """

    def __init__(self, state: Any) -> None:
        self.state = state
        self.is_used = False
        self._members = instances(state, _MEMBERS)
        self._found = found = [m for m in self._members if isinstance(m[1], nn.Module)]
        self.optimizers = [value for _, value in self._members if isinstance(value, Optimizer)]
        self.tensors = tensors(state)
        self.parts = [part for _, module in found for part in module.modules()]
        self._tables = [*_flat(map(_TABLES, self.parts))]
        self._sizes = [*map(len, self._tables)]
        self._filled = [table for table in self._tables if table]
        self._names, self._values = ([*_flat(map(get, self._filled))] for get in (_NAMES, _VALUES))
        buffers = list(_buffers(found))
        self.buffers = [entry for entry in buffers if _has_mean(entry[-1])]
        named = [(path, module, dict(module.named_parameters())) for path, module in found]
        self.parameters = {
            f"{path}.{name}" if path else name: parameter
            for path, _, parameters in named
            for name, parameter in parameters.items()
        }
        self.fixed = {entry[0]: entry[-1] for entry in buffers if not _has_mean(entry[-1])}
        self.watched = [*self.parameters.values(), *self.tensors, *self.fixed.values()]
        groups = [group["params"] for value in self.optimizers for group in value.param_groups]
        others = [
            t
            for t in self.tensors
            if t.is_leaf and (t.is_floating_point() or t.is_complex()) and not t.is_inference()
        ]
        trained = (*self.parameters.values(), *others, *_flat(groups))
        self.trained = list({id(tensor): tensor for tensor in trained}.values())
        # A module may have a method of its own that gives other parameters each time.
        plain = all(map(_has_plain_names, self.parts))
        self._named = {id(module): parameters for _, module, parameters in named if plain}

    def is_of(self, state: Any) -> bool:
        """Whether it is of this state, with the modules, optimizers and other tensors that it had."""
        return (
            state is self.state
            and instances(state, _MEMBERS) == self._members
            and same(tensors(state), self.tensors)
        )

    def is_current(self) -> bool:
        """Whether the modules have the same parts as before, by identity, without a loop in Python."""
        is_ = operator.is_
        return (
            all(map(is_, _flat(map(_TABLES, self.parts)), self._tables))
            and [*map(len, self._tables)] == self._sizes  # so that neither is longer below
            and all(map(is_, _flat(map(_VALUES, self._filled)), self._values))
            and all(map(is_, _flat(map(_NAMES, self._filled)), self._names))
        )

    def filled_buffers(self) -> list[tuple[str, Tensor]]:
        """Those with a mean that were None or missing when this was made."""
        known = {name for name, *_ in self.buffers}.union(self.fixed)
        now = ((name, buffer) for name, *_, buffer in _buffers(self._found) if name not in known)
        return [(name, buffer) for name, buffer in now if _has_mean(buffer)]

    def named_parameters(self, module: nn.Module) -> dict[str, nn.Parameter] | None:
        """Those of an outermost module, if they are known and the same as before."""
        named = self._named.get(id(module))
        return named if named is not None and self.is_current() else None


def _has_mean(buffer: Tensor) -> bool:
    """Whether what replicas make of a buffer can be added up: not if it is sparse or quantized."""
    return buffer.layout is torch.strided and not buffer.is_quantized


def _has_plain_names(part: nn.Module) -> bool:
    names = ("named_parameters", "_named_members", "named_modules")
    return not any(
        name in part.__dict__ or getattr(type(part), name) is not getattr(nn.Module, name)
        for name in names
    )


# The state of the `grad` or `update` that this thread calls.
_current_view: ContextVar[StateView | None] = ContextVar("perdure_torch_state", default=None)
use_view, forget_view = _current_view.set, _current_view.reset


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """`dict(module.named_parameters())`, which must not be changed; in a step not searched again."""
    if not torch.compiler.is_compiling() and (view := _current_view.get()) is not None:
        known = view.named_parameters(module)
        if known is not None:
            return known
    return dict(module.named_parameters())
