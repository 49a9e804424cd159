"""The advice of `perdure bisect` about a run that has other bits than its program computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure import CheckpointManager, ManagerOptions
from perdure.drill.replay import StretchResult
from perdure.drill.step_bisect import PartDifference, ReplayedRun, likely_cause
from perdure.store.format import span_text


@pytest.mark.parametrize("start", [None, 5])
def test_only_a_checkpoint_that_is_there_is_advised(start: int | None) -> None:
    wrong = StretchResult(start, 6, "differs", step=6, what="state", expected="a", found="b")
    runs = ReplayedRun("a", 1, None, wrong), ReplayedRun("b", 1, None, StretchResult(start, 6))
    found = likely_cause(6, runs, None)
    assert found.what == "a run has recorded other bits than its program computes"
    ways = [text for text in found.advice.split(". ") if "rollback" in text]
    expected = "Continue from the checkpoint before this step: perdure rollback a@5."
    assert ways == ([] if start is None else [expected])


@pytest.mark.parametrize(
    ("takes", "cause"), [(0, "data position"), (7, "other position"), (50, "other data")]
)
def test_the_data_start_again_only_with_their_first_batch(
    takes: int, cause: str, tmp_path: Path
) -> None:
    """A batch that was fetched ahead and lost gives the next one, and not the first."""
    for name in ("a", "b"):
        with CheckpointManager(tmp_path / name, options=ManagerOptions(journal_every=1)) as manager:
            for step in range(10):
                batch = takes if (name, step) == ("b", 6) else step
                manager.journal.record(step + 1, {"w": float(batch)}, batch)
    part = PartDifference("batch", None, (), 1, (), ("before",))
    runs = [ReplayedRun(str(tmp_path / name), 1, None, StretchResult(0, 7)) for name in "ab"]
    assert likely_cause(7, (runs[0], runs[1]), part).cause == cause


def test_one_step_is_no_span() -> None:
    assert [span_text(6, 6), span_text(6, 9)] == ["step 6", "steps 6 to 9"]
