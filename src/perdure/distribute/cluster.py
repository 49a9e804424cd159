"""Who belongs to the group of processes, and where its coordinator listens.

Owns the reading of cluster descriptions: explicit arguments, TF_CONFIG, JAX's variables, torchrun's
variables, in this order; explicit arguments always win. Invariant: a description that is incomplete
or contradicts itself is a ClusterError that names what was found where. It is never taken for a group
of one, because P processes that each believe to be alone would write P runs into one directory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from perdure.errors import ClusterError

_JAX = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class Cluster:
    """A group of processes, seen from one of them.

    `coordinator` is the host:port where process 0 listens, None for a group of one. `addresses` are
    the processes' own, where the description has them.
    """

    coordinator: str | None
    num_processes: int
    process_id: int
    addresses: tuple[str, ...] = ()
    source: str = "arguments"

    def __post_init__(self) -> None:
        if self.num_processes < 1:
            raise ClusterError(
                f"{self.source}: expected at least 1 process, found {self.num_processes}"
            )
        if not 0 <= self.process_id < self.num_processes:
            raise ClusterError(
                f"{self.source}: process index {self.process_id} is out of range: expected 0 to "
                f"{self.num_processes - 1} for {self.num_processes} processes"
            )
        if self.num_processes > 1 and self.coordinator is None:
            raise ClusterError(
                f"{self.source}: {self.num_processes} processes need the coordinator's host:port"
            )
        for address in (self.coordinator, *self.addresses):
            if address is not None:
                _check_address(address, self.source)
        twice = sorted({a for a in self.addresses if self.addresses.count(a) > 1})
        if twice:
            raise ClusterError(
                f"{self.source}: the address {twice[0]} is there more than once; every process needs "
                "its own"
            )

    @property
    def is_chief(self) -> bool:
        """True in the process that writes: process 0."""
        return self.process_id == 0

    @property
    def host_port(self) -> tuple[str, int]:
        """The coordinator's host and port."""
        if self.coordinator is None:
            raise ClusterError(f"{self.source}: a group of one has no coordinator")
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)


class ClusterResolver(Protocol):
    """Whatever can say who belongs to the group."""

    def cluster(self) -> Cluster: ...


class SimpleClusterResolver:
    """The group, from explicit arguments."""

    def __init__(self, coordinator: str | None, num_processes: int, process_id: int) -> None:
        self._cluster = Cluster(coordinator, num_processes, process_id)

    def cluster(self) -> Cluster:
        return self._cluster


class TFConfigClusterResolver:
    """The group, from TF_CONFIG; see tf.distribute.cluster_resolver.TFConfigClusterResolver.

    Chief and workers count; the chief comes first, and without one worker 0 is the chief. Parameter
    servers and evaluators are refused, because perdure has no use for them.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ

    def cluster(self) -> Cluster:
        text = self._environ.get("TF_CONFIG", "")
        try:
            config = json.loads(text or "{}")
        except json.JSONDecodeError as error:
            raise ClusterError(f"TF_CONFIG is not JSON ({error}): {text[:120]!r}") from error
        if not isinstance(config, dict):
            raise ClusterError(f"TF_CONFIG: expected a JSON object, found {text[:120]!r}")
        jobs = _jobs(config)
        if not jobs:
            if "task" in config:
                raise ClusterError('TF_CONFIG has "task" and no "cluster"; expected both')
            return Cluster(None, 1, 0, source="TF_CONFIG")
        kind, index = _task(config, jobs)
        addresses = (*jobs.get("chief", ()), *jobs.get("worker", ()))
        before = len(jobs.get("chief", ())) if kind == "worker" else 0
        return Cluster(addresses[0], len(addresses), before + index, addresses, "TF_CONFIG")


def resolve(
    resolver: ClusterResolver | Cluster | None = None,
    environ: Mapping[str, str] | None = None,
) -> Cluster:
    """The group to join: `resolver` if given, else what the environment describes, else one alone."""
    if isinstance(resolver, Cluster):
        return resolver
    if resolver is not None:
        return resolver.cluster()
    environ = os.environ if environ is None else environ
    if environ.get("TF_CONFIG"):
        return TFConfigClusterResolver(environ).cluster()
    if any(name in environ for name in _JAX):
        coordinator, count, index = _all_of(_JAX, environ)
        return Cluster(
            coordinator, _integer(_JAX[1], count), _integer(_JAX[2], index), source="JAX_* variables"
        )
    if any(name in environ for name in _TORCHRUN):
        host, port, index, count = _all_of(_TORCHRUN, environ)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return Cluster(
            address,
            _integer("WORLD_SIZE", count),
            _integer("RANK", index),
            source="torchrun's variables",
        )
    return Cluster(None, 1, 0, source="the environment")


def _jobs(config: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    cluster = config.get("cluster") or {}
    if not isinstance(cluster, dict):
        raise ClusterError(f'TF_CONFIG: "cluster" must be an object, found {cluster!r}')
    jobs: dict[str, tuple[str, ...]] = {}
    for kind, addresses in cluster.items():
        if kind not in ("chief", "worker"):
            raise ClusterError(
                f'TF_CONFIG: cluster has tasks of type "{kind}"; expected only "chief" and "worker"'
            )
        if not isinstance(addresses, list) or not all(isinstance(a, str) for a in addresses):
            raise ClusterError(
                f'TF_CONFIG: "{kind}" must be a list of host:port strings, found {addresses!r}'
            )
        if addresses:
            jobs[kind] = tuple(addresses)
    if len(jobs.get("chief", ())) > 1:
        raise ClusterError(f'TF_CONFIG: expected at most one chief, found {jobs["chief"]}')
    return jobs


def _task(config: dict[str, Any], jobs: dict[str, tuple[str, ...]]) -> tuple[str, int]:
    task = config.get("task")
    if not isinstance(task, dict) or "type" not in task or "index" not in task:
        raise ClusterError(
            f'TF_CONFIG: "task" must be an object with "type" and "index", found {task!r}'
        )
    kind, index = task["type"], task["index"]
    if kind not in jobs:
        raise ClusterError(
            f'TF_CONFIG: task type "{kind}" is not in the cluster, which has {sorted(jobs)}'
        )
    # Schedulers often write the index as a string; TensorFlow takes it too.
    index = _integer("TF_CONFIG task index", str(index))
    if not 0 <= index < len(jobs[kind]):
        raise ClusterError(
            f"TF_CONFIG: task index {index} is out of range: the cluster has {len(jobs[kind])} "
            f'of type "{kind}"'
        )
    return kind, index


def _all_of(names: tuple[str, ...], environ: Mapping[str, str]) -> list[str]:
    missing = [name for name in names if name not in environ]
    if missing:
        present = [name for name in names if name in environ]
        raise ClusterError(
            f"the environment has {', '.join(present)} and lacks {', '.join(missing)}; set all of "
            "them or none"
        )
    return [environ[name] for name in names]


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ClusterError(f"{name}: expected an integer, found {text!r}") from None


def _check_address(address: str, source: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ClusterError(f"{source}: expected an address as host:port, found {address!r}")
