"""`Processes`: the interface to the other processes of a group.

Invariant: every process of the group calls the same operations of one channel in the same order, from
one thread at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from perdure.errors import ArgumentError

ATTEMPT = "PERDURE_ATTEMPT"  # the number of the attempt, which `perdure run` sets for its workers


class Rank(Protocol):
    """The place of this process in a group."""

    @property
    def index(self) -> int:
        """The number of this process, from 0."""
        ...

    @property
    def count(self) -> int:
        """How many processes the group has."""
        ...

    @property
    def is_chief(self) -> bool:
        """Whether this is process 0, which commits."""
        ...


class Processes(Rank, Protocol):
    """A group of processes that run the same program on one run directory.

    All but `channel` are collectives, and raise `WorkerLostError` if a process is gone.
    """

    def barrier(self) -> None:
        """Wait until every process has called this."""
        ...

    def broadcast(self, data: bytes | None) -> bytes:
        """The bytes that process 0 passed, in every process; the others pass None."""
        ...

    def gather(self, data: bytes) -> list[bytes]:
        """The bytes of each process, by number, in every process; `agree` sends less."""
        ...

    def agree(self, data: bytes, decide: Callable[[list[bytes]], bytes]) -> bytes:
        """In every process what `decide` makes of the bytes of all; it raises nothing."""
        ...

    def collect(self, data: bytes) -> list[bytes]:
        """In process 0 the bytes of each process, in order; the others get [] and wait for nobody."""
        ...

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true in at least one process, in every process."""
        ...

    def channel(self, name: str) -> Processes:
        """The same group, on a channel of its own for each name. Not a collective."""
        ...


class ByAgreement:
    """The collectives of a group that one agreement makes."""

    def agree(self, data: bytes, decide: Callable[[list[bytes]], bytes]) -> bytes:
        """See `Processes`."""
        raise NotImplementedError

    def barrier(self) -> None:
        self.agree(b"", lambda _: b"")

    def gather(self, data: bytes) -> list[bytes]:
        return msgspec.msgpack.decode(self.agree(data, msgspec.msgpack.encode), type=list[bytes])

    def any(self, flag: bool) -> bool:
        return self.agree(b"\1" if flag else b"\0", max) == b"\1"


class SingleProcess(ByAgreement):
    """A group of one."""

    index = 0
    count = 1
    is_chief = True

    def broadcast(self, data: bytes | None) -> bytes:
        return require_bytes(data)

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def agree(self, data: bytes, decide: Callable[[list[bytes]], bytes]) -> bytes:
        return decide([data])

    def collect(self, data: bytes) -> list[bytes]:
        return [data]

    def channel(self, name: str) -> SingleProcess:
        return self


def gather_values(processes: Processes, value: Any) -> list[Any]:
    """The values of all processes, in every process: numbers, texts, bytes, lists and dicts."""
    texts = processes.gather(msgspec.msgpack.encode(value))
    return [msgspec.msgpack.decode(text) for text in texts]


def require_bytes(data: bytes | None) -> bytes:
    """`data`, which process 0 passes to `broadcast`; raises `TypeError` if it is None."""
    if data is None:
        raise TypeError("broadcast: expected bytes from process 0, found None")
    return data


def group_of(processes: Processes | None) -> Processes:
    """`processes`, or a group of one; raises `ArgumentError` that names the methods that it lacks."""
    if processes is None:
        return SingleProcess()
    kind = type(processes)
    missing = [
        name
        for name, declared in {**vars(Rank), **vars(Processes)}.items()
        if not name.startswith("_")
        and (not hasattr(processes, name) or getattr(kind, name, None) is declared)
    ]
    if missing:
        raise ArgumentError(
            f"processes: expected a group with all members of perdure.checkpoint.Processes, found a "
            f"{kind.__name__} without {', '.join(missing)}. Implement them as that class describes."
        )
    return processes


@dataclass(frozen=True)
class FrameworkGroup:
    """This process is number `index` of `count`, according to `engine` ("jax" or "torch").

    `address` is the host:port of the group's rendezvous; None if the framework does not know it.
    """

    engine: str
    index: int
    count: int
    address: str | None

    @property
    def source(self) -> str:
        """The module of the framework that initialized the group."""
        return f"{self.engine}.distributed"


def framework_group(engine: str | None = None) -> FrameworkGroup | None:
    """The group that the program has initialized (the larger of two); None for none."""
    groups = [
        group
        for name, find in (("jax", _jax_group), ("torch", _torch_group))
        if engine in (None, name) and name in sys.modules and (group := find()) is not None
    ]
    return max(groups, key=lambda group: group.count, default=None)


def innermost_store(store: Any) -> Any:
    """The store of a torch process group without its wrappers. It may have a `host` and a `port`."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _jax_group() -> FrameworkGroup | None:
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    # `jax.process_count()` would initialize the devices.
    if state is None or state.client is None:
        return None
    address = getattr(state, "coordinator_address", None)
    return FrameworkGroup("jax", state.process_id or 0, state.num_processes or 1, address)


def _torch_group() -> FrameworkGroup | None:
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    store = innermost_store(dist.distributed_c10d._get_default_store())
    host = getattr(store, "host", None)  # a file store has none
    address = None if host is None else f"{host}:{store.port}"
    return FrameworkGroup("torch", dist.get_rank(), dist.get_world_size(), address)
