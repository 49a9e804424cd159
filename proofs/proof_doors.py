"""The plug-ins in the trainers that they are for: kill, resume, compare the bits, with controls.

Runs the tests of `tests/plugins`, none of which may be skipped here, and then restores sharded states
on other meshes; about fifteen minutes on two cores. Run by `make proof-doors`; ARGS='-k lightning'
picks tests, as for pytest, and ARGS=--meshes runs only the meshes.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import doors_meshes
import pytest
from report import finish

TESTS = Path(__file__).parent.parent / "tests" / "plugins"


class Counts:
    """How many tests passed, failed and were skipped."""

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] = self.outcomes.get(report.outcome, 0) + 1

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome != "passed":
            self.outcomes[report.outcome] = self.outcomes.get(report.outcome, 0) + 1


def main() -> int:
    if "--meshes" in sys.argv:
        finish("doors-meshes", doors_meshes.rows())
    for name in ("torch", "transformers", "accelerate", "lightning"):
        print(f"{name} {metadata.version(name)}")
    counts = Counts()
    status = pytest.main(
        [str(TESTS), "-p", "no:cacheprovider", "-o", "faulthandler_timeout=0", *sys.argv[1:]],
        plugins=[counts],
    )
    print(counts.outcomes)
    is_proof = status == 0 and counts.outcomes.keys() == {"passed"}
    print("PASS" if is_proof else "FAIL: a test failed or was skipped")
    if is_proof and not sys.argv[1:]:
        finish("doors-meshes", doors_meshes.rows())
    return 0 if is_proof else 1


if __name__ == "__main__":
    sys.exit(main())
