"""`LossScale`: dynamic loss scaling for float16, as part of the state.

Every scale is a power of two, so that scaling and unscaling lose no bit.

Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2; growth and backoff as in
TensorFlow's and Keras' LossScaleOptimizer: doubled after 2,000 steps in a row, halved at an overflow.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

LARGEST = 2.0**24


class LossScale(NamedTuple):
    """The scale of the loss, and the number of finite steps since it last changed.

    In `grad` multiply the loss by `scale`. In `update` divide the total by it, once, and keep the old
    state if a gradient of the total is not finite: `finite` is then the same on every worker.

    Attributes:
        scale: A zero-dimensional float32 array of either framework, or NumPy's at the start. A Python
            number would take the dtype of the gradients on JAX, and float16 loses what it divides.
        steps: A zero-dimensional integer array, or a number at the start.
    """

    scale: Any = np.float32(2.0**15)
    steps: Any = 0

    def after(self, finite: Any, growth_steps: int = 2000) -> LossScale:
        """The scale for the next step.

        Args:
            finite: Whether the gradients of this step are finite, a zero-dimensional array of bool.
            growth_steps: The scale doubles after this number of finite steps in a row.
        """
        due = self.steps + 1 >= growth_steps
        grows = finite & due & (self.scale < LARGEST)
        shrinks = ~finite & (self.scale > 1)
        # By arithmetic, which both frameworks share. Exact, because the factors are 1 and 2.
        return LossScale(
            self.scale * (1 + 1 * grows) / (1 + 1 * shrinks), (self.steps + 1) * (finite & ~due)
        )
