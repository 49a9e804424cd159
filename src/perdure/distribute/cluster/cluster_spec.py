"""`Cluster`: a group of processes, seen from one of them; and its time limits.

An incomplete or contradictory description is never taken for a group of one: P processes that each
run alone would write P runs into one directory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from perdure.errors import ClusterError

START = "PERDURE_START_TIMEOUT"
HEARTBEAT = "PERDURE_HEARTBEAT"


@dataclass(frozen=True)
class Cluster:
    """A group of processes, seen from one of them.

    Attributes:
        coordinator: The host:port where process 0 listens; None for a group of one.
        num_processes: The number of processes.
        process_id: The number of this process, from 0.
        addresses: The host or host:port of each process by number; empty if the description has none.
        source: Where the description was found.
        names_chief: Whether the description gives process 0 the type "chief".
    """

    coordinator: str | None
    num_processes: int
    process_id: int
    addresses: tuple[str, ...] = ()
    source: str = "arguments"
    names_chief: bool = field(default=False, compare=False)

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
        if self.coordinator is not None:
            check_address(self.coordinator, self.source)
        if self.addresses and len(self.addresses) != self.num_processes:
            raise ClusterError(
                f"{self.source}: expected the addresses of {self.num_processes} processes, found "
                f"{len(self.addresses)}"
            )
        twice = sorted({a for a in self.addresses if self.addresses.count(a) > 1})
        if twice:
            raise ClusterError(
                f"{self.source}: the address {twice[0]} occurs more than once; every process needs its "
                "own"
            )

    def cluster(self) -> Cluster:
        """This group: a `Cluster` is its own resolver."""
        return self

    @property
    def is_chief(self) -> bool:
        """True in process 0, which commits checkpoints."""
        return self.process_id == 0

    @property
    def task_type(self) -> str | None:
        """ "chief" or "worker", as in TensorFlow; None for a process that is alone.

        Only TF_CONFIG can name a chief; in other groups every process is a worker.
        """
        if self.coordinator is None:
            return None
        return "chief" if self.names_chief and self.process_id == 0 else "worker"

    @property
    def task_id(self) -> int | None:
        """Number of this process among those of its `task_type`; None for a process that is alone."""
        if self.coordinator is None:
            return None
        return self.process_id - (self.names_chief and self.process_id > 0)

    @property
    def host_port(self) -> tuple[str, int]:
        """The coordinator's host and port."""
        if self.coordinator is None:
            raise ClusterError(f"{self.source}: a group of one has no coordinator")
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)

    def name(self, process: int) -> str:
        """For messages: `process 2 (node07)`, or `process 2` without addresses."""
        return f"process {process}" + (f" ({self.addresses[process]})" if self.addresses else "")


@dataclass(frozen=True)
class ClusterOptions:
    """Time limits of a group, in seconds.

    Attributes:
        start_timeout: For all processes to come.
        heartbeat: For a silent process (JAX) or machine (PyTorch, which notices at once that a
            connection is closed), before it counts as dead.
        operation_timeout: For one operation of the group, such as a save by all, before it counts as
            hung.
        leave_timeout: For the other processes at the end.
    """

    start_timeout: float = 300
    heartbeat: float = 10
    operation_timeout: float = 600
    leave_timeout: float = 30

    def __post_init__(self) -> None:
        for limit in fields(self):
            _check_seconds(limit.name, getattr(self, limit.name))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> ClusterOptions:
        """The defaults, changed by PERDURE_START_TIMEOUT and PERDURE_HEARTBEAT if they are set."""
        environ = os.environ if environ is None else environ
        limits = {}
        for name, variable in (("start_timeout", START), ("heartbeat", HEARTBEAT)):
            if text := environ.get(variable):
                try:
                    limits[name] = float(text)
                except ValueError:
                    raise ClusterError(f"{variable}: expected seconds, found {text!r}") from None
                _check_seconds(variable, limits[name])
        return cls(**limits)


class ClusterResolver(Protocol):
    """Returns the group that this process belongs to."""

    def cluster(self) -> Cluster: ...


