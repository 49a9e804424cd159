"""Which lines of a log are the journal of a run: lines of steps that no rollback has set aside."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from perdure.store.manifest import Manifest

StepRange = tuple[int, int]
"""The first and the last step of some lines."""


class ReturningLines(NamedTuple):
    """What undoing a rollback does: the `cuts` undone, the range of `steps`, what is `replaced`."""

    cuts: tuple[int, ...]
    steps: StepRange
    replaced: StepRange | None


@dataclass
class _Lines:
    """Lines of growing steps, by number, after line `before`; the run went back to `cut_to`."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    numbers: array[int] = field(default_factory=lambda: array("q"))
    before: int = 0
    cut_to: int = -1

    @property
    def last(self) -> tuple[int, int]:
        """The last step and its number."""
        return (self.steps[-1], self.numbers[-1]) if self.steps else (-1, 0)


class JournalLines:
    """The lines of the steps of a run, and the lines that rollbacks set aside."""

    def __init__(self) -> None:
        self._kept = _Lines()
        self._cuts: dict[int, _Lines] = {}
        """By the number of the line that set them aside."""

    @property
    def newest_step(self) -> int:
        """The newest step that has a line; -1 for none."""
        return self._kept.last[0]

    def add(self, step: int, number: int) -> None:
        """Add the line `number`, of a step that is above `newest_step`."""
        self._kept.steps.append(step)
        self._kept.numbers.append(number)

    def cut(self, step: int, number: int) -> None:
        """Set the lines after `step` aside, by the line `number`."""
        steps, numbers = self._kept.steps, self._kept.numbers
        start = bisect_right(steps, step)
        if start < len(steps):
            before = numbers[start - 1] if start else 0
            self._cuts[number] = _Lines(steps[start:], numbers[start:], before, step)
            del steps[start:], numbers[start:]

    def bring_back(self, cuts: Sequence[int], step: int, number: int) -> None:
        """Bring back what `cuts` set aside; others after `step` are set aside by the line `number`."""
        returning = [self._cuts.pop(cut) for cut in cuts if cut in self._cuts]
        self.cut(step, number)
        for lines in returning:
            self._kept.steps += lines.steps
            self._kept.numbers += lines.numbers

    def drop_cuts(self) -> None:
        """Forget the lines that were set aside."""
        self._cuts.clear()

    def numbers(self, first: int) -> array[int]:
        """The numbers of the lines of steps from `first` on."""
        return self._kept.numbers[bisect_right(self._kept.steps, first - 1) :]

    def steps_after(self, step: int) -> StepRange | None:
        """The first and the last step after `step` that have a line; None for none."""
        later = self._kept.steps[bisect_right(self._kept.steps, step) :]
        return (later[0], later[-1]) if later else None

    def steps_aside(self) -> list[StepRange]:
        """The steps of the lines that rollbacks have set aside."""
        return [(lines.steps[0], lines.steps[-1]) for lines in self._cuts.values()]

    def returning(self, before: int, checkpoints: Sequence[Manifest]) -> ReturningLines | None:
        """The lines that rollbacks set aside and that continue the journal; None for none.

        Of several, those return that the next of `checkpoints` was saved after, or else the last.
        """
        kept = bisect_right(self._kept.steps, before)
        newest, number = (
            (self._kept.steps[kept - 1], self._kept.numbers[kept - 1]) if kept else (-1, 0)
        )
        after = checkpoints[-1].step if checkpoints else before
        chosen: dict[int, _Lines] = {}
        while True:
            for cut, lines in reversed(self._cuts.items()):
                fits = lines.before == number and max(before, newest) <= lines.cut_to <= after
                if cut not in chosen and fits and _was_there(cut, lines, checkpoints):
                    break
            else:
                break
            chosen[cut] = lines
            newest, number = lines.last
        if not chosen:
            return None
        first = next(iter(chosen.values()))
        return ReturningLines((*chosen,), (first.steps[0], newest), self.steps_after(before))


def _was_there(cut: int, lines: _Lines, checkpoints: Sequence[Manifest]) -> bool:
    """Whether lines are of the history of the next checkpoint: it was saved after they were recorded,
    and before they were set aside."""
    following = next((each for each in checkpoints if each.step > lines.cut_to), None)
    if following is None or following.log is None:
        return True
    count = bisect_right(lines.steps, following.step)
    return not count or lines.numbers[count - 1] <= following.log.number < cut
