"""`Journal`: digests of the steps of a run, compared whenever a step is computed again.

Invariant: once a repeated step has other bits than the journal has, nothing more is committed. Only
the chief of a group writes, and the training loop never waits for a disk: lines become durable with
the checkpoint that follows them.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import NoneType
from typing import Any, SupportsFloat

import msgspec

from perdure.checkpoint.arguments import metric_numbers, step_number
from perdure.checkpoint.caller_warning import warn_caller
from perdure.checkpoint.group_call import together
from perdure.checkpoint.manager_options import ManagerOptions
from perdure.checkpoint.state_digest import (
    batch_digest,
    combined_digest,
    share_digests,
    show_doctor,
    state_digest,
)
from perdure.checkpoint.step_trace import is_tracing, trace_recorded
from perdure.errors import (
    CorruptionError,
    JournalMismatchError,
    PerdureError,
    SaveError,
    StoreError,
    UnsupportedLeafError,
    WorkerLostError,
)
from perdure.heartbeats import beat
from perdure.process_group import Processes
from perdure.store import Leaf, LocalStorage, Run
from perdure.store.drill_hook import drill_hook
from perdure.store.journal_file import (
    FIRST_HASH,
    JOURNAL,
    JournalEntry,
    JournalWriter,
    first_difference,
    read_journal,
)
from perdure.store.journal_reference import (
    JOURNAL_LEAF,
    LineReference,
    checked_lines,
    line_references,
    reference_leaf,
)
from perdure.store.manifest import plain_metrics

_ATTEMPT = "PERDURE_ATTEMPT"  # set by `perdure run`


class Journal:
    """One line for each recorded step in `journal.jsonl` of the run directory (docs/JOURNAL.md).

    A manager makes it; `manager.save` records by itself if `ManagerOptions.journal_every` is given.
    """

    def __init__(self, run: Run, processes: Processes, options: ManagerOptions) -> None:
        self._run = run
        self._processes = processes
        # `perdure bisect` needs a line for each step, of programs without a journal too.
        is_forced = is_tracing() and isinstance(run.storage, LocalStorage)
        self._every = 1 if is_forced else options.journal_every
        # What cannot be digested has no line then, as without the replay.
        self._may_lack = is_forced and options.journal_every is None
        self._tolerates = options.on_error == "continue"
        self._guard = threading.RLock()
        self._writer: JournalWriter | None = None
        self._is_closed = False
        self._is_used = self._every is not None  # the same in all processes of a group
        self._after = -1  # the newest step whose state is certain
        self._ahead: deque[tuple[JournalEntry, str]] = deque()  # lines of steps that are repeated
        self._last: tuple[JournalEntry, str] | None = None  # the line before those, with its hash
        self._newest = -1
        self._recorded: int | None = None  # by a call of `record`
        self._steps: tuple[int | None, int | None] = None, None  # the last two different ones
        self._is_raised = False  # the failure, in all processes of a group
        self._attempt = 0
        self._noted: dict[str, Any] = {}
        self._failure: PerdureError | None = None
        self._warned: set[str] = set()
        if self._every is not None:
            self._require_local()

    @property
    def records_saves(self) -> bool:
        """Whether each call of `save` records its step (`ManagerOptions.journal_every`)."""
        return self._every is not None

    def wants(self, step: int) -> bool:
        """Whether `step` is recorded: a multiple of `ManagerOptions.journal_every` has been passed.

        It has, if one lies between the step that the program made or restored last and this one, so
        that a resumed run records the steps of an undisturbed one.
        """
        every = self._every or 1
        before = self._steps[0] if step == self._steps[1] else self._steps[1]
        return step % every == 0 or (before is not None and step // every > before // every)

    def skip(self, step: int) -> None:
        """The program has made a step that it does not record."""
        if step != self._steps[1]:
            self._steps = self._steps[1], step

    def record(
        self,
        step: int,
        state: Any,
        batch: Any = None,
        metrics: Mapping[str, SupportsFloat] | None = None,
    ) -> None:
        """Record the step that led to `state`, or compare it with the line that it has already.

        Steps that pass no multiple of `ManagerOptions.journal_every` are skipped. In a group every
        process calls this, and the next `save` that is due, or `close`, raises what went wrong.

        Args:
            step: How many steps `state` contains, as for `save`.
            state: What `save` takes.
            batch: The global batch of the step, any tree of arrays.
            metrics: Numbers, such as the loss. One that differs is a warning.

        Raises:
            JournalMismatchError: The step was recorded before with another digest.
            CorruptionError: A line of the journal was changed or is missing.
            StoreError: The run directory is no local directory, or the manager is closed.
            SaveError: The line could not be written (a warning under `on_error="continue"`).
            UnsupportedLeafError: A value has no exact form, or an array is sharded over processes.
        """
        step = step_number(step)
        beat("step", step)
        show_doctor(self._run.where, step, state, self._processes)
        self._require_local()
        self._is_used = True
        if self._record(step, state, batch, metrics):
            self._recorded = step

    def record_saved(
        self, step: int, state: Any, metrics: Mapping[str, SupportsFloat] | None
    ) -> None:
        """`record` in each call of `manager.save`, if `journal_every` is given; see there."""
        show_doctor(self._run.where, step, state, self._processes)
        if self._every is not None and step != self._recorded:
            self._record(step, state, None, metrics)

    def _record(
        self, step: int, state: Any, batch: Any, metrics: Mapping[str, SupportsFloat] | None
    ) -> bool:
        """`record` of a step that was reported and checked; False if it is skipped."""
        with self._guard:
            if self._is_closed:
                raise StoreError(
                    f"{self._run.where}: step {step} was recorded after the manager was closed. "
                    f"Nothing was written. Record before `close`."
                )
            noted, self._noted = self._noted, {}
            is_wanted = self.wants(step)
            self.skip(step)
            if not is_wanted or not self._processes.is_chief:
                return is_wanted
            try:
                self._raise_failure()
                entry = self._entry(step, state, batch, metrics, noted)
                self._keep(entry)
                trace_recorded(step, "state", state, self._processes)
                if batch is not None:
                    trace_recorded(step, "batch", batch)
            except PerdureError as error:
                if self._may_lack and isinstance(error, UnsupportedLeafError):
                    return True
                if self._processes.count == 1 or isinstance(error, WorkerLostError):
                    raise
                self._failure = error  # raised where all processes can raise it
            return True

    def note(self, shares: Sequence[Any], processes: Processes, devices: int | None = None) -> None:
        """Digest the local shares of a batch for the next line. In a group this is a collective."""
        self._noted = {} if devices is None else {"devices": devices}
        digests = []
        try:
            digests = share_digests(shares)
        except UnsupportedLeafError as error:  # a batch may be anything
            if "batch" not in self._warned:
                self._warned.add("batch")
                warn_caller(f"{self._run.where}: the lines of {JOURNAL} lack the batch: {error}")
        sent = "".join(digests).encode()
        channel = processes if processes.count == 1 else processes.channel("journal")
        if digest := channel.agree(sent, _batch_digest):
            self._noted["batch"] = digest.decode()

    def note_total(self, total: Any) -> None:
        """Digest the total of all replicas for the next line."""
        if self._processes.is_chief:
            self._noted["total"] = state_digest(total)

    def resume(self, step: int) -> None:
        """The program continues from the checkpoint of `step`: later lines are what it repeats."""
        self.forget()
        self._after = step
        self._steps = None, step

    def forget(self) -> None:
        """The history of the run may change: read the journal again at the next step."""
        with self._guard:
            self._close_file()
            self._after, self._recorded, self._failure = -1, None, None
            self._steps, self._is_raised = (None, None), False

    def reference(self, step: int) -> dict[str, Leaf]:
        """The process leaf by which the checkpoint of `step` refers to the last line up to it."""
        if not self._is_used or not self._processes.is_chief:
            return {}
        with self._guard:
            with suppress(OSError, SaveError):  # a warning of `record`, or an error of the save
                self._open()
            self._advance(step)
            if self._last is None:
                return {}
            entry, digest = self._last
            return {JOURNAL_LEAF: reference_leaf(LineReference(entry.step, digest))}

    def require_agreement(self, call: str = "save") -> None:
        """Raise what went wrong in the chief, in every process, before a save. A collective."""
        if self._is_used:
            try:
                together(self._processes, self._raise_failure, by_chief=NoneType, call=call)
            except PerdureError:
                self._is_raised = True
                raise

    def finish(self, error: BaseException | None) -> None:
        """Raise what no save has raised yet, in every process of a group. A collective without `error`.

        Args:
            error: What this process is raising. The others may wait for something else then, so that
                it does not wait for them.
        """
        if self._processes.count == 1 or self._is_raised or not self._is_used or self._is_closed:
            return
        if error is None:
            self.require_agreement("close")
        elif self._failure is not None:
            if isinstance(error, SystemExit) and not error.code:
                raise self._failure
            warn_caller(f"{self._failure}")

    def sync(self) -> str | None:
        """Make all lines durable; returns what to warn about if that fails."""
        with self._guard:
            writer = self._writer
        if writer is None:
            return None
        try:
            writer.sync()
        except OSError as error:
            return f"{self._run.where}: {JOURNAL} could not be made durable: {error}"
        return None

    def close(self) -> None:
        """Make all lines durable and close the file."""
        with self._guard:
            self._is_closed = True
            note = self._close_file()
        if note is not None:
            warn_caller(note)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _entry(
        self,
        step: int,
        state: Any,
        batch: Any,
        metrics: Mapping[str, SupportsFloat] | None,
        noted: Mapping[str, Any],
    ) -> JournalEntry:
        topology = {"host": socket.gethostname(), "processes": self._processes.count}
        if "devices" in noted:
            topology["devices"] = noted["devices"]
        return JournalEntry(
            step=step,
            state=state_digest(state, self._processes),
            total=noted.get("total"),
            batch=noted.get("batch") if batch is None else batch_digest(batch),
            metrics=plain_metrics(metric_numbers({} if metrics is None else metrics)),
            attempt=0,  # known once the journal was read
            topology=topology,
        )

    def _keep(self, entry: JournalEntry) -> None:
        try:
            writer = self._open()
            entry = msgspec.structs.replace(entry, attempt=self._attempt)
            self._advance(entry.step)
            before = None if self._last is None else self._last[0]
            if before is not None and before.step == entry.step:
                self._compare(before, entry)
            elif entry.step > self._newest:
                self._last = entry, writer.append(entry)
                self._newest = entry.step
        except OSError as error:
            failure = SaveError(
                f"{self._run.where}: the line of step {entry.step} could not be written into "
                f"{JOURNAL}: {error}. Every checkpoint and every earlier line is unchanged."
            )
            if not self._tolerates:
                raise failure from error
            warn_caller(f"{failure} Training continues without this line.")
        except SaveError as error:
            if not self._tolerates:
                raise
            warn_caller(f"{error} Training continues without the line of step {entry.step}.")

    def _advance(self, step: int) -> None:
        while self._ahead and self._ahead[0][0].step <= step:
            self._last = self._ahead.popleft()

    def _open(self) -> JournalWriter:
        # The marker comes first: a directory that holds only a journal is no run directory.
        self._run.begin_writing()
        if self._writer is not None:
            return self._writer
        storage = self._run.storage
        assert isinstance(storage, LocalStorage)
        ahead: deque[tuple[JournalEntry, str]] = deque()
        last: tuple[JournalEntry, str] | None = None
        newest, last_hash, end, attempts = -1, FIRST_HASH, 0, 0
        for line in checked_lines(read_journal(storage), self._run.where, self._references()):
            newest, last_hash, end = line.entry.step, line.hash, line.end
            attempts = max(attempts, line.entry.attempt)
            if newest >= self._after:
                ahead.append((line.entry, line.hash))
            else:
                last = line.entry, line.hash
        self._writer = JournalWriter(storage, last_hash, end)
        self._ahead, self._last, self._newest = ahead, last, newest
        if not self._attempt:
            stated = os.environ.get(_ATTEMPT, "")
            self._attempt = int(stated) if stated.isdecimal() else attempts + 1
        return self._writer

    def _references(self) -> dict[int, LineReference]:
        """What the newest readable checkpoint refers to; `perdure verify` looks at all of them."""
        for step in reversed(self._run.steps()):
            with suppress(CorruptionError):
                return line_references([self._run.manifest(step)])
        return {}

    def _close_file(self) -> str | None:
        note = self.sync()  # a save that is under way does not find the file any more
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        self._ahead, self._last = deque(), None
        return note

    def _compare(self, before: JournalEntry, entry: JournalEntry) -> None:
        """Raise for the first digest that differs; warn about metrics that do.

        `perdure drill` compares the runs itself, and looks for the cause in what they save.
        """
        if drill_hook() is not None:
            return
        if (difference := first_difference(before, entry)) is not None:
            text = self._describe(before, entry, *difference)
            self._failure = JournalMismatchError(text, entry.step, *difference)
            raise self._failure
        for name in sorted(before.metrics.keys() & entry.metrics.keys()):
            if before.metrics[name] != entry.metrics[name] and name not in self._warned:
                self._warned.add(name)
                warn_caller(
                    f"{self._run.where}: step {entry.step} was computed again with the same bits, "
                    f"and the metric {name!r} is {entry.metrics[name]}; expected "
                    f"{before.metrics[name]}, as in {JOURNAL}. It depends on more than the state."
                )

    def _describe(
        self, before: JournalEntry, entry: JournalEntry, what: str, expected: str, found: str
    ) -> str:
        where = self._run.where
        start = f"the checkpoint of step {self._after}" if self._after >= 0 else "the first step"
        cause = {
            "batch": "The data of the step are others: look at what decides them (seed, order, files).",
            "total": "The batch is the same: the random numbers, the program or the arithmetic of the "
            "device are not.",
            "state": "The program, what it holds outside of the state, or the arithmetic of the device "
            "is not the same.",
        }[what]
        if what == "state" and (before.batch is None or entry.batch is None):
            cause = f"Its data may be others, too: no batch was compared. {cause}"
        ways = f"`perdure rollback {where}@{max(self._after, 0)}` sets the lines after it aside"
        if self._after < 0:
            ways = f"remove {where}/{JOURNAL}"
        return (
            f"{where}: step {before.step}, computed again from {start}, has another {what} than the "
            f"journal: expected {expected} (attempt {before.attempt}), found {found}. {cause} Nothing "
            f"more was saved. `perdure drill` looks for the cause. To continue with the new bits on "
            f"purpose, {ways}."
        )

    def _require_local(self) -> None:
        if not isinstance(self._run.storage, LocalStorage):
            raise StoreError(
                f"{self._run.where}: expected a local run directory for a journal, which grows line "
                f"by line, as no object store allows. Leave `journal_every` out, or keep the run in a "
                f"local directory and name this one as its `mirror`."
            )


def _batch_digest(sent: list[bytes]) -> bytes:
    """The digest of a batch by those of its shares; empty if one is missing."""
    return combined_digest([part.decode() for part in sent]).encode() if all(sent) else b""
