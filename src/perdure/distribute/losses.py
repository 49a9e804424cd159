"""Losses of a replica that add up to the loss of the global batch.

Divisors are functions of the recipe (the global batch, the number of logical replicas), never of the
shares of one device or process. The functions are those of TensorFlow: tf.nn.compute_average_loss and
tf.nn.scale_regularization_loss.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from perdure.distribute.arrays import namespace
from perdure.distribute.run.context import get_replica_context, has_strategy
from perdure.errors import TopologyError

LARGEST = 2.0**24


def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
) -> Any:
    """sum(per_example_loss * sample_weight) / global_batch_size.

    The sum of the results of all replicas is the average loss.

    Args:
        per_example_loss: An array of JAX, PyTorch or NumPy of shape [share, ...].
        sample_weight: Weights in the shape of the first axes of the losses.
        global_batch_size: By default the replica's own number of examples times the number of replicas
            (1 without a strategy). If rows pad the last batch, pass the number without them; or better,
            divide sums by weights in `update`.

    Returns:
        A scalar in the dtype of the losses.

    Raises:
        TopologyError: Called in a scope outside of a replica, or with losses or weights of a wrong
            shape.
    """
    xp = namespace(per_example_loss, sample_weight)
    losses = xp.array(per_example_loss)
    if losses.ndim == 0:
        raise TopologyError(
            "compute_average_loss: expected one loss for each example, found a single number; ask the "
            'loss function not to reduce (reduction="none")'
        )
    if sample_weight is not None:
        losses = losses * _aligned(xp.array(sample_weight), losses)
    if global_batch_size is None:
        global_batch_size = int(losses.shape[0]) * _replicas("compute_average_loss")
    elif isinstance(global_batch_size, (int, float)) and global_batch_size <= 0:
        raise TopologyError(f"global_batch_size: expected more than 0, found {global_batch_size}")
    return losses.sum() / global_batch_size


def scale_regularization_loss(regularization_loss: Any) -> Any:
    """sum(regularization_loss) / V, so that the sum over all replicas has the loss once.

    Args:
        regularization_loss: An array of JAX, PyTorch or NumPy.

    Returns:
        A scalar in its dtype.
    """
    loss = namespace(regularization_loss).array(regularization_loss)
    return loss.sum() / _replicas("scale_regularization_loss")


def _replicas(name: str) -> int:
    context = get_replica_context()
    if context is not None:
        return context.num_replicas_in_sync
    if has_strategy():
        raise TopologyError(
            f"{name} was called outside of a replica; call it in the function of strategy.run, or in "
            "grad"
        )
    return 1


def _aligned(weight: Any, like: Any) -> Any:
    """The weights of examples with trailing axes of length 1, to broadcast over the losses."""
    if weight.ndim > like.ndim or tuple(weight.shape) != tuple(like.shape[: weight.ndim]):
        raise TopologyError(
            f"sample_weight has the shape {list(weight.shape)}; expected the first axes of "
            f"{list(like.shape)}"
        )
    return weight.reshape(tuple(weight.shape) + (1,) * (like.ndim - weight.ndim))


class LossScale(NamedTuple):
    """Dynamic loss scaling for float16, as part of the state.

    The scale of the loss, and the number of finite steps since it last changed. Every scale is a power
    of two, so that scaling and unscaling lose no bit.

    Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2; growth and backoff as in
    TensorFlow's and Keras' LossScaleOptimizer: doubled after 2,000 steps in a row, halved at an
    overflow.

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
