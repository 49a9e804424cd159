"""A run directory in memory: the reference implementation, for tests and short-lived runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from perdure.store.storage import Sink, Storage


class _MemorySink(Sink):
    def __init__(self, storage: MemoryStorage, name: str) -> None:
        self._storage = storage
        self._name = name
        self._data = bytearray()

    def write(self, data: memoryview) -> None:
        self._data += data

    def commit(self) -> None:
        with self._storage.mutex:
            if self._name in self._storage.objects:
                raise FileExistsError(17, "exists already", self._name)
            self._storage.objects[self._name] = bytes(self._data)

    def abort(self) -> None:
        self._data.clear()


class MemoryStorage(Storage):
    """Keeps every object in the dict `objects`. Nothing survives the process."""

    def __init__(self) -> None:
        self.where = "memory:"
        self.objects: dict[str, bytes] = {}
        self.mutex = threading.Lock()
        self._locks: dict[str, bytes] = {}

    def create(self, name: str, size: int) -> _MemorySink:
        return _MemorySink(self, name)

    def replace(self, name: str, data: bytes) -> None:
        with self.mutex:
            self.objects[name] = bytes(data)

    def read(self, name: str) -> bytes:
        try:
            return self.objects[name]
        except KeyError:
            raise FileNotFoundError(2, "no such object", name) from None

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        part = self.read(name)[offset : offset + len(target)]
        target[: len(part)] = part
        return len(part)

    def size(self, name: str) -> int:
        return len(self.read(name))

    def list(self, prefix: str) -> Iterator[str]:
        with self.mutex:
            return iter([name for name in self.objects if name.startswith(prefix)])

    def move(self, name: str, target: str) -> None:
        with self.mutex:
            if target in self.objects:
                raise FileExistsError(17, "exists already", target)
            if name not in self.objects:
                raise FileNotFoundError(2, "no such object", name)
            self.objects[target] = self.objects.pop(name)

    def delete(self, name: str) -> None:
        with self.mutex:
            self.objects.pop(name, None)

    @contextmanager
    def lock(self, name: str, owner: bytes) -> Iterator[None]:
        with self.mutex:
            if name in self._locks:
                raise BlockingIOError(11, self._locks[name].decode(), name)
            self._locks[name] = owner
        try:
            yield
        finally:
            with self.mutex:
                del self._locks[name]
