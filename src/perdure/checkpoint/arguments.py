"""Checks the arguments of a manager at the call, and turns them into plain Python values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, SupportsFloat

from perdure.errors import ArgumentError
from perdure.store.format import MAX_STEP

Metrics = Mapping[str, SupportsFloat] | None
"""The metrics of a step as a program gives them."""


def step_number(step: Any) -> int:
    """`step`, which may be an integer of NumPy, a 0-d array, or a variable of TensorFlow or Keras with
    one, as an int from 0 to `MAX_STEP`."""
    try:
        if hasattr(step, "assign") and hasattr(step, "numpy"):
            step = step.numpy()
        if "bool" in type(step).__name__ or "bool" in str(getattr(step, "dtype", "")):
            raise TypeError
        if getattr(step, "ndim", 0) != 0:
            raise TypeError
        number = operator.index(step)
    except TypeError:
        raise ArgumentError(
            f"step: expected an integer from 0 to {MAX_STEP}, found {shown(step)} of type "
            f"{type(step).__name__}. The step comes first: `save(step, state)`, `restore(step, like)`."
        ) from None
    if not 0 <= number <= MAX_STEP:
        raise ArgumentError(
            f"step: expected an integer from 0 to {MAX_STEP}, found {shown(number)}."
        )
    return number


def integer(name: str, value: Any, least: int = 1, *, optional: bool = False) -> Any:
    """`value` as an int of at least `least`, or None if it is optional; `name` is the argument."""
    if value is None and optional:
        return value
    try:
        number = least - 1 if isinstance(value, bool | None) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        none = "None or " if optional else ""
        raise ArgumentError(
            f"{name}: expected {none}an integer of at least {least}, found {shown(value)}."
        )
    return number


def require_number(
    name: str, value: Any, fits: Callable[[Any], bool], expected: str = "more than 0"
) -> None:
    """Raise unless `value` is None or a real number that `fits`; `expected` says which those are."""
    number = real_number(value)
    if value is not None and (number is None or not fits(number)):
        raise ArgumentError(f"{name}: expected {expected}, found {shown(value)}.")


def require_choice(name: str, value: Any, choices: Sequence[str | None]) -> None:
    """Raise unless `value` is one of the choices."""
    if value not in choices:
        raise ArgumentError(
            f"{name}: expected one of {', '.join(map(repr, choices))}, found {shown(value)}."
        )


def require_kind(name: str, value: Any, kind: type, *, optional: bool = False) -> None:
    """Raise unless `value` is an instance of the class, or None where it is `optional`."""
    if not isinstance(value, kind) and not (optional and value is None):
        raise ArgumentError(f"{name}: expected a {kind.__name__}, found {shown(value)}.")


def require_state(state: Any) -> None:
    """Raise `ArgumentError` for a save without a state."""
    if state is None:
        raise ArgumentError(
            "state: expected a tree of values, found None. Give it as `save(step, state)`, or make the "
            "manager for a Checkpoint, `CheckpointManager(directory, checkpoint=checkpoint)`."
        )


def call_init(init: Callable[[], Any], checkpoint: Any) -> Any:
    """The state that `init` makes, or the `checkpoint` of the manager for a function that returns none
    because it works by side effect."""
    state = init()
    if state is None and checkpoint is None:
        raise ArgumentError(
            f"init: expected a function that returns the state, found {shown(init)}, which returned "
            f"None. Return the state, or make the manager for a Checkpoint, "
            f"`CheckpointManager(directory, checkpoint=checkpoint)`."
        )
    return checkpoint if state is None else state


def real_number(value: Any) -> Any:
    """`value`, or the item of a 0-d array, if that is a real number; None for a bool and all else."""
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        value = value.item()
    return value if isinstance(value, Real) and not isinstance(value, bool) else None


def metric_numbers(metrics: Any) -> dict[str, float]:
    """`metrics` as floats; None is no metric, and NaN and the infinities are allowed."""
    metrics = {} if metrics is None else metrics
    if not isinstance(metrics, Mapping):
        raise ArgumentError(
            f"metrics: expected a mapping from names to numbers, found {shown(metrics)}."
        )
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        require_name("metrics", name)
        try:
            if isinstance(value, (str, bytes, bytearray)):
                raise TypeError
            numbers[name] = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: of PyTorch
            raise ArgumentError(
                f"metrics: expected a number for {name!r}, found {shown(value)} of type "
                f"{type(value).__name__}."
            ) from None
    return numbers


def require_name(argument: str, name: Any) -> None:
    """Raise `ArgumentError` unless `name`, a key of `argument`, is a string that UTF-8 can hold."""
    if not isinstance(name, str):
        raise ArgumentError(f"{argument}: expected strings as names, found {shown(name)}.")
    if not is_unicode(name):
        raise ArgumentError(
            f"{argument}: expected names in Unicode, found {shown(name)}, which UTF-8 cannot hold."
        )


def shown(value: Any) -> str:
    """The `repr` of a value for an error, cut to one line of at most 80 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can hold a string."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
