"""Decides what follows an attempt: another one, after a wait, or the end. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from perdure.supervise.attempts_log import AttemptRecord
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
    """What follows the last attempt of `history`."""
    last = history[-1]
    if last.kind == "done":
        return Decision(False, reason="finished")
    if last.kind == "refused":
        return _stop(last.cause)
    too_many = _too_many(history, max_restarts)
    if last.kind == "full" and too_many is None:
        return Decision(True, _wait_for_space(history), reason="a disk is full")
    if last.kind == "failed" and not may_shrink and not any(attempt.stepped for attempt in history):
        silent = (
            f"; in {last.seconds:.1f} s it gave no heartbeat of a step, so a later failure looks the "
            "same: call perdure.heartbeat(step) in a training loop of your own"
        )
        return _stop(
            f"the program failed before its first step ({last.explanation}), so it was not "
            f"restarted{silent if all(a.start is None for a in history) else ''}"
        )
    if last.failure and _same_step(history) and not (may_shrink and not last.made_progress):
        step = last.last_step
        where = "before its first step" if step is None else f"at step {step}"
        return _stop(f"it failed {SAME_STEP} times in a row {where} (last: {last.explanation})")
    if _no_progress(history):
        return _stop(
            f"{NO_PROGRESS} attempts in a row ended within {SHORT_S:g} s and before a step was done "
            f"(last: {last.explanation}), so it was not restarted"
        )
    if last.failure and too_many is not None:
        return _stop(f"{too_many} (last: {last.explanation})")
    return Decision(True, _wait(history))


def decide_exclusion(
    history: Sequence[AttemptRecord], max_restarts: int, slots: int, changes_group: bool
) -> Decision:
    """What follows an attempt in which a device computed wrong numbers; `slots` have devices left."""
    found = history[-1].cause
    if not slots:
        return _stop(f"no device is left ({found})")
    if changes_group:
        return _stop(f"the number of workers cannot change on several machines ({found})")
    too_many = _too_many(history, max_restarts)
    return Decision(True) if too_many is None else _stop(too_many)


def cannot_come_back(history: Sequence[AttemptRecord]) -> int | None:
    """The slot whose worker failed twice in a row before it finished a step."""
    slots = [
        attempt.place
        for attempt in history[-2:]
        if attempt.failure and attempt.kind != "full" and not attempt.made_progress
    ]
    return slots[0] if len(slots) == 2 and slots[0] == slots[1] else None


def _stop(reason: str) -> Decision:
    return Decision(False, status=1, reason=reason)


def _too_many(history: Sequence[AttemptRecord], restarts: int) -> str | None:
    """That there were more failures than restarts are allowed; None if not."""
    failures = sum(attempt.failure for attempt in history)
    if failures <= restarts:
        return None
    allowed = f"{counted(restarts, 'restart')} {'is' if restarts == 1 else 'are'} allowed"
    return f"{counted(failures, 'failure')}, and {allowed}"


def _same_step(history: Sequence[AttemptRecord]) -> bool:
    recent = history[-SAME_STEP:]
    # A kill from outside before the first step, or a full disk, shows nothing about the program.
    tell = all(
        attempt.failure and attempt.kind != "full" and (attempt.stepped or attempt.kind != "killed")
        for attempt in recent
    )
    return len(recent) == SAME_STEP and tell and len({each.last_step for each in recent}) == 1


def _no_progress(history: Sequence[AttemptRecord]) -> bool:
    """Whether the last attempts were short and finished no step, and nothing else explains that."""
    recent = history[-NO_PROGRESS:]
    return len(recent) == NO_PROGRESS and all(
        not attempt.stepped
        and attempt.seconds < SHORT_S
        and attempt.kind not in ("resized", "port", "full")
        for attempt in recent
    )


def _wait(history: Sequence[AttemptRecord]) -> float:
    """No wait while there is progress; without progress 0, 1, 2, 4, ... seconds.

    A program that reports no steps has made progress if its attempt was not short.
    """
    fruitless, best = 0, -1
    for attempt in history:
        is_long = attempt.start is None and not attempt.stepped and attempt.seconds >= SHORT_S
        has_progress = attempt.stepped and (best < 0 or (attempt.end or 0) > best)
        fruitless = 0 if is_long or has_progress else fruitless + 1
        best = max(best, -1 if attempt.end is None else attempt.end)
    return 0.0 if fruitless < 2 else min(LONGEST_WAIT_S, 2.0 ** (fruitless - 2))


def _wait_for_space(history: Sequence[AttemptRecord]) -> float:
    """1, 2, 4, ... seconds while attempt after attempt finds the disk full."""
    full = takewhile(lambda attempt: attempt.kind == "full", reversed(history))
    return min(LONGEST_FULL_WAIT_S, 2.0 ** (len([*full]) - 1))
