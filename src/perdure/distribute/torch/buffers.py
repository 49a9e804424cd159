"""Buffers that a logical replica's forward pass changes in place, as contributions.

Each replica starts from the same buffers, and its changes are summed in the tree like gradients:
statistics such as BatchNorm's are those of V replicas.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from perdure.distribute.engine import describe_leaf
from perdure.distribute.torch.state_view import StateView, named_tensors, same, tensors
from perdure.errors import StateError

_PLAIN = frozenset((Tensor, nn.Parameter))
_COUNT, _GRAD = operator.attrgetter("_version"), operator.attrgetter("grad")
# What `grad` must not change in place, and why.
_PARAMETER = (
    "parameter. Only update may change parameters, because grad runs once for each logical replica: "
    "move the change there (an Embedding without max_norm, and weight.renorm_(2, 0, max_norm) there)"
)
_TENSOR = (
    "tensor of the state in place. Only update may change the state, because grad runs once for each "
    "logical replica: return what each replica contributes, whose sum update gets"
)
_BATCH = (
    "tensor of its batch in place, which may be the memory of the dataset, and a replica may be "
    "computed more than once. Compute a new tensor: x = x / 255 for x.div_(255)"
)
_FORM = (
    "Every replica starts from the same buffer, and their mean is written into it: give the buffer its "
    "final dtype and shape when the module is made"
)
_FILLED = (
    "grad filled this buffer, which the other replicas would start from or not, depending on the "
    "topology. Make it together with the module, or call the module once on an example before the "
    "first step"
)
# An entry beside the names of buffers, which never have a slash.
CHANGED = "/changed"


def _versions(tensors: Collection[Tensor]) -> tuple[list[int], list[int]]:
    """Two values of each that change with every change in place, and with `tensor.data = ...`."""
    if _PLAIN.issuperset(map(type, tensors)):
        try:
            return [*map(_COUNT, tensors)], [*map(Tensor.data_ptr, tensors)]
        except RuntimeError:
            pass  # one of inference mode, which counts no changes, or a sparse one, without a place
    return (
        [0 if tensor.is_inference() else tensor._version for tensor in tensors],
        [
            tensor.data_ptr() if type(tensor) in _PLAIN and tensor.layout is torch.strided else 0
            for tensor in tensors
        ],
    )


def isolated(view: StateView, share: Any, grad: Callable[[], Any]) -> tuple[Any, dict[str, Tensor]]:
    """(result of `grad`, its buffers by name); the state is put back.

    Raises StateError if `grad` has changed a parameter, another tensor of the state or one of
    `share`.
    """
    values = [buffer.clone() for *_, buffer in view.buffers]
    watched = [*view.watched, *tensors(share)]
    versions = _versions(watched)
    # With backward() in `grad`, each replica finds its own gradients in `.grad` and no others.
    parameters = view.trained
    grads = [*map(_GRAD, parameters)]
    if not all(map(operator.is_, grads, itertools.repeat(None))):
        for parameter in parameters:
            parameter.grad = None
    buffers: dict[str, Tensor] = {}
    problems: list[str] = []
    try:
        result = grad()
    finally:
        if values:
            buffers, problems = _take_buffers(view, values)
        if not same([*map(_GRAD, parameters)], grads):
            for parameter, old in zip(parameters, grads, strict=True):
                parameter.grad = old
    if _versions(watched) != versions:
        now = zip(watched, *versions, *_versions(watched), strict=True)
        changed = next(tensor for tensor, *numbers in now if numbers[:2] != numbers[2:])
        raise StateError(_change(view, share, changed))
    # A cache is filled by the first forward pass; one of bool (a mask) is no contribution.
    filled = [] if view.is_used else view.filled_buffers()
    problems += [f"{name}: {_FILLED}" for name, b in filled if b.dtype != torch.bool]
    if problems:
        raise StateError(problems[0])
    view.is_used = True
    return result, buffers


def _change(view: StateView, share: Any, changed: Tensor) -> str:
    """What it means that `grad` has changed a tensor in place, with the path of the tensor."""
    for named, what in (
        (view.parameters.items(), _PARAMETER),
        (named_tensors(view.state), _TENSOR),
        (view.fixed.items(), _TENSOR),
        (named_tensors(share), _BATCH),
    ):
        for path, tensor in named:
            if tensor is changed:
                return f"{path or 'the batch'}: grad changed this {what}"
    raise AssertionError("a tensor that is nowhere")


def _take_buffers(view: StateView, before: list[Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """(buffers by name, what is wrong with them); the buffers are put back.

    An entry counts for each buffer whether it changed, because V equal values divided by V may give
    another value. Values are compared: BatchNorm's kernel does not raise versions.
    """
    after: dict[str, Tensor] = {}
    changed: list[bool] = []
    problems: list[str] = []
    with torch.no_grad():
        for (name, part, key, buffer), value in zip(view.buffers, before, strict=True):
            now = part._buffers.get(key)
            if now is None or now.shape != value.shape or now.dtype != value.dtype:
                if now is buffer:  # changed through `.data`
                    now, buffer.data = buffer.detach(), value.clone()
                now, problem = _in_form(now, value)
                if problem:
                    problems.append(f"{name}: {problem}")
            differs = not torch.equal(now, value)
            if value.dtype != torch.bool:
                changed.append(differs)
                after[name] = now.clone() if differs else value
            elif differs:
                problems.append(
                    f"{name}: grad changed this buffer of bool, which has no mean: change it in "
                    "update, or make it a buffer of integers or floats"
                )
            if differs or part._buffers.get(key) is not buffer:
                part._buffers[key] = buffer
                buffer.copy_(value)
    if after:
        after[CHANGED] = torch.tensor(changed, dtype=torch.int64)
    return after, problems


def _in_form(now: Tensor | None, value: Tensor) -> tuple[Tensor, str]:
    """(what a replica made of a buffer, in its dtype or one that it holds; what is wrong)."""
    if (
        now is not None
        and now.shape == value.shape
        and torch.promote_types(now.dtype, value.dtype) == value.dtype
    ):
        return now.to(value.dtype), ""
    found = "None" if now is None else describe_leaf(now)
    return value, f"expected {describe_leaf(value)}, found {found} after grad. {_FORM}"


@contextlib.contextmanager
def written(view: StateView, totals: dict[str, Tensor], replicas: int) -> Iterator[None]:
    """The changed buffers get the mean, integers by integer division; undone on an error."""
    names = [name for name in totals if name != CHANGED]
    changed = {n for n, count in zip(names, totals[CHANGED].tolist(), strict=True) if count}
    buffers = [(name, buffer) for name, *_, buffer in view.buffers if name in changed]
    before = [buffer.clone() for _, buffer in buffers]
    try:
        with torch.no_grad():
            for name, buffer in buffers:
                total = totals[name]
                whole = not (total.is_floating_point() or total.is_complex())
                buffer.copy_(total // replicas if whole else total / replicas)
        yield
    except BaseException:
        with torch.no_grad():
            for (_, buffer), value in zip(buffers, before, strict=True):
                buffer.copy_(value)
        raise
