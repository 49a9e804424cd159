"""What a group of processes is, seen from one of them, and how long it waits.

Owns `Cluster`. Invariant: a description that is incomplete or contradicts itself is a ClusterError
that names what was found where. It is never taken for a group of one, because P processes that each
believe to be alone would write P runs into one directory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Protocol

from perdure.errors import ClusterError

START = "PERDURE_START_TIMEOUT"
HEARTBEAT = "PERDURE_HEARTBEAT"


@dataclass(frozen=True)
class Cluster:
    """A group of processes, seen from one of them.

    `coordinator` is the host:port where process 0 listens, None for a group of one. `addresses` says
    where each process runs (host or host:port, by number), where the description has it. `source` is
    where the description was found. `names_chief` is True if it gives process 0 the type "chief".
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
                f"{self.source}: the address {twice[0]} is there more than once; every process needs "
                "its own"
            )

    def cluster(self) -> Cluster:
        """Itself: a group that is known resolves to itself."""
        return self

    @property
    def is_chief(self) -> bool:
        """True in the process that writes: process 0."""
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
        """`process 2 (node07)`, as far as it is known."""
        return f"process {process}" + (f" ({self.addresses[process]})" if self.addresses else "")


@dataclass(frozen=True)
class ClusterOptions:
    """How long a group waits, in seconds.

    `start_timeout`: for the others to come. `heartbeat`: how long a process may be silent before it
    is taken for dead (JAX alone: PyTorch notices that a connection is closed). `operation_timeout`:
    for one operation of the group, before it is taken for hung; a save by all is one of them.
    `leave_timeout`: for the others, at the end.
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
        """The defaults, with PERDURE_START_TIMEOUT and PERDURE_HEARTBEAT where they are set."""
        environ = os.environ if environ is None else environ
        found = {}
        for name, variable in (("start_timeout", START), ("heartbeat", HEARTBEAT)):
            if text := environ.get(variable):
                try:
                    found[name] = float(text)
                except ValueError:
                    raise ClusterError(f"{variable}: expected seconds, found {text!r}") from None
                _check_seconds(variable, found[name])
        return cls(**found)


class ClusterResolver(Protocol):
    """Whatever can say who belongs to the group."""

    def cluster(self) -> Cluster: ...


class Task:
    """What a resolver says of this process, under TensorFlow's names."""

    def cluster(self) -> Cluster:
        raise NotImplementedError

    @property
    def task_type(self) -> str | None:
        """See `Cluster.task_type`."""
        return self.cluster().task_type

    @property
    def task_id(self) -> int | None:
        """See `Cluster.task_id`."""
        return self.cluster().task_id


class SimpleClusterResolver(Task):
    """The group, from explicit arguments."""

    def __init__(self, coordinator: str | None, num_processes: int, process_id: int) -> None:
        self._cluster = Cluster(coordinator, num_processes, process_id)

    def cluster(self) -> Cluster:
        return self._cluster


def check_address(address: str, source: str) -> None:
    """Raise unless `address` is host:port."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ClusterError(f"{source}: expected an address as host:port, found {address!r}")


def integer(name: str, text: str) -> int:
    """`text` as a number; `name` says where it was found."""
    try:
        return int(text)
    except ValueError:
        raise ClusterError(f"{name}: expected an integer, found {text!r}") from None


def _check_seconds(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ClusterError(f"{name}: expected seconds above 0, found {value}")
