"""What the lines of the log of a run directory say together.

Invariant: what is deleted, and what a rollback brings back, is not decided by a log that has a
`problem`: a damaged line, or a missing one to which a checkpoint refers.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from perdure.errors import CorruptionError
from perdure.store.failures import read_error
from perdure.store.format import PACKS, pack_step
from perdure.store.log import Line, LineReference, broken, log_place, read_log
from perdure.store.manifest import Manifest
from perdure.store.names import newest_step
from perdure.store.run_events import (
    Cut,
    Damaged,
    Dropped,
    Event,
    JournalEntry,
    Lost,
    Removed,
    Returned,
    RolledBack,
    Rules,
    Saved,
    SetAside,
    Started,
    decoder,
    entry_decoder,
)
from perdure.store.storage import Storage

LOG = "log"
LOG_FILE = f"{LOG}.jsonl"

REPAIR_ADVICE = (
    " Nothing is deleted, and nothing was changed now. Bring the file back from a copy, or let "
    "`perdure verify --repair` keep its good lines and set the file aside."
)
"""The end of every error about a damaged log."""

StepRange = tuple[int, int]
"""The first and the last step of some lines."""


START_OVER = (
    "To begin this run again from step 0 on purpose, call `restore_or_initialize(..., "
    "start_over=True)`, or use another run directory."
)
"""What to do about a run that has lost its checkpoints."""

_STEP = b'"kind":"step","step":'
"""How the event of a step begins. Its step is read without the rest, because a log has millions."""


@dataclass(frozen=True)
class Aside:
    """Why an object lies in quarantine, and since when.

    Only a rollback gives the last three: the step that it went back to, step and fingerprint of the
    checkpoint before this one, and a number that grows with every rollback.
    """

    reason: str
    time: str
    rolled_back_to: int | None = None
    after: tuple[int, str] | None = None
    rollback: int = 0


@dataclass
class _Steps:
    """Lines of kind `step`: their steps, which grow, and their numbers in the log.

    `before` is the number of the line that they continue, `cut_to` the step that was gone back to.
    """

    steps: array[int]
    numbers: array[int]
    before: int = 0
    cut_to: int = -1

    @property
    def last(self) -> tuple[int, int]:
        """The last step and its number."""
        return (self.steps[-1], self.numbers[-1]) if self.steps else (-1, 0)

    @property
    def span(self) -> StepRange | None:
        """The first and the last step."""
        return (self.steps[0], self.steps[-1]) if self.steps else None

    def cut(self, step: int) -> _Steps:
        """Take the lines after `step` away, and return them."""
        start = bisect_right(self.steps, step)
        before = self.numbers[start - 1] if start else 0
        aside = _Steps(self.steps[start:], self.numbers[start:], before, step)
        del self.steps[start:], self.numbers[start:]
        return aside


@dataclass(frozen=True)
class ReturningLines:
    """What undoing a rollback does to the journal.

    Attributes:
        cuts: The lines of the log whose cuts are undone, in the order of their steps.
        steps: The first and the last step that return.
        replaced: Those that were recorded since, and are set aside; None for none.
    """

    cuts: tuple[int, ...]
    steps: StepRange
    replaced: StepRange | None


class LogView:
    """What the lines of a log say together, up to the first damaged one."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.problem: str | None = None
        """Why nothing may be decided by the log; None if all is well."""
        self.last: Line | None = None
        self.run: str | None = None
        self.saved: int | None = None
        """The first step that was committed; None if none was, or all were deleted on purpose."""
        self.knows_saves = True
        """Whether no line that says so was lost in a repair."""
        self.rules: Rules | None = None
        self.knows_rules = True
        """Whether no rules were lost in a repair since they were last recorded."""
        self.removed: set[tuple[int, str]] = set()
        """Step and fingerprint of checkpoints that were removed on purpose."""
        self.aside: dict[str, Aside] = {}
        """What the log knows of objects in quarantine, by name. Not all need be there."""
        self.damaged: dict[str, str] = {}
        """Packs that are damaged, with the reason."""
        self._hashes = bytearray()
        self._journal = _Steps(array("q"), array("q"))
        self._cuts: dict[int, _Steps] = {}

    @classmethod
    def read(cls, storage: Storage, run: str | None = None) -> LogView:
        """Read the log of a run directory; its damage becomes the `problem`.

        Args:
            storage: The run directory.
            run: The id of the run; None for any.

        Raises:
            UnreachableError: The log cannot be read.
        """
        view = cls(f"{storage.where}/{log_place(storage, LOG)}")
        try:
            for line in read_log(storage, LOG):
                view.add(line)
            if run is not None and view.run not in (None, run):
                raise CorruptionError(
                    f"{view.where}: expected the log of run {run}, found that of run {view.run}."
                )
            if view.last is None and _holds_data(storage):
                raise CorruptionError(
                    f"{view.where}: expected a log beside the checkpoints, found none, or an empty one."
                )
        except CorruptionError as error:
            view.problem = f"{error}{REPAIR_ADVICE}"
        return view

    def add(self, line: Line) -> None:
        """Take in the next line. Raises `CorruptionError` for one that does not fit."""
        if line.rest.startswith(_STEP):
            steps = self._journal.steps
            digits = line.rest[len(_STEP) : len(_STEP) + 20].partition(b",")[0]
            if not digits.isdigit() or (steps and int(digits) <= steps[-1]):
                raise broken(
                    self.where, line.number, f"step {digits!r} does not follow {steps[-1:]}"
                )
            steps.append(int(digits))
            self._journal.numbers.append(line.number)
        else:
            self._apply(line.decode(decoder, self.where), line.number)
        self._hashes += bytes.fromhex(line.hash)
        self.last = line

    def _apply(self, event: Event, number: int) -> None:
        match event:
            case Started():
                self.run = event.run
            case Saved():
                self.saved, self.knows_saves = event.step, True
            case Rules():
                self.rules, self.knows_rules = event, True
            case Removed():
                place = event.step, event.fingerprint
                (self.removed.discard if event.again else self.removed.add)(place)
            case SetAside():
                self.aside[event.to] = Aside(event.reason, event.time)
            case Damaged():
                self.damaged[event.pack] = event.reason
            case RolledBack():
                reason = f"rolled back to step {event.step}"
                for moved in event.checkpoints:
                    self.aside[moved.to] = Aside(
                        reason, event.time, event.step, moved.after, number
                    )
            case Cut():
                self._set_aside(event.step, number)
            case Returned():
                returning = [self._cuts.pop(cut) for cut in event.cuts if cut in self._cuts]
                self._set_aside(event.step, number)
                for lines in returning:
                    self._journal.steps += lines.steps
                    self._journal.numbers += lines.numbers
            case Dropped():
                self._cuts.clear()
            case Lost():
                self.knows_rules = self.knows_rules and not event.rules
                self.knows_saves = self.knows_saves and not event.rules
            case _:
                pass

    def _set_aside(self, step: int, number: int) -> None:
        if (lines := self._journal.cut(step)).steps:
            self._cuts[number] = lines

    def require(self, references: Mapping[int, LineReference] | None = None) -> None:
        """Raise `CorruptionError` if there is a problem, or a line is missing.

        Args:
            references: The lines to which checkpoints refer, by step.
        """
        if problem := self.problem_with(references or {}):
            raise CorruptionError(problem)

    def problem_with(self, references: Mapping[int, LineReference]) -> str | None:
        """The problem of the log beside these checkpoints, None for none; see `require`."""
        if self.problem is not None or not (lost := self.lost(references)):
            return self.problem
        step = lost[0]
        found = "ends before it"
        if self.last is not None and references[step].number <= self.last.number:
            found = "has another line there: it is the log of another run"
        elif self.last is None:
            found = "is empty or gone"
        return (
            f"{self.where}: the checkpoint of step {step} was saved after line "
            f"{references[step].number}, and the log {found}.{REPAIR_ADVICE}"
        )

    def lost(self, references: Mapping[int, LineReference]) -> list[int]:
        """The steps of the checkpoints that refer to lines which are not there."""
        return [step for step, line in sorted(references.items()) if not self._has(line)]

    def is_rolled_back(self, name: str) -> bool:
        """Whether a rollback put the object `name` into quarantine."""
        why = self.aside.get(name)
        return why is not None and why.rolled_back_to is not None

    def is_foreign(self, name: str, manifest: Manifest) -> bool:
        """Whether a rollback set `name` aside, and what lies there is a manifest of another run."""
        if manifest.log is None or self.problem is not None:
            return False
        return self.is_rolled_back(name) and not self._has(manifest.log)

    def _has(self, line: LineReference) -> bool:
        size = len(line.hash) // 2
        end = line.number * size
        return line.number > 0 and self._hashes[end - size : end].hex() == line.hash

    # ------------------------------------------------------------ the journal

    @property
    def newest_step(self) -> int:
        """The newest step that has a line; -1 for none."""
        return self._journal.last[0]

    def entries(self, storage: Storage, first: int = 0) -> Iterator[JournalEntry]:
        """The lines of steps from `first` on that no rollback set aside, in their order."""
        start = bisect_right(self._journal.steps, first - 1)
        numbers = iter(self._journal.numbers[start:])
        wanted = next(numbers, None)
        for line in read_log(storage, LOG) if wanted is not None else ():
            if line.number == wanted:
                yield line.decode(entry_decoder, self.where)
                wanted = next(numbers, None)
                if wanted is None:
                    return

    def steps_after(self, step: int) -> StepRange | None:
        """The first and the last step after `step` that have a line; None for none."""
        later = self._journal.steps[bisect_right(self._journal.steps, step) :]
        return (later[0], later[-1]) if later else None

    def steps_aside(self) -> list[StepRange]:
        """The steps of the lines that rollbacks have set aside."""
        return [span for lines in self._cuts.values() if (span := lines.span) is not None]

    def returning(self, before: int, checkpoints: Sequence[Manifest]) -> ReturningLines | None:
        """The lines that rollbacks set aside and that continue the journal; None for none.

        Of several that continue it, those return that the next checkpoint was saved after, or else
        those that were set aside last.

        Args:
            before: The newest checkpoint.
            checkpoints: Those that return with the lines, the oldest first.
        """
        kept = bisect_right(self._journal.steps, before)
        newest, number = (
            (self._journal.steps[kept - 1], self._journal.numbers[kept - 1]) if kept else (-1, 0)
        )
        after = checkpoints[-1].step if checkpoints else before
        chosen: dict[int, _Steps] = {}
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


def _was_there(cut: int, lines: _Steps, checkpoints: Sequence[Manifest]) -> bool:
    """Whether lines are of the history of the next checkpoint: it was saved after they were recorded,
    and before they were set aside."""
    following = next((each for each in checkpoints if each.step > lines.cut_to), None)
    if following is None or following.log is None:
        return True
    count = bisect_right(lines.steps, following.step)
    return not count or lines.numbers[count - 1] <= following.log.number < cut


def _holds_data(storage: Storage) -> bool:
    """Whether a writer must have been there: there is a checkpoint, or a pack."""
    try:
        return newest_step(storage) is not None or any(
            pack_step(name.removeprefix(PACKS)) >= 0 for name in storage.list(PACKS)
        )
    except OSError as error:
        raise read_error(error, f"{storage.where}: the list of its checkpoints") from error
