"""Finds a checkpoint of another optimizer or scheduler than the target, before PyTorch accepts it.

`load_state_dict` of PyTorch compares the sizes of the groups, and no more. Classes are told apart by
the names of their settings, because a checkpoint names no class.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from perdure.state.leaf_spec import Check, Difference
from perdure.state.leaf_values import plain_value
from perdure.state.torch_tensors import LAZY
from perdure.store.format import unescape
from perdure.store.leaf import Leaf

_SINCE = frozenset(
    ["foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"]
)
"""Settings that a release of PyTorch has added to classes."""
_WRAPPERS = ("module.", "_orig_mod.")
_OTHER_SHAPES = (torch.optim.Adafactor, torch.optim.LBFGS)
Shape = tuple[int, ...]


class _Group(NamedTuple):
    settings: Mapping[str, Any]
    size: int
    names: list[str]


class _OptimizerFacts(NamedTuple):
    """What is compared of an optimizer; no tensors."""

    kind: str
    groups: list[_Group]
    required: frozenset[str]
    shapes: list[Shape | None]
    has_their_shapes: bool


def optimizer_check(optimizer: torch.optim.Optimizer) -> Check:
    """Compares groups, settings, and the shapes of the state with those of the parameters."""
    kind = type(optimizer)
    groups = [
        _Group(
            {key: _setting(value) for key, value in group.items() if key != "params"},
            len(group["params"]),
            list(group.get("param_names", ())),
        )
        for group in optimizer.param_groups
    ]
    is_from_torch = kind.__module__.startswith("torch.optim")
    adds_settings = kind.__setstate__ is not torch.optim.Optimizer.__setstate__
    required = (
        frozenset()
        if adds_settings and not is_from_torch
        else frozenset(getattr(optimizer, "defaults", ()))
    )
    shapes = [
        None if isinstance(parameter, LAZY) else tuple(parameter.shape)
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    has_their_shapes = is_from_torch and kind not in _OTHER_SHAPES
    facts = _OptimizerFacts(kind.__name__, groups, required, shapes, has_their_shapes)
    return partial(_optimizer_differences, facts)


def scheduler_check(scheduler: Any) -> Check:
    """Compares the settings of a scheduler."""
    kind, present = type(scheduler), scheduler.state_dict()
    required = {
        name
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.default is parameter.empty and name in present
        if not isinstance(present[name], (list, tuple, dict)) or present[name]
    }
    return partial(_scheduler_differences, kind.__name__, frozenset(present), frozenset(required))


def _scheduler_differences(
    kind: str, present: frozenset[str], required: frozenset[str], stored: Mapping[str, Leaf]
) -> list[Difference]:
    names = {unescape(path.partition("/")[0]) for path in stored}
    known = _settings_of(torch.optim.lr_scheduler.LRScheduler)
    known -= {"last_epoch", "verbose"}
    missing = required - names
    if names.isdisjoint(settings := present & known):  # one that is missing may be of a newer torch
        missing |= settings
    extra = (names & known) - present
    return _other_class("scheduler", "", extra, missing, kind) if names else []


def _optimizer_differences(
    optimizer: _OptimizerFacts, stored: Mapping[str, Leaf]
) -> list[Difference]:
    groups = _stored_groups(stored)
    sizes, present = [group.size for group in groups], [group.size for group in optimizer.groups]
    if sizes != present:
        reason = (
            f"expected groups of {present} parameters, the checkpoint has groups of {sizes}. If the "
            f"loop calls `add_param_group` while it trains, add the group before the restore"
        )
        return [Difference("param_groups", reason=reason)]
    known = _settings_of(torch.optim.Optimizer) - _SINCE
    for old, new in zip(groups, optimizer.groups, strict=True):
        extra = (old.settings.keys() & known) - new.settings.keys()
        missing = (optimizer.required & known) - old.settings.keys()
        if lines := _other_class("optimizer", "param_groups", extra, missing, optimizer.kind):
            return lines
        name = "decoupled_weight_decay"  # tells AdamW from Adam
        before, now = (group.settings.get(name) for group in (old, new))
        if None not in (before, now) and before != now:
            reason = (
                f"the checkpoint's optimizer has {name}={before}, expected {now} of "
                f"{optimizer.kind}; Adam and AdamW differ in this"
            )
            return [Difference("param_groups", reason=reason)]
    return _order_differences(optimizer.groups, groups) or _shape_differences(optimizer, stored)


def _other_class(
    what: str, path: str, extra: Iterable[str], missing: Iterable[str], kind: str
) -> list[Difference]:
    if not extra and not missing:
        return []
    found = ", ".join(sorted(extra)) or f"no {', '.join(sorted(missing))}"
    expected = ", ".join(sorted(missing)) or "only settings"
    reason = f"the checkpoint's {what} has {found}; expected {expected} of {kind}"
    return [Difference(path, reason=reason)]


def _stored_groups(stored: Mapping[str, Leaf]) -> list[_Group]:
    settings: dict[int, dict[str, Any]] = defaultdict(dict)
    sizes: dict[int, int] = defaultdict(int)
    names: dict[int, list[str]] = defaultdict(list)
    for path, leaf in stored.items():
        parts = path.split("/")
        if parts[0] != "param_groups" or len(parts) < 3 or not parts[1].isdigit():
            continue
        number, name = int(parts[1]), unescape(parts[2])
        if name == "params":
            sizes[number] += 1
        elif name == "param_names":
            names[number].append(str(plain_value(leaf)))
        settings[number][name] = plain_value(leaf) if leaf.is_scalar else None
    return [_Group(settings[n], sizes[n], names[n]) for n in sorted(settings)]


def _order_differences(present: list[_Group], stored: list[_Group]) -> list[Difference]:
    """The same names in another order: every parameter would get the state of another one."""
    before, now = (
        [name for group in groups for name in group.names] for groups in (stored, present)
    )
    if sorted(before) != sorted(now):  # one of them was taken from a wrapped module
        before, now = (list(map(_plain_name, names)) for names in (before, now))
    if before == now or sorted(before) != sorted(now):
        return []
    number = next(n for n, (old, new) in enumerate(zip(before, now, strict=True)) if old != new)
    reason = f"expected {now[number]} as parameter {number}, the checkpoint has {before[number]}"
    return [Difference("param_groups", reason=reason)]


def _shape_differences(optimizer: _OptimizerFacts, stored: Mapping[str, Leaf]) -> list[Difference]:
    """State of the shape of another parameter.

    In an optimizer of the user's, state may have any shape, unless its shapes are those of all
    parameters in another order.
    """
    found: dict[str, dict[int, Shape]] = defaultdict(dict)
    for path, leaf in stored.items():
        parts = path.split("/")
        if parts[0] == "state" and len(parts) == 3 and parts[1].isdigit() and leaf.shape:
            number = int(parts[1])
            if number < len(optimizer.shapes) and optimizer.shapes[number] is not None:
                found[parts[2]][number] = leaf.shape
    lines = []
    for key, shapes in found.items():
        expected = {number: optimizer.shapes[number] or () for number in shapes}
        if not optimizer.has_their_shapes and sorted(shapes.values()) != sorted(expected.values()):
            continue
        lines += [
            Difference(
                f"state/{number}/{key}",
                reason=f"expected the shape {list(expected[number])} of parameter {number}, the "
                f"checkpoint has {list(shape)}; give the optimizer its parameters in the order in "
                f"which they were saved",
            )
            for number, shape in shapes.items()
            if shape != expected[number]
        ]
    return lines


def _plain_name(name: str) -> str:
    """The name of a parameter without the parts of wrappers."""
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name


def _setting(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str)) else None


@cache
def _settings_of(base: type) -> frozenset[str]:
    """The names of the arguments of all classes of PyTorch that are derived from `base`."""
    is_optimizer = base is torch.optim.Optimizer
    values = vars(torch.optim if is_optimizer else torch.optim.lr_scheduler).values()
    kinds = [kind for kind in values if inspect.isclass(kind) and issubclass(kind, base)]
    names = {name for kind in kinds for name in inspect.signature(kind).parameters}
    return frozenset(names - {"params", "optimizer", "defaults"})
