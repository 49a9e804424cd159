"""Barriers, broadcasts and votes of a group of processes, outside of the training step.

Every process of the group calls the same operations of one channel in the same order, from one thread
at a time.

The operations go through a key-value store in process 0 (JAX's coordination service, torch's
TCPStore), not through the devices' collectives. So a save in the background may wait for the others on
a channel of its own while the main thread runs steps; with collectives the two threads could call them
in different orders in different processes, and hang.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from perdure.errors import WorkerLostError
from perdure.process_group import given

# gRPC refuses messages above 4 MiB.
_PIECE = 2**20

LOST = (
    "Save nothing: the group is incomplete. Exit now, and restart the whole group from the last "
    "checkpoint"
)


class KeyValueStore(Protocol):
    """A store that all processes of a group reach."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, process: int) -> bytes:
        """Wait for the key, which `process` sets; raise WorkerLostError when it does not come."""
        ...

    def delete(self, key: str) -> None: ...


class KeyValueProcesses:
    """A group that communicates through a key-value store.

    `connect` opens a connection to the store. Each channel has its own, because a store's client may
    hold a lock while it waits.
    """

    def __init__(
        self, connect: Callable[[], KeyValueStore], index: int, count: int, channel: str = "main"
    ) -> None:
        self.index = index
        self.count = count
        self._connect = connect
        self._name = channel
        self._store = connect()
        self._round = 0
        self._channels: dict[str, KeyValueProcesses] = {}
        self._old: list[str] = []
        self._collected: list[str] = []

    @property
    def is_chief(self) -> bool:
        return self.index == 0

    def barrier(self) -> None:
        self.gather(b"")

    def gather(self, data: bytes) -> list[bytes]:
        self._round += 1
        written = self._write(f"{self.index}", data)
        values = [
            data if process == self.index else self._read(process) for process in range(self.count)
        ]
        # All processes have entered this round and left the one before, whose keys are now free. A
        # broadcast does not prove that, so its keys stay until the next gather.
        self._delete(self._old + self._collected)
        self._old, self._collected = written, []
        return values

    def collect(self, data: bytes) -> list[bytes]:
        self._round += 1
        if not self.is_chief:
            self._collected += self._write(f"{self.index}", data)
            return []
        values = [data, *(self._read(process) for process in range(1, self.count))]
        # All processes have entered this round, so that they have left those of earlier broadcasts.
        self._delete(self._old)
        self._old = []
        return values

    def broadcast(self, data: bytes | None) -> bytes:
        self._round += 1
        if not self.is_chief:
            value = self._read(0)
            # Process 0 has read what it collected before.
            self._delete(self._collected)
            self._collected = []
            return value
        self._old += self._write("0", given(data))
        return given(data)

    def any(self, flag: bool) -> bool:
        return b"\1" in self.gather(b"\1" if flag else b"\0")

    def channel(self, name: str) -> KeyValueProcesses:
        if name not in self._channels:
            self._channels[name] = KeyValueProcesses(
                self._connect, self.index, self.count, f"{self._name}/{name}"
            )
        return self._channels[name]

    def subgroup(self, members: Sequence[int]) -> KeyValueProcesses:
        """Some processes of this group, of which this is one, as a group of their own."""
        name = f"{self._name}/of-{'-'.join(map(str, members))}"
        return KeyValueProcesses(
            lambda: _MembersStore(self._connect(), members),
            members.index(self.index),
            len(members),
            name,
        )

    def _delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._store.delete(key)

    def _write(self, writer: str, data: bytes) -> list[str]:
        """Write the pieces first, then the key that readers wait for, which has their number."""
        base = f"perdure/{self._name}/{self._round}/{writer}"
        pieces = [data[i : i + _PIECE] for i in range(0, len(data), _PIECE)]
        if len(pieces) <= 1:
            self._store.set(base, b"\0" + data)
            return [base]
        for number, piece in enumerate(pieces):
            self._store.set(f"{base}/{number}", piece)
        self._store.set(base, b"\1" + str(len(pieces)).encode())
        return [base, *(f"{base}/{number}" for number in range(len(pieces)))]

    def _read(self, process: int) -> bytes:
        base = f"perdure/{self._name}/{self._round}/{process}"
        value = self._store.get(base, process)
        if value[:1] == b"\0":
            return value[1:]
        pieces = range(int(value[1:]))
        return b"".join(self._store.get(f"{base}/{number}", process) for number in pieces)


class _MembersStore:
    """A store whose waits are for processes by their number in a subgroup."""

    def __init__(self, store: KeyValueStore, members: Sequence[int]) -> None:
        self._store = store
        self._members = members
        self.set, self.delete = store.set, store.delete

    def get(self, key: str, process: int) -> bytes:
        return self._store.get(key, self._members[process])


def late(process: int, seconds: float) -> WorkerLostError:
    """The error for a process that did not join an operation of the group in time."""
    return WorkerLostError(
        f"process {process} did not come to this operation of the group within {seconds:g} s: it "
        f"hangs, is gone, or does not make the call that waits here. Every process of a group has to "
        f"make the same calls; a save under `if rank == 0` waits for the others. {LOST}"
    )


def lost(what: str, error: BaseException | None = None) -> WorkerLostError:
    """The error for an operation of the group that failed."""
    reason = f" ({str(error).strip().splitlines()[0]})" if error is not None and str(error) else ""
    return WorkerLostError(f"{what} failed: a process of the group is gone{reason}. {LOST}")
