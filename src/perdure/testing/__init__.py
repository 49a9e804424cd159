"""For tests of what builds on perdure: the drill, a conformance suite for storages, a check of a run.

Needs pytest. `perdure.testing.servers` starts object stores on loopback, `perdure.testing.proxy`
stands between one of them and its client and fails chosen requests.
"""

import pytest

pytest.register_assert_rewrite("perdure.testing.conformance")

from perdure.testing.conformance import StorageConformance  # noqa: E402 (rewriting comes first)
from perdure.testing.drilling import drill  # noqa: E402
from perdure.testing.runs import check_run  # noqa: E402

__all__ = ["StorageConformance", "check_run", "drill"]
