"""The advice of `perdure bisect` about a run that has other bits than its program computes."""

from __future__ import annotations

import pytest

from perdure.drill.replay import StretchResult
from perdure.drill.step_causes import ReplayedRun, StepComparison, likely_cause
from perdure.store.format import span_text


@pytest.mark.parametrize("start", [None, 5])
def test_only_a_checkpoint_that_is_there_is_advised(start: int | None) -> None:
    wrong = StretchResult(start, 6, "differs", step=6, what="state", expected="a", found="b")
    runs = ReplayedRun("a", 1, None, wrong), ReplayedRun("b", 1, None, StretchResult(start, 6))
    found = likely_cause(StepComparison(6, runs, None, (), False, False, True))
    assert found.what == "a run has recorded other bits than its program computes"
    ways = [text for text in found.advice.split(". ") if "rollback" in text]
    expected = "Continue from the checkpoint before this step: perdure rollback a@5."
    assert ways == ([] if start is None else [expected])


def test_one_step_is_no_span() -> None:
    assert [span_text(6, 6), span_text(6, 9)] == ["step 6", "steps 6 to 9"]
