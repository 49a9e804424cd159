"""The places to which the tests of the store write: a directory, memory, and object stores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from object_stores import ObjectServer, ServerUnavailable, azurite_server
from perdure.store import MemoryStorage


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | MemoryStorage:
    """The place of a new run: a directory, or memory."""
    return tmp_path / "run" if request.param == "local" else MemoryStorage()


@pytest.fixture(scope="session")
def azure() -> Iterator[ObjectServer]:
    """Azure as served by Azurite, if it is installed."""
    try:
        with azurite_server() as server:
            yield server
    except ServerUnavailable as reason:
        pytest.skip(str(reason))
