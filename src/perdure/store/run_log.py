"""The log of a run directory, as its writer and its readers use it, and the folder `quarantine/`.

The writer appends to it; `perdure verify` checks it. The log says why an object lies in quarantine.
Invariant: the line that says so is durable before the object moves.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise

from perdure.errors import CorruptionError
from perdure.store.failures import is_gone, read_error
from perdure.store.format import QUARANTINE, manifest_name
from perdure.store.log import (
    FIRST_HASH,
    LineReference,
    LogWriter,
    encode_line,
    log_texts,
    next_line,
    rewrite_log,
)
from perdure.store.log_view import LOG, LogView
from perdure.store.manifest import Manifest
from perdure.store.manifest_json import decode_manifest
from perdure.store.names import committed_steps
from perdure.store.run_events import (
    Cut,
    Event,
    JournalEntry,
    Lost,
    Returned,
    SetAside,
    Started,
    decoder,
)
from perdure.store.storage import Storage


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

        `perdure verify` and every deletion compare it with all checkpoints. Raises `UnreachableError`
        if the newest one cannot be read.
        """
        try:
            return self._compare()
        except OSError as error:
            raise read_error(error, f"{self._storage.where}: its newest checkpoint") from error

    def _compare(self) -> LogView:
        view = self._view
        assert view is not None, "only the writer asks"
        if not self._is_checked and view.problem is None:
            references = _newest_reference(self._storage)
            view.problem = view.problem_with(references)
            self._lost = next(iter(references.values()), None)
        self._is_checked = True
        return view

    def append(self, event: Event, *, durable: bool = True) -> None:
        """Write one line; without `durable` it survives a power loss only after `sync`.

        Raises:
            CorruptionError: The log is damaged.
            OSError: The line could not be written; nothing of it is left.
        """
        with self._turn:
            view = self._compare()
            if view.problem is not None:
                view.require()
            if self._writer is None:
                self._writer = LogWriter(self._storage, LOG, view.last)
            view.add(self._writer.append(event))
        if durable:
            self.sync()

    def set_aside(self, name: str, reason: str, time: str) -> str:
        """Move an object to quarantine because of damage; returns its new name, durable on return.

        Raises:
            CorruptionError: The log is damaged.
            OSError: The object cannot be moved.
        """
        stem, _, suffix = name.rpartition("/")[2].partition(".")
        target = free_name([*self._storage.list(QUARANTINE)], stem, f".{suffix}")
        self.append(SetAside(name=name, to=target, reason=reason, time=time))
        self._storage.move(name, target)
        return target

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
        events: list[Event] = [] if kept else [Started(run=self.run)]
        if texts[kept:]:
            aside = free_name([*storage.list(QUARANTINE)], "log", ".jsonl")
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


def free_name(taken: Collection[str], stem: str, suffix: str) -> str:
    """A name in quarantine, `quarantine/STEM-NUMBER` and `suffix`, that is not in `taken`."""
    names = (f"{QUARANTINE}{stem}-{number}{suffix}" for number in range(len(taken) + 1))
    return next(name for name in names if name not in taken)


def _salvaged(texts: Sequence[bytes]) -> dict[int, Event | None]:
    """The lines after a damaged one that fit the hash which the line before states, by place.

    None stands for an event that makes no sense without the lost ones.
    """
    events: dict[int, Event | None] = {}
    for place, (before, text) in enumerate(pairwise(texts), 1):
        with suppress(CorruptionError):
            event = next_line(before, text).decode(decoder, "")
            is_bound = isinstance(event, (JournalEntry, Started, Cut, Returned))
            events[place] = None if is_bound else event
    return events


def _newest_reference(storage: Storage) -> dict[int, LineReference]:
    """The line to which the newest readable checkpoint refers."""
    for step in reversed(committed_steps(storage)):
        name = manifest_name(step)
        try:
            return line_references([decode_manifest(storage.read(name), name, step)])
        except CorruptionError:
            continue
        except OSError as error:
            if not is_gone(error):
                raise
    return {}
