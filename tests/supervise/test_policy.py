"""What follows an attempt, and what a summary says: functions of what happened."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perdure.supervise.attempts_log import AttemptRecord, Kind, RunHistory
from perdure.supervise.policy import cannot_come_back, decide


def attempt(
    kind: Kind,
    start: int | None = 0,
    end: int | None = None,
    place: int = 0,
    seconds: float = 100.0,
    alive: bool | None = None,
) -> AttemptRecord:
    """One that began at `start` and, where `end` is beyond it, got there in a second a step.

    `alive` is for one whose first to fail had done no step while others did.
    """
    stepped = start is not None and end is not None and end > start
    return AttemptRecord(
        number=1,
        workers=1,
        kind=kind,
        cause=kind,
        place=place,
        statuses=(1,),
        start=start,
        end=end if stepped else start,
        began=0.0,
        first_time=10.0 if stepped else None,
        last_time=10.0 + (end or 0) - (start or 0) - 1 if stepped else None,
        noticed=5.0,
        seconds=seconds,
        last_step=end if stepped and alive is not False else start,
        made_progress=stepped if alive is None else alive,
        last_line="no room",
        first_step=start + 1 if stepped and start is not None else None,
    )


@pytest.mark.parametrize(
    ("history", "again", "wait"),
    [
        ([attempt("done", 0, 9)], False, 0),
        ([attempt("preempted", 0, 9)], True, 0),
        ([attempt("failed", 0, 9)], True, 0),
        ([attempt("failed", 0, None)], False, 0),
        ([attempt("killed", 0, None)], True, 0),
        ([attempt("port", 0, None)], True, 0),
        ([attempt("failed", 0, 9), attempt("failed", 5, None)], True, 0),
        ([attempt("failed", 0, 9), attempt("failed", 5, 9)], True, 0),
        ([attempt("failed", 0, 9), attempt("failed", 5, 9), attempt("failed", 5, 9)], False, 0),
        ([attempt("failed", 0, 9), attempt("failed", 5, 8), attempt("failed", 5, 7)], True, 1),
        ([attempt("failed", 0, 9), *[attempt("killed", 5)] * 3], True, 2),
        ([attempt("failed", 0, 9), *[attempt("failed", 5)] * 3], False, 0),
        ([*[attempt("preempted", 0)] * 9], True, 30),
        ([*[attempt("preempted", 0, seconds=3)] * 4], True, 4),
        ([*[attempt("preempted", 0, seconds=3)] * 5], False, 0),
        ([*[attempt("killed", None, seconds=3)] * 5], False, 0),
        ([attempt("killed", 0, end, seconds=3) for end in range(5, 10)], True, 0),
        ([*[attempt("killed", None, seconds=60)] * 9], True, 0),
        ([attempt("killed", None, seconds=60), *[attempt("killed", None, seconds=3)] * 3], True, 2),
        ([attempt("failed", 0, 9)] * 2 + [attempt("failed", 5, 12)], True, 0),
    ],
)
def test_what_follows(history: list[AttemptRecord], again: bool, wait: float) -> None:
    decision = decide(history, max_restarts=100)
    assert (decision.again, decision.wait) == (again, wait)


def test_a_smaller_group_may_do_what_a_broken_one_cannot() -> None:
    history = [attempt("failed", 0, None, place=2)] * 2
    assert not decide(history, 100).again
    assert decide(history, 100, may_shrink=True).again
    assert cannot_come_back(history) == 2
    assert cannot_come_back([history[0], attempt("failed", 0, None, place=1)]) is None


def test_what_the_others_did_does_not_hide_a_worker_that_never_did_a_step() -> None:
    history = [attempt("failed", 0, end, place=1, alive=False) for end in (7, 9, 8)]
    assert cannot_come_back(history[:2]) == 1
    assert decide(history[:2], 100, may_shrink=True).again
    assert decide(history[:2], 100).again
    stopped = decide(history, 100)
    assert not stopped.again
    assert (
        stopped.reason == "it failed 3 times in a row at step 0 (last: failed (last line: no room))"
    )
    assert cannot_come_back([history[0], attempt("failed", 0, 5, place=2)]) is None


def run_of(*attempts: AttemptRecord, seconds: float) -> RunHistory:
    return RunHistory(attempts=[*attempts], end={"seconds": seconds})


def test_sums_are_made_from_the_steps_that_stand() -> None:
    attempts = (attempt("killed", 0, 20), attempt("hung", 10), attempt("done", 10, 60))
    summary = run_of(*attempts, seconds=200.0)
    assert summary.repeated == (10, 0, 0)
    assert summary.recovery == (None, None, 5.0)
    assert summary.step_seconds == 1.0
    assert summary.useful == 60.0
    assert summary.goodput == 0.3
    document = summary.document()
    assert (document["restarts"], document["failures"], document["lost_seconds"]) == (2, 2, 140.0)


def test_a_heartbeat_every_ten_steps_tells_of_the_time_of_ten() -> None:
    """Steps of one second: the first ten end at 10.0, and twenty more follow in the attempt."""
    seldom = replace(attempt("done", 0, 30), first_step=10, last_time=30.0)
    assert run_of(seldom, seconds=60.0).step_seconds == 1.0


def test_without_heartbeats_there_is_no_goodput() -> None:
    summary = run_of(attempt("done", None), seconds=5.0)
    assert summary.goodput is summary.useful is None
    assert summary.document()["lost_seconds"] is None
