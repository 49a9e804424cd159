"""The gradients of PyTorch that decide what an optimizer does next, as leaves beside the state.

Values that `backward` has written since the last step (gradient accumulation), and which parameters
keep a gradient from step to step (`zero_grad(set_to_none=False)`): an optimizer leaves one without
a gradient alone, and moves one with a gradient of zeros (momentum, weight decay). Of tensors that are
in no module (a program's own parameters) also which of them require a gradient, and the gradients
that no optimizer of the state uses: only the program knows when they are used up.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import TensorWeakRef

from perdure.errors import UnsupportedLeafError
from perdure.state.adapter import adapter
from perdure.state.extra_members import ExtraMember, Restoring, Saving, json_leaf
from perdure.state.paths import join_dotted
from perdure.state.torch_tensors import local_tensor, with_local
from perdure.state.walk import Walk
from perdure.store.leaf import Leaf

_decoder = msgspec.json.Decoder(dict[str, list[str]])
_trained_decoder = msgspec.json.Decoder(dict[str, bool])


class _Step(NamedTuple):
    """The gradients of an optimizer after its last step, or at the first look at it."""

    first: Any  # a `torch.utils.weak.TensorWeakRef`, or None without a gradient
    versions: list[int]  # of all gradients; -1 where there is none, or where no step has used it
    is_kept: bool  # whether the program was seen to keep them

    def is_first(self, gradient: Any) -> bool:
        """Whether `gradient` is the first one that there was then."""
        return gradient is not None and self.first is not None and self.first() is gradient


_steps: weakref.WeakKeyDictionary[Any, _Step] = weakref.WeakKeyDictionary()


class Gradients(ExtraMember):
    """Stores gradients that a later step uses, and which tensors require one; refuses gradients that
    FSDP2 has not reduced yet."""

    def __init__(self) -> None:
        self._trained: dict[str, bool] | None = None
        """Which tensors required a gradient at first, by path."""

    def observe(self, walk: Walk) -> None:
        _watch(walk)
        if self._trained is None:
            self._trained = {path: value.requires_grad for path, value in _tensors(walk)}

    def capture(self, saving: Saving) -> dict[str, Leaf]:
        _watch(saving.walk)
        if "torch.distributed.fsdp" in sys.modules:
            for path, module in saving.walk.torch_objects("nn.Module"):
                _require_reduced(path, module)
        leaves, kept = dict[str, Leaf](), dict[str, list[str]]()
        for path, optimizer in _optimizers(saving.walk):
            leaves |= accumulated_leaves(path, optimizer, saving.process)
            if keeps_gradients(optimizer):
                parameters = enumerate(_parameters(optimizer))
                kept[path] = _ranges(n for n, value in parameters if _gradient(value) is not None)
        if kept:
            leaves[f"process/{saving.process}/gradients"] = json_leaf(kept)
        tensors, first = dict(_tensors(saving.walk)), self._trained or {}
        now = {path: value.requires_grad for path, value in tensors.items()}
        if changed := {path: now[path] for path in now if first.get(path, now[path]) != now[path]}:
            leaves[f"process/{saving.process}/trained"] = json_leaf(changed)
        for path, value in _unstepped(saving.walk, tensors):
            if (leaf := _leaf(_gradient(value))) is not None:
                leaves[f"process/{saving.process}/gradient/{path}"] = leaf
        return leaves

    def restore(self, restoring: Restoring, walk: Walk) -> list[str]:
        kept = restoring.by_path("gradients", _decoder)
        written: dict[str, dict[int, Leaf]] = {}
        of_tensors: dict[str, Leaf] = {}
        for name, leaf in restoring.leaves.items():
            member, _, rest = name.removeprefix(f"process/{restoring.group.index}/").partition("/")
            if member == "gradient":
                of_tensors[restoring.renamed(rest)] = leaf
            elif member == "accumulated":
                number, _, path = rest.partition("/")
                written.setdefault(restoring.renamed(path), {})[int(number)] = leaf
        for path, optimizer in _optimizers(walk):
            if path in kept or path in written:
                give_gradients(optimizer, kept.get(path), written.get(path, {}))
        trained = restoring.by_path("trained", _trained_decoder)
        tensors = dict(_tensors(walk)) if trained or of_tensors else {}
        for path in trained.keys() & tensors.keys():
            tensors[path].requires_grad_(trained[path])
        for path, value in _unstepped(walk, tensors) if of_tensors else ():
            if (leaf := of_tensors.get(path)) is not None:
                _give(value, leaf)
        _watch(walk)
        return []


def _require_reduced(path: str, module: Any) -> None:
    """Refuse gradients that FSDP2 keeps outside of `.grad` until a backward pass reduces them."""
    sharded = [part for part in module.modules() if hasattr(type(part), "_get_fsdp_state")]
    for parameter in itertools.chain.from_iterable(map(_parameters_of_fsdp, sharded)):
        whole = getattr(parameter, "_unsharded_param", None)
        gradients = parameter.unsharded_accumulated_grad, getattr(whole, "grad", None)
        if any(gradient is not None for gradient in gradients):
            raise UnsupportedLeafError(
                f"{path}: FSDP2 has gradients that are not reduced yet "
                f"(`set_requires_gradient_sync(False)`), which no checkpoint can have. Save after the "
                f"micro-batch whose backward pass reduces them."
            )


def _parameters_of_fsdp(module: Any) -> list[Any]:
    """What FSDP2 keeps for each parameter of a module; newer releases have several groups of them."""
    state = module._get_fsdp_state()
    if (groups := getattr(state, "_fsdp_param_groups", None)) is None:
        groups = [group for group in [state._fsdp_param_group] if group is not None]
    return [parameter for group in groups for parameter in group.fsdp_params]


def keeps_gradients(optimizer: Any) -> bool:
    """Whether the tensor that was a gradient at the last step still is one, and was written since,
    or before that step: the program uses `zero_grad(set_to_none=False)`."""
    step, first = _steps[optimizer], _first_gradient(optimizer)
    before = next((version for version in step.versions if version >= 0), -1)
    return step.is_first(first) and (step.is_kept or first._version > before)


def accumulated_leaves(path: str, optimizer: Any, process: int) -> dict[str, Leaf]:
    """A copy of each dense gradient that is not zero and was written since the last step."""
    parameters, step = list(_parameters(optimizer)), _steps[optimizer]
    versions = step.versions
    if not step.is_first(_first_gradient(optimizer)) or len(versions) != len(parameters):
        versions = [-1] * len(parameters)
    leaves: dict[str, Leaf] = {}
    for number, (value, version) in enumerate(zip(parameters, versions, strict=True)):
        gradient = _gradient(value)
        if gradient is None or gradient.is_meta or gradient._version == version:
            continue
        if (leaf := _leaf(gradient)) is not None:
            leaves[f"process/{process}/accumulated/{number}/{path}"] = leaf
    return leaves


def _leaf(gradient: Any) -> Leaf | None:
    """A copy of a dense gradient; None if it is zero."""
    leaf = None if gradient is None else adapter("torch").leaf(local_tensor(gradient))
    # By the bits: a sum with -0.0 is another one than a sum with 0.0.
    return leaf.copy() if leaf is not None and np.frombuffer(leaf.data, np.uint8).any() else None


def _give(value: Any, leaf: Leaf) -> None:
    """Give a tensor the gradient that it had at the save, if it still has that shape."""
    local = local_tensor(value.detach())
    if leaf.shape == tuple(local.shape):
        value.grad = with_local(value, adapter("torch").load(torch.empty_like(local), leaf))


def give_gradients(optimizer: Any, kept: list[str] | None, written: Mapping[int, Leaf]) -> None:
    """Give the parameters the gradients that they had at the save, by number.

    Those in `kept` (ranges) get zeros: the program calls `zero_grad` before the next `backward`.
    `written` has what had been accumulated.
    """
    parameters = list(_parameters(optimizer))
    for text in kept or ():
        start, _, end = text.partition("-")
        for value in parameters[int(start) : int(end or start) + 1]:
            if value.grad is None and not value.is_meta:
                value.grad = torch.zeros_like(value, requires_grad=False)
    for number, value in enumerate(parameters):
        if (leaf := written.get(number)) is not None:
            _give(value, leaf)
    unused = _Step(None, [], is_kept=False)
    if kept is not None:
        unused = _now(optimizer, is_kept=True)._replace(versions=[-1] * len(parameters))
    _steps[optimizer] = unused


def _now(optimizer: Any, *, is_kept: bool) -> _Step:
    """The present gradients of an optimizer. Takes 0.25 µs for each."""
    first = _first_gradient(optimizer)
    versions = [-1 if (g := value.grad) is None else g._version for value in _parameters(optimizer)]
    return _Step(None if first is None else TensorWeakRef(first), versions, is_kept)


def _after_step(optimizer: Any, *_: Any) -> None:
    # The versions would be constants of a program that is compiled.
    if not is_compiling() and optimizer in _steps:
        _steps[optimizer] = _now(optimizer, is_kept=keeps_gradients(optimizer))


def _watch(walk: Walk) -> None:
    """Begin to distinguish gradients that a step has used from gradients written after it."""
    for _, optimizer in _optimizers(walk):
        _watch_steps()
        if optimizer not in _steps:
            _steps[optimizer] = _now(optimizer, is_kept=False)


@cache
def _watch_steps() -> None:
    register_optimizer_step_post_hook(_after_step)


def _optimizers(walk: Walk) -> Iterator[tuple[str, Any]]:
    """The optimizers of a state by path; of one that wraps another, that one, which makes the steps."""
    for path, optimizer in walk.torch_objects("optim.Optimizer"):
        inner = getattr(optimizer, "optimizer", None)
        yield path, inner if isinstance(inner, Optimizer) else optimizer


def _tensors(walk: Walk) -> Iterator[tuple[str, Any]]:
    """The tensors of a state that are in no module and may require a gradient, by path. Those of Keras
    have optimizers of Keras, after which their gradients are used up."""
    pairs = [pair for pair in walk.inside if isinstance(pair[1], torch.Tensor)]
    for start, stop in walk.runs:
        if isinstance(walk.values[start], torch.Tensor):
            pairs += zip(walk.paths[start:stop], walk.values[start:stop], strict=True)
    of_keras = _below_keras(walk) if pairs else ()
    yield from (pair for pair in pairs if pair[1].is_leaf and not pair[0].startswith(of_keras))


def _below_keras(walk: Walk) -> tuple[str, ...]:
    """The prefixes of the paths of values in models and optimizers of Keras."""
    if (keras := sys.modules.get("keras")) is None:
        return ()
    kinds = keras.Layer, keras.optimizers.Optimizer
    found = (branch.path for branch in walk.branches if isinstance(branch.value, kinds))
    return tuple(f"{path}/" if path else "" for path in found)


def _unstepped(walk: Walk, tensors: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Those of `tensors` that no optimizer of the state steps, and the parameters of modules of which
    none steps any."""
    stepped = {id(value) for _, part in _optimizers(walk) for value in _parameters(part)}
    yield from ((path, value) for path, value in tensors.items() if id(value) not in stepped)
    for path, module in walk.torch_objects("nn.Module"):
        if not any(id(value) in stepped for value in module.parameters()):
            for name, value in module.named_parameters():
                yield join_dotted(path, name), value


def _parameters(optimizer: Any) -> Iterator[Any]:
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]


def _gradient(value: Any) -> Any:
    """The gradient of a parameter; None for a sparse one, which is given to no parameter again."""
    return None if value.grad is None or value.grad.is_sparse else value.grad


def _first_gradient(optimizer: Any) -> Any:
    return next((each.grad for each in _parameters(optimizer) if each.grad is not None), None)


def _ranges(numbers: Iterable[int]) -> list[str]:
    """Rising numbers as ranges: `["0-157", "160"]`."""
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    members = ([number for _, number in group] for _, group in runs)
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in members]
