"""What decides the next step of PyTorch and is in no `state_dict`, as leaves beside the state.

`requires_grad` of the parameters of modules, the modes (`training`) of their submodules, what pruning
will rank, and the gradients that decide what an optimizer does next. A loop that unfreezes a layer in
its second epoch would train with a frozen one after a resume.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

import msgspec

from perdure.errors import CorruptionError
from perdure.state.leaf_values import plain_value, scalar_leaf
from perdure.state.live_objects import live_objects
from perdure.state.paths import join_dotted
from perdure.state.torch_gradients import (
    accumulated,
    accumulated_leaves,
    give_accumulated,
    give_gradients,
    keeps_gradients,
    kept_gradients,
    watch_gradients,
)
from perdure.state.torch_pruned import PREFIX, pruned_leaves, set_pruned
from perdure.store.leaf import Leaf

_FROZEN, _MODES, _GRADIENTS = "torch/frozen", "torch/modes", "torch/gradients"
_FEW = 5
_decoder = msgspec.json.Decoder(dict[str, list[str]])


def leaves_beside(state: Any, process: int = 0) -> dict[str, Leaf]:
    """The leaves beside `state`; none without a module or an optimizer of PyTorch.

    Every process of a group has gradients of its own; the rest is that of process 0.
    """
    leaves: dict[str, Leaf] = {}
    for path, optimizer in _live(state, "optim", "Optimizer"):
        leaves |= accumulated_leaves(path, optimizer, process)
    return leaves if process else leaves | _leaves_of_all(state)


def _leaves_of_all(state: Any) -> dict[str, Leaf]:
    frozen: dict[str, list[str]] = {}
    modes: dict[str, list[str]] = {}
    pruned: dict[str, Leaf] = {}
    for path, module in _live(state, "nn", "Module"):
        parts = _parts(module)
        pruned |= pruned_leaves(path, parts)
        frozen[path] = sorted(
            {name for name, value in _parameters(parts) if not value.requires_grad}
        )
        top, *others = _modes(parts).items()
        modes[path] = ["" for name, mode in [top] if not mode]
        modes[path] += sorted(name for name, mode in others if mode != top[1])
    gradients = {
        path: kept_gradients(optimizer)
        for path, optimizer in _live(state, "optim", "Optimizer")
        if keeps_gradients(optimizer)
    }
    named = {_FROZEN: frozen, _MODES: modes, _GRADIENTS: gradients}
    return pruned | {
        path: scalar_leaf(msgspec.json.encode(value, order="sorted").decode())
        for path, value in named.items()
        if value
    }


def restore_beside(
    state: Any,
    process_leaves: Mapping[str, Leaf],
    renamed: Callable[[str], str],
    where: str,
    process: int = 0,
) -> list[str]:
    """Set what the leaves of `leaves_beside` say, as far as the checkpoint has them.

    Args:
        state: a state that was restored exactly.
        process_leaves: those of the checkpoint.
        renamed: gives the path in `state` for a path in the checkpoint.
        where: names the checkpoint in messages.
        process: the number of this one in its group.

    Returns:
        A warning for each attribute that was set, which names where.
    """
    stored: dict[str, dict[str, list[str]]] = {}
    for name in (_FROZEN, _MODES, _GRADIENTS):
        try:
            leaf = process_leaves.get(name)
            values = {} if leaf is None else _decoder.decode(plain_value(leaf))
        except ValueError as error:  # of msgspec
            raise CorruptionError(f"{where}: {name} cannot be read: {error}.") from error
        stored[name] = {renamed(path): names for path, names in values.items()}
    pruned = {
        renamed(path.removeprefix(PREFIX)): leaf
        for path, leaf in process_leaves.items()
        if path.startswith(PREFIX)
    }
    frozen: dict[str, bool] = {}
    modes: dict[str, bool] = {}
    for path, module in _live(state, "nn", "Module"):
        parts = _parts(module)
        set_pruned(path, parts, pruned)
        if (names := stored[_FROZEN].get(path)) is not None:
            frozen |= _set_frozen(path, parts, set(names))
        if (names := stored[_MODES].get(path)) is not None:
            modes |= _set_modes(path, parts, set(names))
    gradients = accumulated(process_leaves, process)
    gradients = {renamed(path): leaves for path, leaves in gradients.items()}
    for path, optimizer in _live(state, "optim", "Optimizer"):
        if path in gradients:
            give_accumulated(optimizer, gradients[path])
        if path in stored[_GRADIENTS]:
            give_gradients(optimizer, stored[_GRADIENTS][path])
    begin_to_watch(state)
    return [
        *_warning(f"{where}: the program has frozen other parameters", "requires_grad", frozen),
        *_warning(f"{where}: the program has submodules in other modes", "training", modes),
    ]


def begin_to_watch(state: Any) -> None:
    """See from here on which gradients the steps of the optimizers in `state` have used."""
    with suppress(RecursionError):  # the state contains itself, which a save refuses
        watch_gradients(optimizer for _, optimizer in _live(state, "optim", "Optimizer"))


def look_at_gradients(state: Any) -> None:
    """Take the first of the two looks that it takes to see whether the program keeps gradients."""
    begin_to_watch(state)
    with suppress(RecursionError):
        for _, optimizer in _live(state, "optim", "Optimizer"):
            keeps_gradients(optimizer)


def _set_frozen(path: str, parts: list[tuple[str, Any]], names: set[str]) -> dict[str, bool]:
    changed: dict[str, bool] = {}
    for name, value in _parameters(parts):
        is_trained = name not in names
        if value.requires_grad != is_trained and value.is_leaf:
            value.requires_grad_(is_trained)
            changed[join_dotted(path, name)] = is_trained
    return changed


def _set_modes(path: str, parts: list[tuple[str, Any]], names: set[str]) -> dict[str, bool]:
    """Set the modes of submodules, if the module itself has the mode that it was saved in.

    Otherwise one of the two is in an evaluation, which the program begins and ends itself.
    """
    is_training = "" not in names
    if _modes(parts)[""] != is_training:
        return {}
    changed: dict[str, bool] = {}
    for name, part in parts:
        mode = is_training != (name in names)
        if name and part.training != mode:
            part.training = mode  # `train` would set what is below it, too
            changed[join_dotted(path, name)] = mode
    return changed


def _warning(what: str, attribute: str, changed: Mapping[str, bool]) -> list[str]:
    names = [f"{path} to {value}" for path, value in changed.items()]
    more = f" and {len(names) - _FEW:,} more" if len(names) > _FEW else ""
    warning = (
        f"{what} than the checkpoint. `{attribute}` is set as it was saved: "
        f"{', '.join(names[:_FEW])}{more}. To train from here with others, set it after the restore."
    )
    return [warning] if names else []


def _live(state: Any, package: str, name: str) -> Iterator[tuple[str, Any]]:
    """The path of each object of a class of PyTorch, and the object."""
    if (torch := sys.modules.get("torch")) is not None:
        kind = getattr(getattr(torch, package), name)
        for path, value in live_objects(state):
            if isinstance(value, kind):
                yield path, value


def _parts(module: Any) -> list[tuple[str, Any]]:
    """A module and those in it by name, without the parts of wrappers in the names."""
    return import_module("perdure.state.torch_module").parts_by_name(module)


def _modes(parts: list[tuple[str, Any]]) -> dict[str, bool]:
    """The mode of each module by its name, the outermost first; of a wrapper, that of what it wraps."""
    return {name: part.training for name, part in parts}


def _parameters(parts: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for prefix, part in parts:
        for name, value in part._parameters.items():
            if value is not None:
                yield f"{prefix}.{name}" if prefix else name, value
