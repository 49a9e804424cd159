"""Every storage of perdure keeps the contracts of `perdure.store.Storage`."""

from __future__ import annotations

from pathlib import Path

import pytest

from object_stores import ObjectServer
from perdure.store import CloudStorage, LocalStorage, MemoryStorage, Storage
from perdure.testing import StorageConformance


class TestLocal(StorageConformance):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path / "run")

    def raw_read(self, storage: Storage, name: str) -> bytes | None:
        path = Path(storage.where) / name
        return path.read_bytes() if path.exists() else None

    def raw_write(self, storage: Storage, name: str, data: bytes) -> None:
        path = Path(storage.where) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def raw_names(self, storage: Storage) -> set[str]:
        root = Path(storage.where)
        return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}

    def another(self, storage: Storage) -> Storage:
        return LocalStorage(storage.where)


class TestMemory(StorageConformance):
    @pytest.fixture
    def storage(self) -> Storage:
        return MemoryStorage()

    def raw_read(self, storage: Storage, name: str) -> bytes | None:
        assert isinstance(storage, MemoryStorage)
        return storage.objects.get(name)

    def raw_write(self, storage: Storage, name: str, data: bytes) -> None:
        assert isinstance(storage, MemoryStorage)
        storage.objects[name] = data

    def raw_names(self, storage: Storage) -> set[str]:
        assert isinstance(storage, MemoryStorage)
        return set(storage.objects)


class ObjectStoreConformance(StorageConformance):
    """An object store on a server, which a subclass names."""

    server: ObjectServer

    @pytest.fixture
    def storage(self) -> Storage:
        return self.server.storage(self.server.new_url())

    def raw_read(self, storage: Storage, name: str) -> bytes | None:
        return self.server.read(storage.where, name)

    def raw_write(self, storage: Storage, name: str, data: bytes) -> None:
        self.server.write(storage.where, name, data)

    def raw_names(self, storage: Storage) -> set[str]:
        return self.server.names(storage.where)

    def another(self, storage: Storage) -> Storage:
        assert isinstance(storage, CloudStorage)
        return self.server.storage(storage.where)


class TestS3(ObjectStoreConformance):
    @pytest.fixture(autouse=True)
    def _served(self, s3: ObjectServer) -> None:
        self.server = s3


class TestAzure(ObjectStoreConformance):
    @pytest.fixture(autouse=True)
    def _served(self, azure: ObjectServer) -> None:
        self.server = azure
