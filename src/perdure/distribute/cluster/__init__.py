"""The group of processes: its description, and the rendezvous of its members.

`resolve` reads the description; `await_members` waits for all processes before any framework starts.
"""

from perdure.distribute.cluster.cluster_spec import (
    Cluster,
    ClusterOptions,
    ClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
)
from perdure.distribute.cluster.rendezvous import Member, await_members
from perdure.distribute.cluster.sources import SOURCES, resolve, resolve_for, with_existing

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