class _Resolver:
    """A resolver of a group that is known, with this process under TensorFlow's names."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def cluster(self) -> Cluster:
        return self._cluster

    @property
    def task_type(self) -> str | None:
        """See `Cluster.task_type`."""
        return self.cluster().task_type

    @property
    def task_id(self) -> int | None:
        """See `Cluster.task_id`."""
        return self.cluster().task_id


class SimpleClusterResolver(_Resolver):
    """The group, from explicit arguments."""

    def __init__(self, coordinator: str | None, num_processes: int, process_id: int) -> None:
        super().__init__(Cluster(coordinator, num_processes, process_id))


class TFConfigClusterResolver(_Resolver):
    """The group in TF_CONFIG, as TensorFlow's launchers write it; a group of one if that is not set.

    The chief is process 0; without a chief, worker 0 is.

    Raises:
        ClusterError: TF_CONFIG is malformed, or this task cannot take part.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        super().__init__(from_tf_config(environ) or Cluster(None, 1, 0, source="TF_CONFIG"))


_REFUSED = {
    "ps": "a parameter server applies gradients in the order in which they come, so no two runs are "
    "alike; every worker holds the whole state here. Start workers only",
    "evaluator": "an evaluator is no part of the group: it reads the run directory. Start it without "
    "TF_CONFIG, and restore the checkpoints there",
}


def from_tf_config(environ: Mapping[str, str]) -> Cluster | None:
    """The group; None if TF_CONFIG is not set, is empty, or has neither cluster nor task."""
    text = environ.get("TF_CONFIG", "")
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
        return None
    kind, index = _task(config, jobs)
    addresses = (*jobs.get("chief", ()), *jobs.get("worker", ()))
    before = len(jobs.get("chief", ())) if kind == "worker" else 0
    chief = bool(jobs.get("chief"))
    return Cluster(addresses[0], len(addresses), before + index, addresses, "TF_CONFIG", chief)


def _jobs(config: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    cluster = config.get("cluster") or {}
    if not isinstance(cluster, dict):
        raise ClusterError(f'TF_CONFIG: "cluster" must be an object, found {cluster!r}')
    jobs: dict[str, tuple[str, ...]] = {}
    for kind, addresses in cluster.items():
        if kind not in ("chief", "worker"):
            why = _REFUSED.get(kind, 'expected only "chief" and "worker"')
            raise ClusterError(f'TF_CONFIG: cluster has tasks of type "{kind}"; {why}')
        if not isinstance(addresses, list) or not all(isinstance(a, str) for a in addresses):
            raise ClusterError(
                f'TF_CONFIG: "{kind}" must be a list of host:port strings, found {addresses!r}'
            )
        for address in addresses:
            check_address(address, f'TF_CONFIG: "{kind}"')
        if addresses:
            jobs[kind] = tuple(addresses)
    if len(jobs.get("chief", ())) > 1:
        raise ClusterError(f"TF_CONFIG: expected at most one chief, found {jobs['chief']}")
    return jobs


def _task(config: dict[str, Any], jobs: dict[str, tuple[str, ...]]) -> tuple[str, int]:
    task = config.get("task")
    if not isinstance(task, dict) or "type" not in task or "index" not in task:
        raise ClusterError(
            f'TF_CONFIG: "task" must be an object with "type" and "index", found {task!r}'
        )
    kind, index = task["type"], task["index"]
    if kind in _REFUSED:
        raise ClusterError(f'TF_CONFIG: this task is of type "{kind}"; {_REFUSED[kind]}')
    if kind not in jobs:
        raise ClusterError(
            f'TF_CONFIG: task type "{kind}" is not in the cluster, which has {sorted(jobs)}'
        )
    # Schedulers often write the index as a string; TensorFlow takes it too.
    index = integer("TF_CONFIG task index", str(index))
    if not 0 <= index < len(jobs[kind]):
        raise ClusterError(
            f"TF_CONFIG: task index {index} is out of range: the cluster has {len(jobs[kind])} "
            f'of type "{kind}"'
        )
    return kind, index


def check_address(address: str, source: str) -> None:
    """Raise unless `address` is host:port."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ClusterError(f"{source}: expected an address as host:port, found {address!r}")


def integer(name: str, text: str) -> int:
    """`text` as a number. `name`, for the error, is where it was found."""
    try:
        return int(text)
    except ValueError:
        raise ClusterError(f"{name}: expected an integer, found {text!r}") from None


def _check_seconds(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ClusterError(f"{name}: expected seconds above 0, found {value}")
