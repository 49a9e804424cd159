"""`LossScale`: dynamic loss scaling for float16, as part of the state.

Owns the scale and the count of steps since it last changed. Invariant: both are a function of which
steps overflowed; every scale is a power of two, so that scaling and unscaling lose no bit.

Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2; growth and backoff as in
TensorFlow's and Keras' LossScaleOptimizer: doubled after 2,000 steps in a row, halved at an overflow.
"""

from __future__ import annotations

from typing import Any, NamedTuple

LARGEST = 2.0**24


class LossScale(NamedTuple):
    """A scalar `scale` (float32) and `steps`, the finite steps since the last change.

    Made of zero-dimensional arrays of either framework, or of Python numbers at the start. In `grad`
    multiply the loss by `scale`; in `update` divide the total by it, once, and keep the old state
    where a gradient of the total is not finite: `finite` is then the same on every worker.
    """

    scale: Any = 2.0**15
    steps: Any = 0

    def after(self, finite: Any, growth_steps: int = 2000) -> LossScale:
        """The scale for the next step; `finite` is a zero-dimensional array of bool."""
        due = self.steps + 1 >= growth_steps
        grows = finite & due & (self.scale < LARGEST)
        shrinks = ~finite & (self.scale > 1)
        # In arithmetic, which is that of both frameworks. Exact: factors are 1 and 2.
        return LossScale(
            self.scale * (1 + 1 * grows) / (1 + 1 * shrinks), (self.steps + 1) * (finite & ~due)
        )
