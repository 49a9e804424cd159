"""Buffers that a logical replica's forward pass changes in place, as contributions.

Each logical replica starts from the same buffers, and its changes are summed in the tree like
gradients. So statistics such as BatchNorm's are those of V replicas, however many of them one process
runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
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


def _buffers(state: Any) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    for path, module in modules(state):
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


def _version(tensor: Tensor) -> tuple[int, int]:
    """A value that changes with every change in place, and with `tensor.data = ...`."""
    count = 0 if tensor.is_inference() else tensor._version
    return count, tensor.data_ptr() if type(tensor) in (Tensor, nn.Parameter) else 0


def isolated(state: Any, grad: Callable[[], Any]) -> tuple[Any, dict[str, Tensor]]:
    """(result of `grad`, its buffers by name); the state itself is put back as it was.

    One more entry counts, for each buffer, whether it changed: buffers that no replica changed are not
    written afterwards, because V equal values divided by V may give another value. Values are compared,
    because BatchNorm's kernel does not raise the version of the tensors that it writes.
    """
    before = [(*entry, entry[-1].clone()) for entry in _buffers(state)]
    parameters = [
        (f"{path}.{name}" if path else name, p, _version(p), p.grad)
        for path, module in modules(state)
        for name, p in module.named_parameters()
    ]
    tensors = [(path, tensor, _version(tensor)) for path, tensor in _tensors(state)]
    # With backward() in `grad`, each replica finds its own gradients in `.grad` and no others.
    for _, parameter, _, _ in parameters:
        parameter.grad = None
    after: dict[str, Tensor] = {}
    changed: list[bool] = []
    without_mean: list[str] = []
    try:
        result = grad()
    finally:
        with torch.no_grad():
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
                    buffer.copy_(value)
        for _, parameter, _, old in parameters:
            parameter.grad = old
    _require_unchanged(
        [(name, parameter, version) for name, parameter, version, _ in parameters],
        "parameter. Only update may change parameters, because grad runs once for each logical replica",
    )
    _require_unchanged(
        tensors,
        "tensor of the state in place. Only update may change the state, because grad runs once for "
        "each logical replica: return what each replica contributes, whose sum update gets",
    )
    if without_mean:
        raise StateError(f"{without_mean[0]}: grad changed this buffer of bool, which has no mean")
    return result, {**after, CHANGED: torch.tensor(changed, dtype=torch.int64)} if after else {}


@contextlib.contextmanager
def unchanged_share(share: Any) -> Iterator[None]:
    """StateError, with its path, for a tensor of the share that changes in place.

    It may be the memory of the dataset, and a replica may be computed more than once.
    """
    tensors = [(path or "the batch", leaf, _version(leaf)) for path, leaf in _tensors(share)]
    yield
    _require_unchanged(
        tensors,
        "tensor of its batch in place, which may be the memory of the dataset, and a replica may be "
        "computed more than once. Compute a new tensor: x = x / 255 for x.div_(255)",
    )


def _require_unchanged(tensors: Iterable[tuple[str, Tensor, Any]], what: str) -> None:
    """StateError for the first tensor that has another version than the one beside it."""
    for path, tensor, version in tensors:
        if _version(tensor) != version:
            raise StateError(f"{path}: grad changed this {what}")


def write(state: Any, totals: dict[str, Tensor], replicas: int) -> None:
    """Put the mean over the replicas into the buffers that one of them changed.

    Integers (num_batches_tracked) are divided as integers: all replicas count alike.
    """
    if not totals:
        return
    names = [name for name in totals if name != CHANGED]
    changed = {n for n, count in zip(names, totals[CHANGED].tolist(), strict=True) if count}
    with torch.no_grad():
        for name, _, _, buffer in _buffers(state):
            if name in changed:
                total = totals[name]
                whole = not (total.is_floating_point() or total.is_complex())
                buffer.copy_(total // replicas if whole else total / replicas)
