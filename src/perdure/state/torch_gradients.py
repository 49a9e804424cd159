"""The gradients of PyTorch that decide what an optimizer does next, as leaves beside the state.

They are two things: the values that `backward` has written since the last step of the optimizer, to
which later batches add (gradient accumulation), and which parameters keep a gradient from step to step
(`zero_grad(set_to_none=False)`).
"""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import msgspec
import numpy as np

from perdure.errors import CorruptionError
from perdure.state.adapter import adapter
from perdure.state.extra_members import Restoring, Saving
from perdure.state.leaf_values import plain_value, scalar_leaf
from perdure.state.paths import join_part
from perdure.state.walk import Walk
from perdure.store.leaf import Leaf

_KEPT = "torch/gradients"
_decoder = msgspec.json.Decoder(dict[str, list[str]])
_ACCUMULATED = re.compile(r"process/([0-9]+)/accumulated/([0-9]+)(?:/(.*))?", re.DOTALL)


class _Sample(NamedTuple):
    """A gradient of an optimizer at the last look, and whether the program was seen to keep it."""

    gradient: Any  # a `torch.utils.weak.TensorWeakRef`
    version: int
    is_kept: bool


class _Used(NamedTuple):
    """The gradients of an optimizer after its last step: the first, and the versions of all."""

    first: Any  # a `torch.utils.weak.TensorWeakRef`, or None without a gradient
    versions: list[int]  # -1 where there is none


_samples: weakref.WeakKeyDictionary[Any, _Sample] = weakref.WeakKeyDictionary()
_used: weakref.WeakKeyDictionary[Any, _Used] = weakref.WeakKeyDictionary()


class KeptGradients:
    """Which parameters have a gradient, of a program that keeps them from step to step.

    Two looks show whether a program keeps them. The first look is the first call of `save`, so that the
    first save that is due knows it. See `perdure.state.extra_members.ExtraMember`.
    """

    name = "gradients"
    of_process = False

    def see(self, walk: Walk) -> None:
        for _, optimizer in _optimizers(walk):
            keeps_gradients(optimizer)

    def take(self, saving: Saving) -> dict[str, Leaf]:
        kept = {
            path: kept_gradients(optimizer)
            for path, optimizer in _optimizers(saving.walk)
            if keeps_gradients(optimizer)
        }
        text = msgspec.json.encode(kept, order="sorted").decode()
        return {_KEPT: scalar_leaf(text)} if kept else {}

    def put(self, restoring: Restoring) -> list[str]:
        leaf = restoring.leaves.get(_KEPT)
        try:
            stored = {} if leaf is None else _decoder.decode(plain_value(leaf))
        except ValueError as error:  # of msgspec
            raise CorruptionError(f"{restoring.where}: {_KEPT} cannot be read: {error}.") from error
        ranges = {restoring.renamed(path): names for path, names in stored.items()}
        for path, optimizer in _optimizers(restoring.walk):
            if path in ranges:
                give_gradients(optimizer, ranges[path])
        return []


class AccumulatedGradients:
    """What `backward` has written since the last step of an optimizer.

    See `perdure.state.extra_members.ExtraMember`.
    """

    name = "accumulated"
    of_process = True

    def see(self, walk: Walk) -> None:
        watch_gradients(optimizer for _, optimizer in _optimizers(walk))

    def take(self, saving: Saving) -> dict[str, Leaf]:
        leaves: dict[str, Leaf] = {}
        for path, optimizer in _optimizers(saving.walk):
            leaves |= accumulated_leaves(path, optimizer, saving.process)
        return leaves

    def put(self, restoring: Restoring) -> list[str]:
        stored = accumulated(restoring.leaves, restoring.group.index)
        gradients = {restoring.renamed(path): leaves for path, leaves in stored.items()}
        for path, optimizer in _optimizers(restoring.walk):
            if path in gradients:
                give_accumulated(optimizer, gradients[path])
        self.see(restoring.walk)
        return []


def _optimizers(walk: Walk) -> Iterator[tuple[str, Any]]:
    from torch.optim import Optimizer

    for path, node in walk.objects.items():
        if isinstance(node.target, Optimizer):
            yield path, node.target


def watch_gradients(optimizers: Iterable[Any]) -> None:
    """Begin to tell the gradients that a step has used from those that `backward` writes after it.

    What the optimizers have now counts as used.
    """
    for optimizer in optimizers:
        _watch_steps()
        if optimizer not in _used:
            _note_step(optimizer)


def accumulated_leaves(path: str, optimizer: Any, process: int) -> dict[str, Leaf]:
    """A copy of each gradient that was written since the last step of the optimizer at `path`.

    There is none after a step, wherever the program calls `zero_grad`. Sparse gradients are left
    out, and so are those that are zeros.
    """
    if (used := _used.get(optimizer)) is None:
        return {}
    held, versions = list(_parameters(optimizer)), used.versions
    if used.first is None or used.first() is not _first(held) or len(versions) != len(held):
        versions = [-1] * len(held)
    leaves: dict[str, Leaf] = {}
    for number, (value, version) in enumerate(zip(held, versions, strict=True)):
        gradient = _gradient(value)
        if gradient is None or gradient.is_meta or gradient._version == version:
            continue
        leaf = adapter("torch").leaf(_shards().local_tensor(gradient))
        # By the bits: a sum with -0.0 is another one than a sum with 0.0.
        if leaf is not None and np.frombuffer(leaf.data, np.uint8).any():
            leaves[join_part(f"process/{process}/accumulated/{number}", path)] = leaf.copy()
    return leaves


