"""Losses of a replica that add up to the loss of the global batch.

Divisors are functions of the recipe (the global batch, the number of logical replicas), never of the
shares of one device or process. The functions are those of TensorFlow: tf.nn.compute_average_loss and
tf.nn.scale_regularization_loss.
"""

from __future__ import annotations

from typing import Any

from perdure.distribute.arrays import namespace
from perdure.distribute.run.context import get_replica_context, has_strategy
from perdure.errors import TopologyError


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
