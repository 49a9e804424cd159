"""The seam to the other processes of a group: barriers, broadcasts, votes.

Invariant: every process of the group calls the same operations of one channel in the same order, from
one thread at a time.
"""

from __future__ import annotations

from typing import Protocol


class Processes(Protocol):
    """A group of processes that run the same program on one run directory."""

    @property
    def index(self) -> int:
        """Number of this process."""
        ...

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    @property
    def is_chief(self) -> bool:
        """True in process 0, which writes."""
        ...

    def barrier(self) -> None:
        """Return once every process has called this."""
        ...

    def broadcast(self, data: bytes | None) -> bytes:
        """The bytes that process 0 passed, in every process."""
        ...

    def gather(self, data: bytes) -> list[bytes]:
        """The bytes of every process, by its number, in every process."""
        ...

    def any(self, flag: bool) -> bool:
        """True in every process when it is true in one."""
        ...

    def channel(self, name: str) -> Processes:
        """The same group, with operations that are independent of those of other channels."""
        ...


class SingleProcess:
    """A group of one."""

    index = 0
    count = 1
    is_chief = True

    def barrier(self) -> None:
        return None

    def broadcast(self, data: bytes | None) -> bytes:
        return given(data)

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def any(self, flag: bool) -> bool:
        return flag

    def channel(self, name: str) -> SingleProcess:
        return self


def given(data: bytes | None) -> bytes:
    """What process 0 broadcasts, which is never None there."""
    if data is None:
        raise TypeError("process 0 must pass the bytes that it broadcasts, got None")
    return data
