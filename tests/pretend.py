"""A group of processes that is played by threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

LIMIT_S = 60


class World:
    """What the processes of a group share: for each channel a place for values, and a barrier."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._values: dict[str, list[bytes]] = {}
        self.barriers: dict[str, threading.Barrier] = {}
        self._guard = threading.Lock()

    def values(self, channel: str) -> list[bytes]:
        """One list for a channel, whoever comes to it first."""
        with self._guard:
            return self._values.setdefault(channel, [b""] * self.count)

    def meet(self, channel: str) -> None:
        with self._guard:
            barrier = self.barriers.setdefault(channel, threading.Barrier(self.count))
        barrier.wait(LIMIT_S)


class Pretend:
    """A process of a group; values meet at a barrier."""

    def __init__(self, index: int, world: World, channel: str = "main") -> None:
        self.index, self.count = index, world.count
        self.is_chief = index == 0
        self._world, self._channel = world, channel

    def barrier(self) -> None:
        self._world.meet(self._channel)

    def gather(self, data: bytes) -> list[bytes]:
        values = self._world.values(self._channel)
        values[self.index] = data
        self.barrier()
        gathered = list(values)
        self.barrier()
        return gathered

    def agree(self, data: bytes, decide: Callable[[list[bytes]], bytes]) -> bytes:
        return decide(self.gather(data))

    def collect(self, data: bytes) -> list[bytes]:
        gathered = self.gather(data)
        return gathered if self.is_chief else []

    def broadcast(self, data: bytes | None) -> bytes:
        return self.gather(data or b"")[0]

    def any(self, flag: bool) -> bool:
        return b"yes" in self.gather(b"yes" if flag else b"no")

    def channel(self, name: str) -> Pretend:
        return Pretend(self.index, self._world, f"{self._channel}/{name}")


def play(count: int, program: Callable[[Pretend], Any]) -> list[Any]:
    """What `program` returns or raises in each of `count` processes."""
    world = World(count)

    def run(index: int) -> Any:
        try:
            return program(Pretend(index, world))
        except Exception as error:  # noqa: BLE001 (the test looks at it)
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))
