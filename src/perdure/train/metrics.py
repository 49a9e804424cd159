"""Turns what a step or an evaluation returns into numbers.

A metric is a scalar, or a (sum, weight) pair whose value is sum / weight. Reading one waits for the
step that computes it, so this is done only if something is shown or written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

PAIR = {"sum", "weight"}


def scalars(logs: Any) -> dict[str, float]:
    """Every metric in `logs` by name; names of nested mappings are joined with `/`.

    `logs` is a mapping, a scalar (named "loss"), or None. Arrays of more than one element are left out.
    """
    named = logs if isinstance(logs, Mapping) and logs.keys() != PAIR else {"loss": logs}
    numbers: dict[str, float] = {}
    for name, value in _walk(named, ""):
        total, weight = value if isinstance(value, tuple) else (value, None)
        number = _number(total)
        if number is not None:
            numbers[name] = number if weight is None else _mean(number, _number(weight) or 0.0)
    return numbers


class Means:
    """Means over the batches of an evaluation: sums and weights added up in the order of batches."""

    def __init__(self) -> None:
        self._totals: dict[str, tuple[float, float]] = {}

    def add(self, sums: Mapping[str, Any]) -> None:
        """Add the metrics of one batch; a scalar that is no pair has weight 1."""
        for name, value in _walk(sums, ""):
            total, weight = value if isinstance(value, tuple) else (value, 1.0)
            number = _number(total)
            if number is not None:
                before = self._totals.get(name, (0.0, 0.0))
                self._totals[name] = (before[0] + number, before[1] + (_number(weight) or 0.0))

    def result(self) -> dict[str, float]:
        """The mean of each metric, NaN if the weights add up to 0."""
        return {name: _mean(*pair) for name, pair in self._totals.items()}


def is_finite(value: float | None) -> bool:
    """Whether a metric is a number that can be compared: not None, NaN or infinite."""
    return value is not None and abs(value) < float("inf")


def _walk(value: Mapping[Any, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, child in value.items():
        name = f"{path}/{key}" if path else str(key)
        if isinstance(child, Mapping):
            if child.keys() == PAIR:
                yield name, (child["sum"], child["weight"])
            else:
                yield from _walk(child, name)
        elif isinstance(child, (tuple, list)):
            if len(child) == 2:
                yield name, tuple(child)
        elif child is not None:
            yield name, child


def _number(value: Any) -> float | None:
    """One number, or None for anything else."""
    if isinstance(value, (bool, int, float)):
        return float(value)
    shape = getattr(value, "shape", None)
    if shape is None or any(size != 1 for size in shape):
        return None
    return float(value.item() if hasattr(value, "item") else value)


def _mean(total: float, weight: float) -> float:
    return total / weight if weight else float("nan")
