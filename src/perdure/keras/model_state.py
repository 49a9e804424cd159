"""What of a Keras model a checkpoint of `fit` holds: the model, its optimizer, and what else it owns.

Keras counts neither further optimizers of a model (of the discriminator, say) nor metrics that a
`metrics` of the user's leaves out among the model's variables. They are found by attribute.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from perdure.errors import TrainError

ATTRIBUTES = "attributes"
# Of a nested model that was compiled itself: `fit` of the outer one does not need to use them.
_COMPILED = ("_optimizer", "_loss_tracker", "_compile_metrics")
_KINDS = (keras.optimizers.Optimizer, keras.metrics.Metric, keras.random.SeedGenerator)


def members(model: Any) -> dict[str, Any]:
    """The model and its optimizer, as members of a checkpoint."""
    named = {"model": model}
    return named if model.optimizer is None else named | {"optimizer": model.optimizer}


def metrics(model: Any) -> dict[str, Any]:
    """The metrics by name; those of one name are numbered."""
    named: dict[str, Any] = {}
    for each in model.metrics:
        number, name = 1, each.name
        while name in named:
            number, name = number + 1, f"{each.name}_{number + 1}"
        named[name] = each
    return named


def attributes(model: Any) -> dict[str, Any]:
    """Optimizers, metrics and seed generators that Keras does not count, by the path of the attribute.

    `{"d_optimizer": ..., "discriminator.noise": ...}`. Raises `TrainError` for an optimizer that is
    not built, whose variables cannot be brought back before its first step.
    """
    found = dict(_uncounted(model))
    for path, each in found.items():
        if not getattr(each, "built", True):
            raise TrainError(
                f"model.{path}: expected an optimizer that is built, found one without variables, so "
                f"that a resume could not bring it back. Call `model.{path}.build(...)` before `fit`, "
                f"with the variables that it trains."
            )
    return found


def optimizers(model: Any) -> dict[str, Any]:
    """Of `attributes`, the optimizers that have begun."""
    kind = keras.optimizers.Optimizer
    found = _uncounted(model)
    return {path: each for path, each in found if isinstance(each, kind) and each.built}


def _uncounted(model: Any) -> Iterator[tuple[str, Any]]:
    counted = {id(each) for each in model.variables}
    for owner in [*model.metrics, *([] if model.optimizer is None else [model.optimizer])]:
        counted |= {id(each) for each in owner.variables}
    within = {id(model.optimizer), id(getattr(model.optimizer, "inner_optimizer", None))}
    for path, each in _walk(model, "", {id(model)}):
        built, name = getattr(each, "built", True), path.rpartition(".")[2]
        if id(each) in within or (not built and name in _COMPILED):
            continue
        seed = isinstance(each, keras.random.SeedGenerator)
        variables = [each.state] if seed else each.variables
        if not built or not counted.issuperset(map(id, variables)):
            yield path, each


def _walk(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    for name, each in _parts(value):
        at = f"{path}.{name}" if path else name
        if isinstance(each, _KINDS):
            if id(each) not in seen:
                seen.add(id(each))
                yield at, each
        elif isinstance(each, (keras.Layer, dict, list, tuple)) and id(each) not in seen:
            seen.add(id(each))
            yield from _walk(each, at, seen)


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, keras.Layer):
        own = vars(value)
        # PyTorch keeps attributes that are modules apart. Public ones first: they name what is in
        # Keras's own lists too.
        pairs = {**own, **own.get("_modules", {})}.items()
        return sorted(pairs, key=lambda pair: pair[0].startswith("_"))
    if isinstance(value, dict):
        return [(str(key), each) for key, each in value.items()]
    return [(str(number), each) for number, each in enumerate(value)]
