"""What the callbacks of `fit` save of a Keras model, and the managers that they save with.

Further optimizers of a model (of a discriminator, say), and metrics that its own `metrics` property
leaves out, are not among the variables of the model. They are found by attribute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import keras

from perdure.checkpoint import CheckpointManager, ManagerOptions
from perdure.errors import ArgumentError, TrainError
from perdure.keras.fit_internals import COMPILED_ATTRIBUTES

ATTRIBUTES = "attributes"
_KINDS = (keras.optimizers.Optimizer, keras.metrics.Metric, keras.random.SeedGenerator)

# By directory. An exception ends a `fit` without calling its callbacks, and the next `fit` must not
# find the directory locked by the manager of the first.
_open: dict[str, CheckpointManager] = {}
# By directory: the `params` of the callback. All callbacks of one `fit` share one such dict.
_params: dict[str, Any] = {}


def members(model: Any) -> dict[str, Any]:
    named = {"model": model}
    return named if model.optimizer is None else named | {"optimizer": model.optimizer}


def metrics(model: Any) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for metric in model.metrics:
        number, name = 1, metric.name
        while name in named:
            number, name = number + 1, f"{metric.name}_{number + 1}"
        named[name] = metric
    return named


def attributes(model: Any) -> dict[str, Any]:
    """Optimizers, metrics and seed generators that are not in `model.variables`, by path."""
    members = dict(_uncounted(model))
    for path, member in members.items():
        if not getattr(member, "built", True):
            raise TrainError(
                f"model.{path}: expected an optimizer that is built, found one without variables. "
                f"Call `model.{path}.build(...)` before `fit`, with the variables that it trains."
            )
    return members


def optimizers(model: Any) -> dict[str, Any]:
    kind = keras.optimizers.Optimizer
    members = _uncounted(model)
    return {path: member for path, member in members if isinstance(member, kind) and member.built}


def _uncounted(model: Any) -> Iterator[tuple[str, Any]]:
    counted = {id(variable) for variable in model.variables}
    for owner in [*model.metrics, *([] if model.optimizer is None else [model.optimizer])]:
        counted |= {id(variable) for variable in owner.variables}
    main = {id(model.optimizer), id(getattr(model.optimizer, "inner_optimizer", None))}
    for path, member in _walk(model, "", {id(model)}):
        built, name = getattr(member, "built", True), path.rpartition(".")[2]
        if id(member) in main or (not built and name in COMPILED_ATTRIBUTES):
            continue
        is_seed = isinstance(member, keras.random.SeedGenerator)
        variables = [member.state] if is_seed else member.variables
        if not built or not counted.issuperset(map(id, variables)):
            yield path, member


def _walk(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    for name, child in _children(value):
        child_path = f"{path}.{name}" if path else name
        if isinstance(child, _KINDS):
            if id(child) not in seen:
                seen.add(id(child))
                yield child_path, child
        elif isinstance(child, (keras.Layer, dict, list, tuple)) and id(child) not in seen:
            seen.add(id(child))
            yield from _walk(child, child_path, seen)


def _children(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, keras.Layer):
        attributes = vars(value)
        # PyTorch keeps modules in a dict of their own. Public names come first, because Keras's private
        # lists hold the same objects.
        pairs = {**attributes, **attributes.get("_modules", {})}.items()
        return sorted(pairs, key=lambda pair: pair[0].startswith("_"))
    if isinstance(value, dict):
        return [(str(key), child) for key, child in value.items()]
    return [(str(number), child) for number, child in enumerate(value)]


def open_manager(
    directory: Any, params: Any, options: ManagerOptions | None = None, **arguments: Any
) -> CheckpointManager:
    """A manager. That of an earlier `fit` is closed; a second one in a `fit` is an ArgumentError."""
    # A backup holds the random generators itself, as they are at the batch at which `fit` resumes.
    options = replace(options or ManagerOptions(), save_random_state=False)
    # No strategy of perdure computes the state of a `fit`.
    manager = CheckpointManager(directory, options=options, **{"recipe": {}, **arguments})
    if manager.directory in _open:
        if params is not None and _params.get(manager.directory) is params:
            manager.close()
            raise ArgumentError(
                f"{manager.directory}: two callbacks of this `fit` save into this directory. Give each "
                f"BackupAndRestore and each ModelCheckpoint a directory of its own."
            )
        _open.pop(manager.directory).close()
    _open[manager.directory], _params[manager.directory] = manager, params
    return manager


def close_manager(manager: CheckpointManager) -> None:
    _open.pop(manager.directory, None)
    _params.pop(manager.directory, None)
    manager.close()


def finish_others(manager: CheckpointManager) -> None:
    """Wait for the saves of all other managers: a resume does not repeat what came before a backup."""
    for other in [open_ for open_ in _open.values() if open_ is not manager]:
        other.wait_until_finished()
