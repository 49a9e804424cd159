"""Object stores for the tests of the store: one server of each kind for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from perdure.testing.servers import ObjectServer, ServerUnavailable, azurite_server, moto_server


@pytest.fixture(scope="session")
def s3() -> Iterator[ObjectServer]:
    """S3 as moto speaks it; moto is a test dependency, so that it is never left out."""
    with moto_server() as server:
        yield server


@pytest.fixture(scope="session")
def azure() -> Iterator[ObjectServer]:
    """Azure as Azurite speaks it, where that is installed."""
    try:
        with azurite_server() as server:
            yield server
    except ServerUnavailable as reason:
        pytest.skip(str(reason))
