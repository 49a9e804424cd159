from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output is that of a pipe, however wide the terminal is in which the tests run."""
    monkeypatch.delenv("COLUMNS", raising=False)
