"""The log of a run directory: the kinds of its lines, and what they say together.

The writer appends to it; `perdure verify` checks it. A line of kind `step` is the journal of one step.
Invariant: what is deleted, and what a rollback brings back, is not decided by a log that has a
`problem`: a damaged line, or a missing one to which a checkpoint refers.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
from msgspec import Struct

from perdure.errors import CorruptionError
from perdure.store.contents import committed_steps, newest_step
from perdure.store.failures import read_error
from perdure.store.format import PACKS, QUARANTINE, manifest_name, pack_step
from perdure.store.log import (
    FIRST_HASH,
    Line,
    LineReference,
    LogWriter,
    broken,
    encode_line,
    log_place,
    log_texts,
    next_line,
    read_log,
    rewrite_log,
)
from perdure.store.manifest import Manifest
from perdure.store.manifest_json import decode_manifest
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


class _Event(Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False, tag_field="kind"):
    """What a line says."""


class JournalEntry(_Event, frozen=True, kw_only=True, tag="step"):
    """What a journal has about one step.

    Attributes:
        step: How many steps the state contains.
        state: Digest of the state after the step.
        total: Digest of the contributions summed over all logical replicas, before the update.
        batch: Digest of the global batch of the step.
        metrics: Numbers; None stands for NaN and the infinities.
        attempt: The number of the attempt that recorded it.
        topology: `host`, `processes`, and `devices` if a strategy computed the step. It must never
            decide a digest.
    """

    step: int
    state: str
    total: str | None = None
    batch: str | None = None
    metrics: dict[str, float | None] = {}
    attempt: int
    topology: dict[str, int | str] = {}


class Started(_Event, frozen=True, kw_only=True, tag="run"):
    """The first line: the id of the run, which its marker has, too."""

    run: str


class Saved(_Event, frozen=True, kw_only=True, tag="saved"):
    """The run has committed a checkpoint, its first one; None: all were deleted on purpose."""

    step: int | None = None


class Rules(_Event, frozen=True, kw_only=True, tag="rules"):
    """What the writer keeps: `max_to_keep` (None for all) and its other rules by name."""

    max_to_keep: int | None = None
    retention: dict[str, Any] = {}


class Removed(_Event, frozen=True, kw_only=True, tag="removed"):
    """A checkpoint is removed on purpose, or is committed `again` with the same bits."""

    step: int
    fingerprint: str
    again: bool = False


class SetAside(_Event, frozen=True, kw_only=True, tag="set aside"):
    """An object moves to quarantine because of damage."""

    name: str
    to: str
    reason: str
    time: str = ""


class Damaged(_Event, frozen=True, kw_only=True, tag="damaged"):
    """A pack is damaged, and stays: no save depends on a chunk in it."""

    pack: str
    reason: str
    time: str = ""


class RolledBackCheckpoint(Struct, frozen=True, array_like=True):
    """A checkpoint that a rollback moves to the name `to`, and the readable one before it."""

    step: int
    to: str
    after: tuple[int, str] | None = None


class RolledBack(_Event, frozen=True, kw_only=True, tag="rolled back"):
    """A rollback to a step moves newer checkpoints to quarantine."""

    step: int
    checkpoints: tuple[RolledBackCheckpoint, ...]
    time: str = ""


class Cut(_Event, frozen=True, kw_only=True, tag="cut"):
    """A rollback sets the lines of later steps aside."""

    step: int


class Returned(_Event, frozen=True, kw_only=True, tag="returned"):
    """The lines return that the lines `cuts` set aside; others after `step` are set aside."""

    step: int
    cuts: tuple[int, ...]


class Dropped(_Event, frozen=True, kw_only=True, tag="dropped"):
    """The lines that rollbacks set aside do not return any more."""


class Lost(_Event, frozen=True, kw_only=True, tag="lost"):
    """A repair has accepted that lines are lost; `rules` says whether rules may be among them."""

    reason: str
    rules: bool = True


_decoder = msgspec.json.Decoder(
    JournalEntry
    | Started
    | Saved
    | Rules
    | Removed
    | SetAside
    | Damaged
    | RolledBack
    | Cut
    | Returned
    | Dropped
    | Lost
)
_entry_decoder = msgspec.json.Decoder(JournalEntry)


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
        """The first step that was committed; None if none was, as far as the log goes."""
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
            self._apply(line.decode(_decoder, self.where), line.number)
        self._hashes += bytes.fromhex(line.hash)
        self.last = line

    def _apply(self, event: _Event, number: int) -> None:
        match event:
            case Started():
                self.run = event.run
            case Saved():
                self.saved = event.step
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
                yield line.decode(_entry_decoder, self.where)
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


class RunLog:
    """The log of a run directory, as its one writer or a reader uses it.

    Attributes:
        run: The id of the run, once it is known.
    """

    def __init__(self, storage: Storage, run: str | None = None) -> None:
        self.run = run
        self._storage = storage
        self._view: LogView | None = None
        self._writer: LogWriter | None = None
        self._is_checked = False
        self._lost: LineReference | None = None
        self._turn = (
            threading.RLock()
        )  # the loop appends steps, the save in the background the rest

    @property
    def view(self) -> LogView:
        """What the log says: for the writer what it has read and written, or else as it is now."""
        return self._view or LogView.read(self._storage, self.run)

    def begin(self) -> None:
        """Read the log, as its writer from now on."""
        self.close()
        self._is_checked, self._lost = False, None
        self._view = LogView.read(self._storage, self.run)

    def check(self) -> LogView:
        """What the log says, compared with the newest readable checkpoint; once, for the writer.

        `perdure verify` and every deletion compare it with all checkpoints.
        """
        view = self._view
        assert view is not None, "only the writer asks"
        if not self._is_checked and view.problem is None:
            references = _newest_reference(self._storage)
            view.problem = view.problem_with(references)
            self._lost = next(iter(references.values()), None)
        self._is_checked = True
        return view

    def append(self, event: _Event, *, durable: bool = True) -> None:
        """Write one line; without `durable` it survives a power loss only after `sync`.

        Raises:
            CorruptionError: The log is damaged.
            OSError: The line could not be written; nothing of it is left.
        """
        with self._turn:
            view = self.check()
            if view.problem is not None:
                view.require()
            if self._writer is None:
                self._writer = LogWriter(self._storage, LOG, view.last)
            view.add(self._writer.append(event))
        if durable:
            self.sync()

    def rebuild(self, why: str) -> str | None:
        """Write the log again without its damage, for a repair: lines are lost.

        The lines before the damage stay. Of those after it all but the steps, which belong to what is
        lost, are written again.

        Args:
            why: What was wrong.

        Returns:
            The name in quarantine of a copy of the damaged log; None if no line of it is damaged.
        """
        view, storage = self._view, self._storage
        assert view is not None, "only the writer repairs"
        assert self.run is not None, "a writer has written the marker"
        is_other = view.run not in (None, self.run)
        kept = 0 if view.last is None or is_other else view.last.number
        texts, aside, rules = log_texts(storage, LOG), None, True
        events: list[_Event] = [] if kept else [Started(run=self.run)]
        if texts[kept:]:
            aside = f"{QUARANTINE}log-{len([*storage.list(QUARANTINE)])}.jsonl"
            storage.replace(aside, b"".join(texts))
            salvaged = {} if is_other else _salvaged(texts[kept:])
            events += filter(None, salvaged.values())
            others = set(range(len(texts) - kept)) - salvaged.keys()
            rules = any(b'","kind":"step","step":' not in texts[kept + each] for each in others)
        previous = view.last.hash if view.last is not None and kept else FIRST_HASH
        renewed = texts[:kept]
        for event in [*events, Lost(reason=why, rules=rules)]:
            text, previous = encode_line(event, previous)
            renewed.append(text)
        rewrite_log(storage, LOG, renewed)
        self.begin()
        return aside

    def sync(self) -> LineReference | None:
        """Make the lines durable that are there now; returns the last one, None for none."""
        if self._view is None or (last := self._view.last) is None:
            return None
        if self._view.problem:
            return self._lost  # a later start has to see the loss, too
        if self._writer is not None:
            self._writer.sync()
        return last.reference

    def close(self) -> None:
        """Close the file. May be called twice."""
        with self._turn:
            writer, self._writer, self._view = self._writer, None, None
        if writer is not None:
            writer.close()


def read_journal(
    storage: Storage, references: Mapping[int, LineReference] | None = None
) -> Iterator[JournalEntry]:
    """The lines of the steps of a run that no rollback set aside, in their order.

    Replays, bisects and checks all read a journal by this.

    Args:
        storage: The run directory.
        references: The lines to which its checkpoints refer (`line_references`). Read them before:
            those of a running training refer to lines that are there.

    Raises:
        CorruptionError: A line was changed, or one to which a checkpoint refers is not there.
        UnreachableError: The log cannot be read.
    """
    view = LogView.read(storage)
    view.require(references)
    yield from view.entries(storage)


def line_references(manifests: Iterable[Manifest]) -> dict[int, LineReference]:
    """The lines to which checkpoints refer, by step."""
    return {each.step: each.log for each in manifests if each.log is not None}


def first_difference(one: JournalEntry, two: JournalEntry) -> tuple[str, str, str] | None:
    """What differs first in the order of the computation, and both digests; None for nothing.

    Digests that only one of the two has are not compared.
    """
    for what in ("batch", "total", "state"):
        digests = getattr(one, what), getattr(two, what)
        if None not in digests and digests[0] != digests[1]:
            return what, *digests
    return None


def _salvaged(texts: Sequence[bytes]) -> dict[int, _Event | None]:
    """The lines after a damaged one that fit the hash which the line before states, by place.

    None stands for an event that makes no sense without the lost ones.
    """
    events: dict[int, _Event | None] = {}
    for place, (before, text) in enumerate(pairwise(texts), 1):
        with suppress(CorruptionError):
            event = next_line(before, text).decode(_decoder, "")
            is_bound = isinstance(event, (JournalEntry, Started, Cut, Returned))
            events[place] = None if is_bound else event
    return events


def _newest_reference(storage: Storage) -> dict[int, LineReference]:
    """The line to which the newest readable checkpoint refers."""
    try:
        for step in reversed(committed_steps(storage)):
            with suppress(CorruptionError, FileNotFoundError):
                name = manifest_name(step)
                return line_references([decode_manifest(storage.read(name), name, step)])
    except OSError as error:
        raise read_error(error, f"{storage.where}: its newest checkpoint") from error
    return {}


def _holds_data(storage: Storage) -> bool:
    """Whether a writer must have been there: there is a checkpoint, or a pack."""
    try:
        return newest_step(storage) is not None or any(
            pack_step(name.removeprefix(PACKS)) >= 0 for name in storage.list(PACKS)
        )
    except OSError as error:
        raise read_error(error, f"{storage.where}: the list of its checkpoints") from error
