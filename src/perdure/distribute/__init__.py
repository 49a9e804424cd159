"""Strategies: the same bits on any devices and processes. Names no framework.

The strategies themselves are made by an engine: `perdure.jax` and `perdure.torch`.
"""

from perdure.checkpoint.processes import Processes, SingleProcess
from perdure.distribute.cluster import (
    Cluster,
    ClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    resolve,
)
from perdure.distribute.strategy import Strategy
from perdure.distribute.values import PerReplica

__all__ = [
    "Cluster",
    "ClusterResolver",
    "PerReplica",
    "Processes",
    "SimpleClusterResolver",
    "SingleProcess",
    "Strategy",
    "TFConfigClusterResolver",
    "resolve",
]
