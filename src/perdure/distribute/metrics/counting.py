"""The base class of metrics that count examples, with their weights and labels.

Without `weighted`, every field is an integer counter. Weights other than 0 and 1 are counted too, and
the metric then raises an error when it is read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from perdure.distribute.arrays import is_traced, namespace
from perdure.distribute.metrics.metric import COUNTER, SUM, Metric
from perdure.errors import StateError


class Counting(Metric):
    """Counts examples, or sums their weights.

    `sample_weight` is a mask of 0 and 1, such as the weights that mark padded rows. With
    weighted=True it may be any weight; counts are then float32 sums.
    """

    def __init__(self, name: str | None = None, *, weighted: bool = False) -> None:
        self.weighted = weighted
        super().__init__(name)

    @property
    def kind(self) -> str:
        return SUM if self.weighted else COUNTER

    def counts(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the counters, by name."""
        raise NotImplementedError

    def faults(self) -> dict[str, str]:
        """Advice for each kind of invalid input, by the name of its counter."""
        return {} if self.weighted else {"misweighted": _MISWEIGHTED}

    def fields(self) -> dict[str, tuple[tuple[int, ...], str]]:
        counts = {name: (shape, self.kind) for name, shape in self.counts().items()}
        return counts | dict.fromkeys(self.faults(), ((), COUNTER))

    def value(self, read: dict[str, Any]) -> Any:
        wrong = 0
        for name, advice in self.faults().items():
            if not is_traced(read[name]) and read[name]:
                raise StateError(f"{self}: {read[name]} {advice}")
            wrong = wrong + read.pop(name)
        result = self.of_counts(read)
        return namespace(result).where(wrong > 0, np.nan, result) if is_traced(wrong) else result

    def of_counts(self, counts: dict[str, Any]) -> Any:
        """The metric, from the values of `counts`."""
        raise NotImplementedError

    def weights(self, xp: Any, sample_weight: Any, rows: Any) -> tuple[Any, dict[str, Any]]:
        """(the weight of every element of an array such as `rows`, the counter of wrong ones)."""
        weight = spread(xp, sample_weight, rows.shape)
        if self.weighted:
            return weight, {}
        wrong = xp.sum(xp.array((weight != 0) & (weight != 1), COUNTER))
        return xp.array(weight != 0, COUNTER), {"misweighted": wrong}


_MISWEIGHTED = (
    "rows had a weight other than 0 and 1, and this metric counts; make it with weighted=True to sum "
    "weights"
)


def spread(xp: Any, sample_weight: Any, shape: Any) -> Any:
    """Weights of float32 in `shape`, from those of its first axes; 1 for None."""
    ones = xp.ones(shape, SUM)
    if sample_weight is None:
        return ones
    weight = xp.constant(sample_weight, SUM)
    if weight.ndim > ones.ndim or tuple(weight.shape) != tuple(shape[: weight.ndim]):
        raise StateError(
            f"sample_weight has the shape {list(weight.shape)}; expected the first axes of "
            f"{list(shape)}"
        )
    return ones * weight.reshape(tuple(weight.shape) + (1,) * (ones.ndim - weight.ndim))


def ratio(part: Any, whole: Any) -> Any:
    """part / whole, NaN for 0 / 0; a Python float outside of jit."""
    if is_traced(whole):
        return part / whole
    return float(part) / float(whole) if whole else float("nan")


def classes(xp: Any, labels: Any, scores: Any) -> Any:
    """Integer labels of shape [...] for scores of shape [..., classes]; [..., 1] is taken too."""
    labels = xp.constant(labels, COUNTER)
    if labels.ndim == scores.ndim and labels.shape[-1] == 1:
        labels = labels.reshape(tuple(labels.shape[:-1]))
    same_shape("labels", labels, scores[..., 0])
    return labels


def same_shape(name: str, value: Any, like: Any) -> None:
    """StateError unless the shapes agree: broadcasting would count pairs."""
    if tuple(value.shape) != tuple(like.shape):
        raise StateError(
            f"{name} have the shape {list(value.shape)}, expected {list(like.shape)} to fit the "
            "predictions"
        )
