"""Where the tests of the store write: a directory, memory, or an object store of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from object_stores import ObjectServer, ServerUnavailable, azurite_server
from perdure.store import MemoryStorage


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | MemoryStorage:
    """Where a new run is made: a directory, or memory."""
    return tmp_path / "run" if request.param == "local" else MemoryStorage()


@pytest.fixture(scope="session")
def azure() -> Iterator[ObjectServer]:
    """Azure as Azurite speaks it, where that is installed."""
    try:
        with azurite_server() as server:
            yield server
    except ServerUnavailable as reason:
        pytest.skip(str(reason))
