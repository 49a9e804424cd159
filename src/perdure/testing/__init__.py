"""For tests of programs that build on perdure; needs pytest.

`drill` proves exact resume, `check_run` verifies a run directory, and `StorageConformance` tests a
storage.
"""

import pytest

pytest.register_assert_rewrite("perdure.testing.conformance")

from perdure.testing.conformance import StorageConformance  # noqa: E402 (rewriting comes first)
from perdure.testing.drilling import drill  # noqa: E402
from perdure.testing.runs import check_run  # noqa: E402

__all__ = ["StorageConformance", "check_run", "drill"]
