"""Losses of a replica that add up to the loss of the global batch.

Owns the two divisions. Invariant: divisors are functions of the recipe (the global batch, the number
of logical replicas), never of what one device or process holds.

The figures are TensorFlow's: tf.nn.compute_average_loss and tf.nn.scale_regularization_loss.
"""

from __future__ import annotations

from typing import Any

from perdure.distribute.arrays import namespace
from perdure.distribute.replica_context import get_replica_context, has_strategy
from perdure.errors import TopologyError


def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
) -> Any:
    """sum(per_example_loss * sample_weight) / global_batch_size.

    `per_example_loss` is an array of shape [share, ...] of JAX, PyTorch or NumPy. The results of all
    replicas are to be summed. `global_batch_size` is by default the replica's own number of examples
    times the number of replicas (1 under no strategy); where rows pad the last batch, give the number
    that counts, or better, divide sums by weights in `update`. Raises TopologyError in a scope outside
    of a replica, where nobody knows which share this is.
    """
    xp = namespace(per_example_loss, sample_weight)
    losses = xp.array(per_example_loss)
    if losses.ndim == 0:
        raise TopologyError(
            "compute_average_loss expects one loss for each example, found a single number; ask the "
            'loss function not to reduce (reduction="none")'
        )
    if sample_weight is not None:
        losses = losses * _aligned(xp.array(sample_weight), losses)
    if global_batch_size is None:
        global_batch_size = int(losses.shape[0]) * _replicas("compute_average_loss")
    elif isinstance(global_batch_size, (int, float)) and global_batch_size <= 0:
        raise TopologyError(f"global_batch_size must be above 0, got {global_batch_size}")
    return losses.sum() / global_batch_size


def scale_regularization_loss(regularization_loss: Any) -> Any:
    """sum(regularization_loss) / V: every replica adds it, and the sum has it once."""
    loss = namespace(regularization_loss).array(regularization_loss)
    return loss.sum() / _replicas("scale_regularization_loss")


def _replicas(name: str) -> int:
    context = get_replica_context()
    if context is not None:
        return context.num_replicas_in_sync
    if has_strategy():
        raise TopologyError(
            f"{name} stands in no replica here: call it in the function of strategy.run, or in grad"
        )
    return 1


def _aligned(weight: Any, like: Any) -> Any:
    """The weights of examples with axes added behind, so that they spread over what they weigh."""
    if weight.ndim > like.ndim or tuple(weight.shape) != tuple(like.shape[: weight.ndim]):
        raise TopologyError(
            f"sample_weight has the shape {list(weight.shape)}; expected the first axes of "
            f"{list(like.shape)}"
        )
    return weight.reshape(tuple(weight.shape) + (1,) * (like.ndim - weight.ndim))
