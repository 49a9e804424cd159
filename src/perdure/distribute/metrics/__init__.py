"""Metrics under the names that Keras gives them.

Counts of examples are integers and never pass through a mean or a float; an average is divided when it
is read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from perdure.distribute.arrays import is_traced, namespace
from perdure.distribute.metrics.metric import (
    COUNTER,
    SUM,
    Counting,
    Metric,
    classes,
    ratio,
    same_shape,
    spread,
)
from perdure.errors import StateError

__all__ = [
    "AUC",
    "BinaryAccuracy",
    "CategoricalAccuracy",
    "ConfusionMatrix",
    "Mean",
    "Metric",
    "SparseCategoricalAccuracy",
    "SparseTopKCategoricalAccuracy",
    "Sum",
    "TopKCategoricalAccuracy",
]


class Mean(Metric):
    """Weighted mean of values: sum(values * weights) / sum(weights)."""

    def fields(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return {"total": ((), SUM), "weight": ((), SUM)}

    def contribution(self, values: Any, sample_weight: Any = None) -> dict[str, Any]:
        """`values` of any shape; `sample_weight` of the same, or of its first axes."""
        xp = namespace(values, sample_weight)
        values = xp.constant(values, SUM)
        weight = spread(xp, sample_weight, values.shape)
        return {"total": xp.sum(values * weight), "weight": xp.sum(weight)}

    def value(self, read: dict[str, Any]) -> Any:
        return ratio(read["total"], read["weight"])


class Sum(Metric):
    """Sum of values; with integer=True, exactly, of integers whose sum in a step is below 2**30."""

    def __init__(self, name: str | None = None, *, integer: bool = False) -> None:
        self.integer = integer
        super().__init__(name)

    def fields(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return {"total": ((), COUNTER if self.integer else SUM)}

    def contribution(self, values: Any) -> dict[str, Any]:
        """`values` of any shape."""
        xp = namespace(values)
        kind = str(xp.array(values).dtype)
        if self.integer and "int" not in kind and "bool" not in kind:
            raise StateError(f"{self} sums integers, found {kind}")
        return {"total": xp.sum(xp.constant(values, COUNTER if self.integer else SUM))}

    def value(self, read: dict[str, Any]) -> Any:
        return read["total"]


class _Accuracy(Counting):
    """The fraction of examples that are predicted correctly."""

    @property
    def correct(self) -> str:
        """The name of the counter, with its criterion: other counts cannot be loaded."""
        return "correct"

    def counts(self) -> dict[str, tuple[int, ...]]:
        return {self.correct: (), "total": ()}

    def contribution(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        """Labels, predictions and weights of a share; see the class for their shapes."""
        xp = namespace(y_true, y_pred, sample_weight)
        right = self.matches(xp, y_true, xp.constant(y_pred, SUM))
        weight, faults = self.weights(xp, sample_weight, right)
        correct = xp.sum(xp.array(right, self.kind) * weight)
        return {self.correct: correct, "total": xp.sum(weight), **faults}

    def matches(self, xp: Any, y_true: Any, y_pred: Any) -> Any:
        """True for every example that is predicted correctly."""
        raise NotImplementedError

    def of_counts(self, counts: dict[str, Any]) -> Any:
        return ratio(counts[self.correct], counts["total"])


class BinaryAccuracy(_Accuracy):
    """y_true of 0 and 1, y_pred above `threshold` meaning 1, in one shape [...]."""

    def __init__(
        self, name: str | None = None, *, threshold: float = 0.5, weighted: bool = False
    ) -> None:
        self.threshold = threshold
        super().__init__(name, weighted=weighted)

    @property
    def correct(self) -> str:
        return f"correct_at_{self.threshold:g}"

    def matches(self, xp: Any, y_true: Any, y_pred: Any) -> Any:
        labels = xp.constant(y_true, SUM)
        same_shape("labels", labels, y_pred)
        return labels == xp.array(y_pred > self.threshold, SUM)


class CategoricalAccuracy(_Accuracy):
    """y_true one-hot and y_pred scores, of shape [..., classes]. The first of equal scores counts."""

    def matches(self, xp: Any, y_true: Any, y_pred: Any) -> Any:
        labels = xp.constant(y_true, SUM)
        same_shape("labels", labels, y_pred)
        return xp.argmax(labels) == xp.argmax(y_pred)


class SparseCategoricalAccuracy(_Accuracy):
    """y_true integers [...] and y_pred scores [..., classes]. The first of equal scores counts."""

    def matches(self, xp: Any, y_true: Any, y_pred: Any) -> Any:
        return classes(xp, y_true, y_pred) == xp.argmax(y_pred)


class SparseTopKCategoricalAccuracy(_Accuracy):
    """y_true integers [...], y_pred scores [..., classes]: correct if fewer than k score higher."""

    def __init__(self, name: str | None = None, *, k: int = 5, weighted: bool = False) -> None:
        if k < 1:
            raise StateError(f"k: expected at least 1, found {k}")
        self.k = k
        super().__init__(name, weighted=weighted)

    @property
    def correct(self) -> str:
        return f"correct_in_top_{self.k}"

    def matches(self, xp: Any, y_true: Any, y_pred: Any) -> Any:
        is_label = classes(xp, y_true, y_pred)[..., None] == xp.arange(y_pred.shape[-1])
        # A label that is not a class gets a score below all others.
        score = xp.amax(xp.where(is_label, y_pred, -float("inf")))[..., None]
        # Not `y_pred > score`, which is false for NaN, and NaN would then be the best score.
        higher = xp.sum(xp.array(~(y_pred <= score), COUNTER), -1)
        return higher < self.k


class TopKCategoricalAccuracy(SparseTopKCategoricalAccuracy):
    """The same with y_true one-hot, of shape [..., classes]."""

    def matches(self, xp: Any, y_true: Any, y_pred: Any) -> Any:
        labels = xp.constant(y_true, SUM)
        same_shape("labels", labels, y_pred)
        return super().matches(xp, xp.argmax(labels), y_pred)


class ConfusionMatrix(Counting):
    """How often label i (row) was predicted as j (column): int64 of shape [classes, classes].

    y_true integers [...]; y_pred integers of the same shape, or scores [..., classes].
    """

    def __init__(self, num_classes: int, name: str | None = None) -> None:
        self.num_classes = num_classes
        super().__init__(name)

    def counts(self) -> dict[str, tuple[int, ...]]:
        return {"matrix": (self.num_classes, self.num_classes)}

    def faults(self) -> dict[str, str]:
        advice = f"labels or predictions were outside of 0 to {self.num_classes - 1}"
        return {**super().faults(), "outside": advice}

    def contribution(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        """Labels, predictions and weights of a share."""
        xp = namespace(y_true, y_pred, sample_weight)
        y_pred = xp.constant(y_pred, SUM)
        labels = xp.constant(y_true, COUNTER)
        if y_pred.ndim > labels.ndim:
            y_pred = xp.argmax(y_pred)
        predicted = xp.array(y_pred, COUNTER)
        same_shape("labels", labels, predicted)
        weight, faults = self.weights(xp, sample_weight, labels)
        size = self.num_classes
        inside = (labels >= 0) & (labels < size) & (predicted >= 0) & (predicted < size)
        counted = weight != 0
        # Two more cells: for labels or predictions outside, and for examples without weight.
        cell = xp.where(inside, labels * size + predicted, size * size)
        cells = xp.bincount(xp.where(counted, cell, size * size + 1), size * size + 2)
        matrix = cells[: size * size].reshape((size, size))
        return {"matrix": matrix, "outside": cells[size * size], **faults}

    def of_counts(self, counts: dict[str, Any]) -> Any:
        return counts["matrix"]


# Below 0 and above 1, so that the first threshold admits every prediction and the last one none.
_EPSILON = 1e-7


class AUC(Counting):
    """The area under the ROC or the precision-recall curve, by fixed thresholds.

    y_true of 0 and 1, y_pred in [0, 1], in one shape [...]. `curve` is "ROC" or "PR". The area is a
    function of integer counts above each threshold, with the thresholds and summation of
    keras.metrics.AUC; for "PR" by Davis and Goadrich, "The Relationship Between Precision-Recall
    and ROC Curves", ICML 2006.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        num_thresholds: int = 200,
        curve: str = "ROC",
        weighted: bool = False,
    ) -> None:
        if curve not in ("ROC", "PR"):
            raise StateError(f'curve: expected "ROC" or "PR", found {curve!r}')
        if num_thresholds < 2:
            raise StateError(f"num_thresholds: expected at least 2, found {num_thresholds}")
        self.curve = curve
        last = num_thresholds - 1
        inner = [step / last for step in range(1, last)]
        self.thresholds = np.array([-_EPSILON, *inner, 1 + _EPSILON], SUM)
        super().__init__(name, weighted=weighted)

    def counts(self) -> dict[str, tuple[int, ...]]:
        shape = self.thresholds.shape
        return {"true_positives": shape, "false_positives": shape}

    def faults(self) -> dict[str, str]:
        advice = "predictions were outside of 0 to 1; pass probabilities, not logits"
        return {**super().faults(), "outside": advice}

    def contribution(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        """Labels, predictions and weights of a share."""
        xp = namespace(y_true, y_pred, sample_weight)
        y_pred, labels = xp.constant(y_pred, SUM), xp.constant(y_true, SUM)
        same_shape("labels", labels, y_pred)
        weight, faults = self.weights(xp, sample_weight, y_pred)
        y_pred, weight = y_pred.reshape(-1), weight.reshape(-1)
        positive = xp.array(labels.reshape(-1) != 0, self.kind) * weight
        negative = weight - positive
        above = xp.array(y_pred[:, None] > xp.array(self.thresholds), self.kind)
        outside = (weight != 0) & ~((y_pred >= 0) & (y_pred <= 1))
        return {
            "true_positives": xp.sum(above * positive[:, None], 0),
            "false_positives": xp.sum(above * negative[:, None], 0),
            "outside": xp.sum(xp.array(outside, COUNTER)),
            **faults,
        }

    def of_counts(self, counts: dict[str, Any]) -> Any:
        tp, fp = counts["true_positives"], counts["false_positives"]
        result = (_roc if self.curve == "ROC" else _precision_recall)(namespace(tp), tp, fp)
        return result if is_traced(result) else float(result)


def _roc(xp: Any, tp: Any, fp: Any) -> Any:
    """Trapezoids over the false positive rate. Without positives or negatives the area is 0."""
    # Every example lies above the first threshold. Counts give an integer, divided once.
    whole = 2 * tp[0] * fp[0]
    return ((fp[:-1] - fp[1:]) * (tp[:-1] + tp[1:])).sum() / xp.where(whole > 0, whole, 1)


def _precision_recall(xp: Any, tp: Any, fp: Any) -> Any:
    predicted = tp + fp
    more, more_right = predicted[:-1] - predicted[1:], tp[:-1] - tp[1:]
    slope = more_right / xp.where(more > 0, more, 1)
    intercept = tp[1:] - slope * predicted[1:]
    both = (predicted[:-1] > 0) & (predicted[1:] > 0)
    growth = xp.where(both, predicted[:-1], 1) / xp.where(both, predicted[1:], 1)
    gained = slope * (more_right + intercept * xp.log(growth))
    return gained.sum() / xp.where(tp[0] > 0, tp[0], 1)
