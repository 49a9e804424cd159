"""`Processes`: the interface to the other processes of a group.

Invariant: every process of the group calls the same operations of one channel in the same order, from
one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from perdure.errors import ArgumentError


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
        """The bytes of each process in the order of their numbers, in every process; `agree` sends
        less.
        """
        ...

    def agree(self, data: bytes, decide: Callable[[list[bytes]], bytes]) -> bytes:
        """In every process what `decide`, which raises nothing, makes in process 0 of the bytes of
        all.
        """
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
        return given(data)

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


def given(data: bytes | None) -> bytes:
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
