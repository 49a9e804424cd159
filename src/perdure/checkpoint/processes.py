"""The seam to the other processes of a group, as far as checkpoints need it."""

from __future__ import annotations

from typing import Protocol


class Processes(Protocol):
    """A group of processes that run the same program on one run directory."""

    @property
    def index(self) -> int:
        """Number of this process; 0 is the chief, which writes."""
        ...

    @property
    def count(self) -> int:
        """How many processes there are."""
        ...

    def barrier(self) -> None:
        """Return once every process has called this."""

    def broadcast(self, data: bytes | None) -> bytes:
        """Bytes of process 0, in every process."""
        ...

    def any(self, flag: bool) -> bool:
        """True in every process when it is true in one."""
        ...


class SingleProcess:
    """A group of one."""

    index = 0
    count = 1

    def barrier(self) -> None:
        return None

    def broadcast(self, data: bytes | None) -> bytes:
        assert data is not None
        return data

    def any(self, flag: bool) -> bool:
        return flag
