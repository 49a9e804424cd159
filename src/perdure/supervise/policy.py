"""Decides what follows an attempt: another one, after a wait, or the end. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perdure.supervise.history import AttemptRecord
from perdure.text import counted

SAME_STEP = 3
# Attempts in a row without progress, each of them shorter than SHORT_S.
NO_PROGRESS = 5
SHORT_S = 60.0
LONGEST_WAIT_S = 30.0
LONGEST_FULL_WAIT_S = 300.0  # for a full disk, which somebody has to empty


@dataclass(frozen=True)
class Decision:
    """Restart after `wait` seconds, or stop with `status`, for the `reason`."""

    again: bool
    wait: float = 0.0
    status: int = 0
    reason: str = ""


def decide(
    history: Sequence[AttemptRecord], max_restarts: int, may_shrink: bool = False
) -> Decision:
    """What follows the last attempt of `history`.

    Args:
        history: All attempts so far.
        max_restarts: How many failures may be followed by a restart.
        may_shrink: Whether a smaller group may be tried.
    """
    last = history[-1]
    if last.kind == "done":
        return Decision(False, status=0, reason="finished")
    if last.kind == "refused":
        return Decision(False, status=1, reason=last.cause)
    if not last.failure:
        return _no_progress(history) or Decision(True, _wait(history))
    failures = sum(attempt.failure for attempt in history)
    if last.kind == "full" and failures <= max_restarts:
        return Decision(True, _wait_for_space(history), reason="a disk is full")
    if last.kind == "failed" and not may_shrink and not any(attempt.stepped for attempt in history):
        silent = (
            f"; in {last.seconds:.1f} s it gave no heartbeat of a step, so a later failure looks the "
            "same: call perdure.heartbeat(step) in a training loop of your own"
        )
        return Decision(
            False,
            status=1,
            reason=f"the program failed before its first step ({last.explanation}), so it was "
            f"not restarted{silent if all(a.start is None for a in history) else ''}",
        )
    if _same_step(history) and not (may_shrink and not last.made_progress):
        step = last.last_step
        where = "before its first step" if step is None else f"at step {step}"
        return Decision(
            False,
            status=1,
            reason=f"it failed {SAME_STEP} times in a row {where} (last: {last.explanation})",
        )
    if stop := _no_progress(history):
        return stop
    if failures > max_restarts:
        return Decision(
            False,
            status=1,
            reason=f"{_too_many(failures, max_restarts)} (last: {last.explanation})",
        )
    return Decision(True, _wait(history))


def decide_exclusion(
    history: Sequence[AttemptRecord], max_restarts: int, places: int, changes_group: bool
) -> Decision:
    """What follows an attempt in which a device was found to compute wrong numbers.

    Args:
        history: All attempts so far.
        max_restarts: How many failures may be followed by a restart.
        places: For how many workers there are devices left.
        changes_group: Whether a worker is lost of a group on several machines.
    """
    found = history[-1].cause
    if not places:
        return Decision(False, status=1, reason=f"no device is left ({found})")
    if changes_group:
        return Decision(
            False,
            status=1,
            reason=f"the number of workers cannot change on several machines ({found})",
        )
    failures = sum(attempt.failure for attempt in history)
    if failures > max_restarts:
        return Decision(False, status=1, reason=_too_many(failures, max_restarts))
    return Decision(True)


def _too_many(failures: int, restarts: int) -> str:
    allowed = f"{counted(restarts, 'restart')} {'is' if restarts == 1 else 'are'} allowed"
    return f"{counted(failures, 'failure')}, and {allowed}"


def cannot_come_back(history: Sequence[AttemptRecord]) -> int | None:
    """The place whose worker failed twice in a row before it finished a step."""
    recent = [a for a in history[-2:] if a.kind != "full"]
    places = [a.place for a in recent if a.failure and not a.made_progress]
    return places[0] if len(places) == 2 and places[0] == places[1] else None


def _same_step(history: Sequence[AttemptRecord]) -> bool:
    recent = history[-SAME_STEP:]
    if len(recent) < SAME_STEP or not all(attempt.failure for attempt in recent):
        return False
    if any(attempt.kind == "full" for attempt in recent):
        return False
    # A kill from outside before the first step shows nothing about the program.
    if any(attempt.kind == "killed" and not attempt.stepped for attempt in recent):
        return False
    return len({attempt.last_step for attempt in recent}) == 1


def _no_progress(history: Sequence[AttemptRecord]) -> Decision | None:
    """Stop if the last attempts were short and made no progress."""
    recent = history[-NO_PROGRESS:]
    fruitless = [a for a in recent if not a.stepped and a.seconds < SHORT_S]
    if len(fruitless) < NO_PROGRESS or any(
        a.kind in ("resized", "port", "full") for a in fruitless
    ):
        return None
    return Decision(
        False,
        status=1,
        reason=f"{NO_PROGRESS} attempts in a row ended within {SHORT_S:g} s and before a step was done "
        f"(last: {fruitless[-1].explanation}), so it was not restarted",
    )


def _wait(history: Sequence[AttemptRecord]) -> float:
    """No wait while there is progress; without progress 0, 1, 2, 4, ... seconds.

    A program that reports no steps, such as a loop without perdure, has made progress if its attempt
    was not short.
    """
    fruitless = 0
    for place, attempt in enumerate(reversed(history)):
        if attempt.start is None and not attempt.stepped and attempt.seconds >= SHORT_S:
            break
        earlier = [a.end for a in history[: len(history) - 1 - place] if a.end is not None]
        if attempt.stepped and (not earlier or (attempt.end or 0) > max(earlier)):
            break
        fruitless += 1
    return 0.0 if fruitless < 2 else min(LONGEST_WAIT_S, 2.0 ** (fruitless - 2))


def _wait_for_space(history: Sequence[AttemptRecord]) -> float:
    """1, 2, 4, ... seconds while attempt after attempt finds the disk full."""
    full = 0
    for attempt in reversed(history):
        if attempt.kind != "full":
            break
        full += 1
    return min(LONGEST_FULL_WAIT_S, 2.0 ** (full - 1))
