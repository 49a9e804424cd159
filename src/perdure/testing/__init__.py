"""For tests of programs that build on perdure.

`drill` proves exact resume and `check_run` verifies a run directory, under any test runner;
`StorageConformance` tests a storage and needs pytest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from perdure.errors import MissingExtraError
from perdure.testing.drilling import drill
from perdure.testing.runs import check_run

if TYPE_CHECKING:
    from perdure.testing.conformance import StorageConformance

__all__ = ["StorageConformance", "check_run", "drill"]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name == "StorageConformance":
        try:
            import pytest  # the conformance tests alone need it
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                f"{error.name} is not installed. StorageConformance is a suite of tests for it: "
                f"pip install pytest.",
                name=error.name,
            ) from error
        pytest.register_assert_rewrite("perdure.testing.conformance")
        return import_module("perdure.testing.conformance").StorageConformance
    raise AttributeError(f"module 'perdure.testing' has no attribute {name!r}")
