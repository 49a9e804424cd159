"""The group of processes: its description, and the rendezvous of its members.

`resolve` reads the description; `await_members` waits for all processes before any framework starts.
"""

from perdure.distribute.cluster.cluster_spec import (
    Cluster,
    ClusterOptions,
    ClusterResolver,
    SimpleClusterResolver,
)
from perdure.distribute.cluster.rendezvous import Member, await_members
from perdure.distribute.cluster.resolve import SOURCES, resolve, resolve_for, with_existing
from perdure.distribute.cluster.tf_config import TFConfigClusterResolver

__all__ = [
    "SOURCES",
    "Cluster",
    "ClusterOptions",
    "ClusterResolver",
    "Member",
    "SimpleClusterResolver",
    "TFConfigClusterResolver",
    "await_members",
    "resolve",
    "resolve_for",
    "with_existing",
]