def accumulated(process_leaves: Mapping[str, Leaf], process: int) -> dict[str, dict[int, Leaf]]:
    """What `accumulated_leaves` gave for a process: by the path, and by the number of the parameter."""
    found: dict[str, dict[int, Leaf]] = {}
    for name, leaf in process_leaves.items():
        parts = _ACCUMULATED.fullmatch(name)
        if parts is not None and int(parts[1]) == process:
            found.setdefault(parts[3] or "", {})[int(parts[2])] = leaf
    return found


def give_accumulated(optimizer: Any, stored: Mapping[int, Leaf]) -> None:
    """Give the parameters of an optimizer the gradients that had been accumulated at the save."""
    import torch

    for number, value in enumerate(_parameters(optimizer)):
        local = _shards().local_tensor(value.detach())
        if (leaf := stored.get(number)) is not None and leaf.shape == tuple(local.shape):
            gradient = adapter("torch").load(torch.empty_like(local), leaf)
            value.grad = _shards().with_local(value, gradient)
    _used[optimizer] = _Used(None, [])  # no step has used them


def keeps_gradients(optimizer: Any) -> bool:
    """Whether the program lets the gradients of `optimizer` stay from step to step.

    With `zero_grad(set_to_none=False)` the tensor that was a gradient at the last look still is one,
    and was written since. At two looks at one moment, the answer is that of the first.
    """
    from torch.utils.weak import TensorWeakRef

    old = _samples.get(optimizer)
    before = None if old is None else old.gradient()
    sample = None
    for value in _parameters(optimizer):
        if (gradient := _gradient(value)) is None:
            continue
        if sample is None:
            sample = _Sample(TensorWeakRef(gradient), gradient._version, False)
        if before is None:
            break
        if old is not None and gradient is before:
            is_kept = old.is_kept or gradient._version > old.version
            sample = _Sample(old.gradient, gradient._version, is_kept)
            break
    if sample is None:
        _samples.pop(optimizer, None)
        return False
    _samples[optimizer] = sample
    return sample.is_kept


def give_gradients(optimizer: Any, ranges: list[str]) -> None:
    """Give the parameters that had a gradient at the save, and have none now, one of zeros.

    An optimizer leaves a parameter without a gradient alone, and moves one with a gradient of zeros (by
    momentum, by weight decay). A program that keeps its gradients calls `zero_grad` before the next
    `backward`, so that their values at the save decide nothing.
    """
    import torch
    from torch.utils.weak import TensorWeakRef

    held = list(_parameters(optimizer))
    for text in ranges:
        start, _, end = text.partition("-")
        for value in held[int(start) : int(end or start) + 1]:
            if value.grad is None and not value.is_meta:
                value.grad = torch.zeros_like(value, requires_grad=False)
    if gradients := [gradient for value in held if (gradient := _gradient(value)) is not None]:
        # The checkpoint says that the program keeps them, so the next save need not see it again.
        first = gradients[0]
        _samples[optimizer] = _Sample(TensorWeakRef(first), first._version, True)


def kept_gradients(optimizer: Any) -> list[str]:
    """The numbers of the parameters that have a gradient, as ranges."""
    held = enumerate(_parameters(optimizer))
    return _ranges(number for number, value in held if _gradient(value) is not None)


def _ranges(numbers: Iterator[int]) -> list[str]:
    """Rising numbers as ranges: `["0-157", "160"]`."""
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    members = ([number for _, number in group] for _, group in runs)
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in members]


def _parameters(optimizer: Any) -> Iterator[Any]:
    """The parameters of an optimizer, in the order in which its `state_dict` numbers them."""
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]


def _gradient(value: Any) -> Any:
    """The gradient of a parameter; None for a sparse one, which is given to no parameter again."""
    return None if value.grad is None or value.grad.is_sparse else value.grad


def _first(held: Iterable[Any]) -> Any:
    return next((value.grad for value in held if value.grad is not None), None)


def _note_step(optimizer: Any, *_: Any) -> None:
    """Remember the gradients of an optimizer that has made a step. Takes 0.25 µs for each."""
    from torch.compiler import is_compiling
    from torch.utils.weak import TensorWeakRef

    if is_compiling():  # their versions would be constants of the program
        return
    held = list(_parameters(optimizer))
    first = _first(held)
    versions = [-1 if (grad := value.grad) is None else grad._version for value in held]
    _used[optimizer] = _Used(None if first is None else TensorWeakRef(first), versions)


@cache
def _watch_steps() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(_note_step)


def _shards() -> Any:
    return import_module("perdure.state.torch_shards")
