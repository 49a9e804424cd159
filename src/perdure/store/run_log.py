"""The log of a run directory: what its lines say together, and its one writer.

The writer appends to it; `perdure verify` checks it. Invariants: a log with a `problem` (a damaged
line, or a missing one to which a checkpoint refers) never decides what is deleted, nor what a rollback
brings back. The line that says why an object lies in quarantine is durable before it moves there,
so that an object there without such a line shows that lines are missing.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from perdure.errors import CorruptionError
from perdure.store.failures import is_gone, reading
from perdure.store.format import PACKS, QUARANTINE, manifest_name, pack_step
from perdure.store.journal_lines import JournalLines
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
from perdure.store.names import committed_steps, moved_aside, newest_step
from perdure.store.run_events import (
    Cut,
    Damaged,
    Dropped,
    Event,
    JournalEntry,
    Lost,
    Pinned,
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
from perdure.text import few

LOG = "log"
LOG_FILE = f"{LOG}.jsonl"

REPAIR_ADVICE = (
    " Nothing is deleted, and nothing was changed now. Bring the file back from a copy, or let "
    "`perdure verify --repair` keep its good lines and set the file aside."
)
"""The end of every error about a damaged log."""

_STEP = b'"kind":"step","step":'
"""How the event of a step begins. Its step is read without the rest, because a log has millions."""


@dataclass(frozen=True)
class Aside:
    """Why an object lies in quarantine, and since when.

    `line` is the number of the line that says so. A rollback adds the step it went back to, and
    step and fingerprint of the checkpoint before.
    """

    reason: str
    time: str
    line: int
    rolled_back_to: int | None = None
    after: tuple[int, str] | None = None


class LogView:
    """What the lines of a log say together, up to the first damaged one."""

    def __init__(self, where: str, list_quarantine: Callable[[], list[str]]) -> None:
        self.where = where
        self._list_quarantine = list_quarantine
        self.problem: str | None = None
        """Why nothing may be decided by the log; None if all is well."""
        self.last: Line | None = None
        self.run: str | None = None
        self.saved: int | None = None
        """The first step that was committed; None if none was, or all were deleted on purpose."""
        self.knows_saves = True
        """False once a repair dropped lines about saves: `saved` may then be wrong."""
        self.rules: Rules | None = None
        self.knows_rules = True
        """False once a repair dropped lines about rules, until rules are recorded again."""
        self.removed: set[tuple[int, str]] = set()
        """Step and fingerprint of checkpoints that were removed on purpose."""
        self.pinned: set[int] = set()
        """The pinned steps, as far as no line that pins one was lost in a repair."""
        self.aside: dict[str, Aside] = {}
        """What the log knows of objects in quarantine, by name. Not all need be there."""
        self.knows_aside = True
        """False once a repair dropped lines about quarantine: `aside` may then lack some."""
        self.moving: RolledBack | Returned | None = None
        """The last line, if it moves checkpoints: its writer may have been killed before the end."""
        self.damaged: dict[str, str] = {}
        """Packs that are damaged, with the reason."""
        self._hashes = bytearray()
        self.journal = JournalLines()

    @classmethod
    def read(cls, storage: Storage, run: str | None = None) -> LogView:
        """Read the log of the run with the id `run` (None: any); its damage becomes the `problem`."""
        where = f"{storage.where}/{log_place(storage, LOG)}"
        view = cls(where, lambda: moved_aside(storage))
        with suppress(OSError):  # whoever asks for a problem with it lists it then
            names = moved_aside(storage)  # before the log, which may grow meanwhile
            view._list_quarantine = lambda: names
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
            newest = self.journal.newest_step
            digits = line.rest[len(_STEP) : len(_STEP) + 20].partition(b",")[0]
            if not digits.isdigit() or int(digits) <= newest:
                raise broken(self.where, line.number, f"step {digits!r} does not follow {newest}")
            self.journal.add(int(digits), line.number)
        else:
            self._apply(line.decode(decoder, self.where), line.number)
        self._hashes += bytes.fromhex(line.hash)
        self.last = line

    def _apply(self, event: Event, number: int) -> None:
        self.moving = event if isinstance(event, (RolledBack, Returned)) else None
        match event:
            case Started():
                self.run = event.run
            case Saved():
                self.saved, self.knows_saves = event.step, True
            case Rules():
                self.rules, self.knows_rules = event, True
            case Removed():
                removed = event.step, event.fingerprint
                (self.removed.discard if event.again else self.removed.add)(removed)
            case Pinned():
                (self.pinned.add if event.pinned else self.pinned.discard)(event.step)
            case SetAside():
                self.aside[event.to] = Aside(event.reason, event.time, number)
            case Damaged():
                self.damaged[event.pack] = event.reason
            case RolledBack():
                reason = f"rolled back to step {event.step}"
                for moved in event.checkpoints:
                    self.aside[moved.to] = Aside(
                        reason, event.time, number, event.step, moved.after
                    )
            case Cut():
                self.journal.cut(event.step, number)
            case Returned() if event.cuts:
                self.journal.bring_back(event.cuts, event.step, number)
            case Dropped():
                self.journal.drop_cuts()
            case Lost():
                self.knows_rules = self.knows_rules and not event.rules
                self.knows_saves = self.knows_saves and not event.rules
                self.knows_aside = self.knows_aside and not event.rules

    def require(self, references: Mapping[int, LineReference] | None = None) -> None:
        """Raise `CorruptionError` for a problem, or a line of `references` that is missing.

        Raises `OSError` if the quarantine cannot be listed.
        """
        if problem := self.problem_with(references or {}):
            raise CorruptionError(problem)

    def problem_with(self, references: Mapping[int, LineReference]) -> str | None:
        """The problem of the log beside these checkpoints, None for none; see `require`.

        Raises `OSError` if the quarantine cannot be listed.
        """
        if self.problem is not None:
            return self.problem
        if not (lost := self.lost(references)):
            return self._problem_with_quarantine()
        number, found = references[lost[0]].number, "ends before it"
        if self.last is not None and number <= self.last.number:
            found = "has another line there: it is the log of another run"
        return (
            f"{self.where}: the checkpoint of step {lost[0]} was saved after line {number}, and the "
            f"log {found}.{REPAIR_ADVICE}"
        )

    def lost(self, references: Mapping[int, LineReference]) -> list[int]:
        """The steps of the checkpoints that refer to lines which are not there."""
        return [step for step, line in sorted(references.items()) if not self._has(line)]

    def _problem_with_quarantine(self) -> str | None:
        unexplained = self.unexplained(self._list_quarantine())
        if not self.knows_aside or not unexplained:
            return None
        return (
            f"{self.where}: expected a line for each checkpoint and pack in {QUARANTINE}, found none "
            f"for {few(unexplained)}: the last lines are missing.{REPAIR_ADVICE}"
        )

    def unexplained(self, names: Iterable[str]) -> list[str]:
        """The `names` in quarantine for which no line says why they lie there."""
        return [name for name in names if name not in self.aside]

    def is_rolled_back(self, name: str) -> bool:
        """Whether a rollback put the object `name` into quarantine."""
        why = self.aside.get(name)
        return why is not None and why.rolled_back_to is not None

    def _has(self, line: LineReference) -> bool:
        size = len(line.hash) // 2
        end = line.number * size
        return line.number > 0 and self._hashes[end - size : end].hex() == line.hash

    def entries(self, storage: Storage, first: int = 0) -> Iterator[JournalEntry]:
        """The lines of steps from `first` on that no rollback set aside, in their order."""
        numbers = iter(self.journal.numbers(first))
        wanted = next(numbers, None)
        for line in read_log(storage, LOG) if wanted is not None else ():
            if line.number == wanted:
                yield line.decode(entry_decoder, self.where)
                wanted = next(numbers, None)
                if wanted is None:
                    return


def _holds_data(storage: Storage) -> bool:
    """Whether a writer must have been there: there is a checkpoint, or a pack."""
    with reading(f"{storage.where}: the list of its checkpoints"):
        return newest_step(storage) is not None or any(
            pack_step(name.removeprefix(PACKS)) >= 0 for name in storage.list(PACKS)
        )


class RunLog:
    """The log of a run directory, as its one writer or a reader uses it."""

    def __init__(
        self, storage: Storage, run: str | None = None, begun_from: str | None = None
    ) -> None:
        self.run = run
        self.made_from: str | None = None
        """What this process makes the run from."""
        self.begun_from = begun_from
        """What the run is made from, by its marker, as long as that has not ended."""
        self._storage = storage
        self._view: LogView | None = None
        self._writer: LogWriter | None = None
        self._is_checked = False
        self._lost: LineReference | None = None
        # The loop appends steps, and the save in the background the rest.
        self._turn = threading.RLock()

    @property
    def unfinished(self) -> str | None:
        """What another process began to make the run from, and did not end."""
        return None if self.begun_from == self.made_from else self.begun_from

    @property
    def view(self) -> LogView:
        """What the log says: for the writer what it has read and written, or else as it is now."""
        return self._view or LogView.read(self._storage, self.run)

    def begin(self) -> None:
        """Read the log, as its writer from now on, and compare it with the newest checkpoint.

        If that cannot be read now, it is compared before the next line is written.
        """
        self.close()
        self._is_checked, self._lost = False, None
        self._view = LogView.read(self._storage, self.run)
        with suppress(OSError):
            self._compare()

    def check(self) -> LogView:
        """What the log says, compared with the newest readable checkpoint, for the writer.

        `perdure verify` and every deletion compare it with all checkpoints.
        """
        with reading(f"{self._storage.where}: its newest checkpoint"):
            return self._compare()

    def _compare(self) -> LogView:
        view = self._view
        assert view is not None, "only the writer asks"
        if not self._is_checked and view.problem is None:
            newest = newest_manifest(self._storage, self.run)
            references = line_references([newest] if newest else [])
            view.problem = view.problem_with(references)
            self._lost = next(iter(references.values()), None)
        self._is_checked = True
        return view

    def append(self, event: Event, *, durable: bool = True) -> None:
        """Write one line, or raise CorruptionError or OSError; unless `durable`, `sync` follows."""
        with self._turn:
            view = self._compare()
            view.require()
            if self._writer is None:
                self._writer = LogWriter(self._storage, LOG, view.last)
            view.add(self._writer.append(event))
        if durable:
            self.sync()

    def set_aside(self, name: str, reason: str, time: str) -> str:
        """Move an object to quarantine because of damage; returns its new name, durable on return."""
        stem, _, suffix = name.rpartition("/")[2].partition(".")
        target = free_name([*self._storage.list(QUARANTINE)], stem, f".{suffix}")
        self.append(SetAside(name=name, to=target, reason=reason, time=time))
        self._storage.move(name, target)
        return target

    def rebuild(self, why: str) -> str | None:
        """Write the log again without its damage, for a repair: what follows it, but for steps, is
        kept.

        Returns the name in quarantine of a copy of the damaged log; None if no line of it is
        damaged.
        """
        view, storage = self._view, self._storage
        assert view is not None, "only the writer repairs"
        assert self.run is not None, "a writer has written the marker"
        is_other = view.run not in (None, self.run)
        kept = 0 if view.last is None or is_other else view.last.number
        texts, aside, rules = [], None, True
        events: list[Event] = [] if kept else [Started(run=self.run)]
        try:
            texts = log_texts(storage, LOG)
        except OSError as error:
            if not is_gone(error) and error.errno != errno.ENOLINK:
                raise
            # A directory, a pipe or a link to nothing has the place of the log.
            aside = free_name([*storage.list(QUARANTINE)], "log", ".jsonl")
            storage.move(LOG_FILE, aside)
        if texts[kept:]:
            aside = free_name([*storage.list(QUARANTINE)], "log", ".jsonl")
            storage.replace(aside, b"".join(texts))
            salvaged = {} if is_other else _salvaged(texts[kept:])
            events += filter(None, salvaged.values())
            others = set(range(len(texts) - kept)) - salvaged.keys()
            rules = any(b'","kind":"step","step":' not in texts[kept + each] for each in others)
            rules = rules or bool(view.unexplained(moved_aside(storage)))
        previous = view.last.hash if view.last is not None and kept else FIRST_HASH
        renewed = texts[:kept]
        for event in [*events, Lost(reason=why, rules=rules)]:
            text, previous = encode_line(event, previous)
            renewed.append(text)
        rewrite_log(storage, LOG, renewed)
        self.close()
        self._view, self._lost = LogView.read(storage, self.run), None
        return aside

    def sync(self) -> LineReference | None:
        """Make the lines durable that are there now; returns the last one, None for none."""
        if self._view is None or (last := self._view.last) is None:
            return None
        if self._compare().problem:
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
    """The lines of the steps of a run that no rollback set aside, in order; read by all who check.

    `references` (`line_references`) have to be read before: those of a running training refer to
    lines that are there. Raises CorruptionError or UnreachableError.
    """
    view = LogView.read(storage)
    with reading(f"{storage.where}: the list of its quarantine"):
        view.require(references)
    yield from view.entries(storage)


def line_references(manifests: Iterable[Manifest]) -> dict[int, LineReference]:
    """The lines to which checkpoints refer, by step."""
    return {each.step: each.log for each in manifests if each.log is not None}


def free_name(taken: Collection[str], stem: str, suffix: str) -> str:
    """A name in quarantine, `quarantine/STEM-NUMBER` and `suffix`, that is not in `taken`."""
    names = (f"{QUARANTINE}{stem}-{number}{suffix}" for number in range(len(taken) + 1))
    return next(name for name in names if name not in taken)


def _salvaged(texts: Sequence[bytes]) -> dict[int, Event | None]:
    """The lines after a damaged one that fit the hash which the line before states, by number.

    None stands for an event that makes no sense without the lost ones.
    """
    events: dict[int, Event | None] = {}
    for number, (before, text) in enumerate(pairwise(texts), 1):
        with suppress(CorruptionError):
            event = next_line(before, text).decode(decoder, "")
            is_bound = isinstance(event, (JournalEntry, Started, Cut, Returned))
            events[number] = None if is_bound else event
    return events


def newest_manifest(storage: Storage, run: str | None = None) -> Manifest | None:
    """The newest readable manifest of the run with the id `run`, by default of any; None for none."""
    for step in reversed(committed_steps(storage)):
        name = manifest_name(step)
        try:
            manifest = decode_manifest(storage.read(name), name, step)
        except CorruptionError:
            continue
        except OSError as error:
            if not is_gone(error):
                raise
            continue
        if run in (None, manifest.run):
            return manifest
    return None
