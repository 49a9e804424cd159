"""Who belongs to the group of processes, where its coordinator listens, and whether all have come.

`resolve` reads the description, `call_roll` meets the others before any framework starts.
"""

from perdure.distribute.cluster.description import (
    Cluster,
    ClusterOptions,
    ClusterResolver,
    SimpleClusterResolver,
)
from perdure.distribute.cluster.resolve import SOURCES, resolve, resolve_for, with_existing
from perdure.distribute.cluster.roll import Member, call_roll
from perdure.distribute.cluster.tf_config import TFConfigClusterResolver

__all__ = [
    "SOURCES",
    "Cluster",
    "ClusterOptions",
    "ClusterResolver",
    "Member",
    "SimpleClusterResolver",
    "TFConfigClusterResolver",
    "call_roll",
    "resolve",
    "resolve_for",
    "with_existing",
]
