"""What follows an attempt: another one, after how long and with whom, or the end. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perdure.supervise.history import AttemptRecord

SAME_STEP = 3
# Starts in a row that came to nothing, each of them shorter than SHORT_S.
IN_VAIN = 5
SHORT_S = 60.0
LONGEST_WAIT_S = 30.0


@dataclass(frozen=True)
class Decision:
    """Go on after `wait` seconds, or stop with `status`; `reason` is for people."""

    again: bool
    wait: float = 0.0
    status: int = 0
    reason: str = ""


def decide(
    history: Sequence[AttemptRecord], max_restarts: int, may_shrink: bool = False
) -> Decision:
    """What follows the last of `history`. `may_shrink`: a smaller group may be tried."""
    last = history[-1]
    if last.kind == "done":
        return Decision(False, status=0, reason="finished")
    if not last.failure:
        return _in_vain(history) or Decision(True, _wait(history))
    failures = sum(each.failure for each in history)
    if last.kind == "failed" and not may_shrink and not any(each.stepped for each in history):
        silent = (
            f"; in {last.seconds:.1f} s it gave no heartbeat of a step, so a failure later on cannot "
            "be told from this: a loop of its own calls perdure.heartbeat(step)"
        )
        return Decision(
            False,
            status=1,
            reason=f"the program failed before its first step ({last.told}), so it was not "
            f"restarted{silent if all(each.start is None for each in history) else ''}",
        )
    if _same_step(history) and not (may_shrink and not last.alive):
        where = "before a step was done" if last.at is None else f"at step {last.at}"
        return Decision(
            False,
            status=1,
            reason=f"it failed {SAME_STEP} times in a row {where} (last: {last.told})",
        )
    if stopped := _in_vain(history):
        return stopped
    if failures > max_restarts:
        return Decision(
            False,
            status=1,
            reason=f"{failures} failures, and {max_restarts} restarts are allowed (last: "
            f"{last.told})",
        )
    return Decision(True, _wait(history))


def cannot_come_back(history: Sequence[AttemptRecord]) -> int | None:
    """The place whose worker failed twice in a row before it had done a step."""
    places = [each.place for each in history[-2:] if each.failure and not each.alive]
    return places[0] if len(places) == 2 and places[0] == places[1] else None


def _same_step(history: Sequence[AttemptRecord]) -> bool:
    found = history[-SAME_STEP:]
    if len(found) < SAME_STEP or not all(each.failure for each in found):
        return False
    # Killed from outside before its first step tells nothing about the program, unless it goes on.
    if any(each.kind == "killed" and not each.stepped for each in found):
        return False
    return len({each.at for each in found}) == 1


def _in_vain(history: Sequence[AttemptRecord]) -> Decision | None:
    """The end, where the last starts came to nothing and each was over at once."""
    found = history[-IN_VAIN:]
    vain = [each for each in found if not each.stepped and each.seconds < SHORT_S]
    if len(vain) < IN_VAIN or any(each.kind in ("resized", "port") for each in vain):
        return None
    return Decision(
        False,
        status=1,
        reason=f"{IN_VAIN} starts in a row ended within {SHORT_S:g} s and before a step was done "
        f"(last: {vain[-1].told}), so it was not started again",
    )


def _wait(history: Sequence[AttemptRecord]) -> float:
    """No wait as long as there is progress; then 1, 2, 4, ... seconds."""
    vain = 0
    for place, each in enumerate(reversed(history)):
        earlier = [a.end for a in history[: len(history) - 1 - place] if a.end is not None]
        if each.stepped and (not earlier or (each.end or 0) > max(earlier)):
            break
        vain += 1
    return 0.0 if vain < 2 else min(LONGEST_WAIT_S, 2.0 ** (vain - 2))
