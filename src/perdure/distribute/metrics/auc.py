"""The area under the ROC or the precision-recall curve, by fixed thresholds.

It accumulates counts above each threshold, so the area is a function of integers.

The thresholds and the "interpolation" summation are those of keras.metrics.AUC. For the
precision-recall curve it is the interpolation of Davis and Goadrich, "The Relationship Between
Precision-Recall and ROC Curves", ICML 2006.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from perdure.distribute.arrays import is_traced, namespace
from perdure.distribute.metrics.counting import Counting, same_shape
from perdure.distribute.metrics.metric import COUNTER, SUM
from perdure.errors import StateError

# Below 0 and above 1, so that the first threshold admits every prediction and the last one none.
_EPSILON = 1e-7


class AUC(Counting):
    """y_true of 0 and 1, y_pred in [0, 1], in one shape [...]. `curve` is "ROC" or "PR".

    A prediction counts as positive at a threshold if it lies above it, in float32.
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
