"""For users of JAX: strategies, metrics, losses and members that differ between processes.

Inside the package this module is `perdure.jax`; `import jax` still means the framework.
"""

from perdure.checkpoint import PerRank
from perdure.distribute import (
    AutoShardPolicy,
    InputContext,
    ReduceOp,
    compute_average_loss,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
    metrics,
    scale_regularization_loss,
)
from perdure.errors import missing_extra

try:
    from perdure.distribute.jax.strategies import (
        MirroredStrategy,
        MultiWorkerMirroredStrategy,
        OneDeviceStrategy,
    )
except ModuleNotFoundError as error:
    raise missing_extra("jax", error) from error

__all__ = [
    "AutoShardPolicy",
    "InputContext",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "PerRank",
    "ReduceOp",
    "compute_average_loss",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "metrics",
    "scale_regularization_loss",
]
