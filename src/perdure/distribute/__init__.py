"""Strategies: the same bits on any devices and processes. Names no framework.

The strategies themselves are made by an engine: `perdure.jax` and `perdure.torch`.
"""

from typing import Any

from perdure.distribute import metrics
from perdure.distribute.cluster import (
    Cluster,
    ClusterOptions,
    ClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    resolve,
)
from perdure.distribute.inputs import (
    AutoShardPolicy,
    DistributedDataset,
    InputContext,
    ValueContext,
)
from perdure.distribute.key_value_group import initialize_distributed
from perdure.distribute.losses import (
    LossScale,
    compute_average_loss,
    scale_regularization_loss,
)
from perdure.distribute.run.context import (
    ReplicaContext,
    get_replica_context,
    has_strategy,
    in_cross_replica_context,
)
from perdure.distribute.strategy import Strategy, get_strategy
from perdure.distribute.values import PerReplica, ReduceOp
from perdure.runtime.process_group import Processes, SingleProcess
from perdure.tensorflow_names import missing

__all__ = [
    "Cluster",
    "ClusterOptions",
    "ClusterResolver",
    "LossScale",
    "SimpleClusterResolver",
    "Strategy",
    "TFConfigClusterResolver",
    "resolve",
]


def __getattr__(name: str) -> Any:
    raise missing("perdure.distribute", name)
