"""Finds the description of the group in the arguments and the environment.

Explicit arguments come first, then the variables of a launcher, then those of a scheduler. Two
launchers that contradict each other are an error, because one of them was not meant.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from perdure.distribute.cluster.cluster_spec import Cluster, ClusterResolver
from perdure.distribute.cluster.schedulers import from_kubernetes, from_open_mpi, from_slurm
from perdure.distribute.cluster.tf_config import from_tf_config
from perdure.distribute.cluster.variables import from_jax, from_torchrun
from perdure.errors import ClusterError
from perdure.runtime.framework_group import framework_group

# Names one of several sources, for a program that takes no argument.
SOURCE = "PERDURE_CLUSTER"

# In place of an address that the framework does not have: nothing connects to it again.
_JOINED = "joined:1"

Source = Callable[[Mapping[str, str]], Cluster | None]

_LAUNCHERS: dict[str, Source] = {
    "tf_config": from_tf_config,
    "jax": from_jax,
    "torchrun": from_torchrun,
}
# A launcher may run inside a scheduler's job, with more processes than the job has tasks.
_SCHEDULERS: dict[str, Source] = {
    "openmpi": from_open_mpi,
    "slurm": from_slurm,
    "kubernetes": from_kubernetes,
}
SOURCES = (*_LAUNCHERS, *_SCHEDULERS)


def resolve(
    resolver: ClusterResolver | str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Cluster:
    """The group to join: that of `resolver`, else the one in the environment, else a group of one.

    Args:
        resolver: A resolver, or the name of a source (see SOURCES), as in PERDURE_CLUSTER.
        environ: The environment; by default that of this process.

    Raises:
        ClusterError: A description is incomplete, malformed, or contradicts another one.
    """
    if resolver is not None and not isinstance(resolver, str):
        if not callable(getattr(resolver, "cluster", None)):
            raise ClusterError(
                f"cluster_resolver: expected a ClusterResolver, the name of a source or None, found "
                f"{resolver!r}"
            )
        return resolver.cluster()
    environ = os.environ if environ is None else environ
    name = resolver or environ.get(SOURCE)
    if name:
        return _named(name, "cluster_resolver" if resolver else SOURCE, environ)
    clusters = [c for source in _LAUNCHERS.values() if (c := source(environ)) is not None]
    for other in clusters[1:]:
        _compare(clusters[0], other)
    if clusters:
        return clusters[0]
    for source in _SCHEDULERS.values():
        if (cluster := source(environ)) is not None:
            return cluster
    return Cluster(None, 1, 0, source="the environment")


def resolve_for(
    engine: str,
    resolver: ClusterResolver | str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Cluster:
    """`resolve`, or the group that the program has already initialized in the framework.

    An incomplete description in the environment is then no error: MASTER_ADDR and MASTER_PORT, with
    the rank as an argument, are a usual way to call `init_process_group`.
    """
    environ = os.environ if environ is None else environ
    try:
        cluster = resolve(resolver, environ)
    except ClusterError:
        if resolver is not None or environ.get(SOURCE) or framework_group(engine) is None:
            raise
        cluster = Cluster(None, 1, 0, source="the environment")
    return with_existing(cluster, engine)


def with_existing(cluster: Cluster, engine: str) -> Cluster:
    """`cluster`, or the group that the program has already initialized in the framework.

    The framework's group counts if `cluster` describes one process alone, without an argument. Raises
    ClusterError if both describe several processes and contradict each other.
    """
    existing = framework_group(engine)
    if existing is None or (existing.count == 1 and cluster.num_processes == 1):
        return cluster
    given = cluster.num_processes > 1 or cluster.source == "arguments"
    if given and (cluster.process_id, cluster.num_processes) != (existing.index, existing.count):
        raise ClusterError(
            f"{existing.source} is initialized as process {existing.index} of {existing.count}; "
            f"{cluster.source} says {cluster.process_id} of {cluster.num_processes}. Unset the wrong "
            f"one"
        )
    if given:
        return cluster
    address = existing.address or _JOINED
    return Cluster(address, existing.count, existing.index, source=existing.source)


def _named(name: str, where: str, environ: Mapping[str, str]) -> Cluster:
    source = {**_LAUNCHERS, **_SCHEDULERS}.get(name)
    if source is None:
        raise ClusterError(f"{where}: expected one of {', '.join(SOURCES)}, found {name!r}")
    cluster = source(environ)
    if cluster is None:
        raise ClusterError(f"{where} names {name}, and the environment has nothing of it")
    return cluster


def _compare(one: Cluster, other: Cluster) -> None:
    """ClusterError if two contradict. Ports may differ, as TensorFlow's and JAX's services do."""
    numbers = [(c.process_id, c.num_processes) for c in (one, other)]
    if numbers[0] != numbers[1]:
        raise ClusterError(
            f"two descriptions of the group contradict each other: {one.source} says process "
            f"{numbers[0][0]} of {numbers[0][1]}, {other.source} says process {numbers[1][0]} of "
            f"{numbers[1][1]}. Unset the wrong one, or name the right one: {SOURCE}="
            f"{'|'.join(_LAUNCHERS)}"
        )
