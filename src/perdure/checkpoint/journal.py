"""`Journal`: digests of the steps of a run, compared whenever a step is computed again; and the digests
of the parts of a step for `perdure bisect` and `perdure doctor`.

Invariant: once a repeated step has other bits, nothing more is committed. Only the chief of a group
writes; lines become durable with the checkpoint that follows, and the loop waits for no disk.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import NoneType
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3

from perdure.checkpoint.arguments import Metrics, metric_numbers, step_number
from perdure.checkpoint.group_call import together
from perdure.checkpoint.manager_options import ManagerOptions
from perdure.digests import Digest, combined, digests_of_leaves, leaf_digests
from perdure.digests.digest import leaf_digests_of_each
from perdure.errors import (
    JournalMismatchError,
    PerdureError,
    SaveError,
    StoreError,
    UnsupportedLeafError,
    WorkerLostError,
    warn_caller,
)
from perdure.runtime.heartbeats import beat
from perdure.runtime.process_group import ATTEMPT, Processes, SingleProcess, group_of
from perdure.state import flatten
from perdure.state.per_rank import rank_context
from perdure.store import LocalStorage, Run
from perdure.store.drill_hook import drill_hook
from perdure.store.leaf import Leaves
from perdure.store.manifest import plain_metrics
from perdure.store.run_events import JournalEntry, first_difference
from perdure.text import quoted


class Journal:
    """One line for each recorded step in the log of the run directory (docs/JOURNAL.md).
    `manager.save` records by itself if `ManagerOptions.journal_every` is given."""

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
        self._is_closed = False
        self._is_used = self._every is not None  # the same in all processes of a group
        self._newest = -1
        self._attempt = 0
        self._noted: dict[str, Any] = {}
        self._warned: set[str] = set()
        self._reset()
        if self._every is not None:
            self._require_local()

    def _reset(self) -> None:
        self._is_open = self._is_raised = False  # raised: the failure, in all processes of a group
        self._after = -1  # the newest step whose state is certain
        self._ahead: deque[JournalEntry] = deque()  # lines of steps that are repeated
        self._last: JournalEntry | None = None  # the line before those
        self._recorded: int | None = None  # by a call of `record`
        self._steps: tuple[int | None, int | None] = None, None  # the last two different ones
        self._failure: PerdureError | None = None

    @property
    def records_saves(self) -> bool:
        """Whether each call of `save` records its step (`ManagerOptions.journal_every`)."""
        return self._every is not None

    def wants(self, step: int) -> bool:
        """Whether `step` is recorded: a multiple of `ManagerOptions.journal_every` lies between the
        step that the program made or restored last and this one, so that a resumed run records the
        same steps."""
        every = self._every or 1
        before = self._steps[0] if step == self._steps[1] else self._steps[1]
        return step % every == 0 or (before is not None and step // every > before // every)

    def skip(self, step: int) -> None:
        """The program has made a step that it does not record."""
        if step != self._steps[1]:
            self._steps = self._steps[1], step

    def record(self, step: int, state: Any, batch: Any = None, metrics: Metrics = None) -> None:
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

    def record_saved(self, step: int, state: Any, metrics: Metrics) -> None:
        """`record` in each call of `manager.save`, if `journal_every` is given; see there."""
        if drill_hook() is not None:
            show_doctor(self._run.where, step, state, self._processes)
        if self._every is not None and step != self._recorded:
            self._record(step, state, None, metrics)

    def _record(self, step: int, state: Any, batch: Any, metrics: Metrics) -> bool:
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
                if self._tolerates and isinstance(error, SaveError):
                    warn_caller(f"{error} Training continues without this line.")
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
                warn_caller(f"{self._run.where}: the lines of its journal lack the batch: {error}")
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
            with suppress(OSError):
                self._run.log.sync()
            self._reset()

    def require_agreement(self, call: str = "save") -> None:
        """Raise what went wrong in the chief, in every process, before a save. A collective."""
        if self._is_used:
            try:
                together(self._processes, self._raise_failure, by_chief=NoneType, call=call)
            except PerdureError:
                self._is_raised = True
                raise

    def finish(self, error: BaseException | None) -> None:
        """Raise what no save has raised yet, in every process of a group. A collective without
        `error`, the one that this process raises: the others may then wait for something else."""
        if self._processes.count == 1 or self._is_raised or not self._is_used or self._is_closed:
            return
        if error is None:
            self.require_agreement("close")
        elif self._failure is not None:
            if isinstance(error, SystemExit) and not error.code:
                raise self._failure
            warn_caller(f"{self._failure}")

    def close(self) -> None:
        """Make all lines durable; nothing is recorded any more."""
        with self._guard:
            self._is_closed = True
            if self._is_used:
                try:
                    self._run.log.sync()
                except OSError as error:
                    where = self._run.where
                    warn_caller(f"{where}: the journal could not be made durable: {error}")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _entry(
        self, step: int, state: Any, batch: Any, metrics: Metrics, noted: Mapping[str, Any]
    ) -> JournalEntry:
        topology = {"host": socket.gethostname(), "processes": self._processes.count}
        if "devices" in noted:
            topology["devices"] = noted["devices"]
        return JournalEntry(
            step=step,
            state=state_digest(state, self._processes),
            total=noted.get("total"),
            batch=noted.get("batch") if batch is None else batch_digest(batch),
            metrics=plain_metrics(metric_numbers(metrics)),
            attempt=0,  # known once the journal was read
            topology=topology,
        )

    def _keep(self, entry: JournalEntry) -> None:
        try:
            self._open()
            entry = msgspec.structs.replace(entry, attempt=self._attempt)
            while self._ahead and self._ahead[0].step <= entry.step:
                self._last = self._ahead.popleft()
            before = self._last
            if before is not None and before.step == entry.step:
                self._compare(before, entry)
            elif entry.step > self._newest:
                self._run.log.append(entry, durable=False)
                self._last, self._newest = entry, entry.step
        except OSError as error:
            raise SaveError(
                f"{self._run.where}: the line of step {entry.step} could not be written into "
                f"the journal: {error}. Every checkpoint and every earlier line is unchanged."
            ) from error

    def _open(self) -> None:
        """Become the writer, and read the lines of the steps that this program repeats; once."""
        self._run.begin_writing()
        if self._is_open:
            return
        view = self._run.log.check()
        view.require()
        attempts = 0
        self._ahead.clear()
        for entry in view.entries(self._run.storage):
            attempts = max(attempts, entry.attempt)
            if entry.step >= self._after:
                self._ahead.append(entry)
            else:
                self._last = entry
        self._newest, self._is_open = view.journal.newest_step, True
        if not self._attempt:
            stated = os.environ.get(ATTEMPT, "")
            self._attempt = int(stated) if stated.isdecimal() else attempts + 1

    def _compare(self, before: JournalEntry, entry: JournalEntry) -> None:
        """Raise for the first digest that differs, warn about metrics; a drill compares by itself."""
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
                    f"{before.metrics[name]}, as in its line. It depends on more than the state."
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
        ways = f"`perdure rollback {quoted(where)}@{max(self._after, 0)}` sets the lines after it aside"
        if self._after < 0:
            ways = "use another run directory"
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
    """The digest of a batch from the digests of its shares; empty if one is missing."""
    return blake3(b"".join(sent)).hexdigest(16).encode() if all(sent) else b""


def state_digest(tree: Any, processes: Processes | None = None) -> str:
    """`perdure.digests.digest` of all leaves as 32 hexadecimal digits, without members in
    `PerRank`. An array that is sharded over processes has none."""
    leaves = digests_by_path(tree, group_of(processes))
    return combined(leaves).hex


def digests_by_path(tree: Any, group: Processes) -> dict[str, Digest]:
    """The digest of each leaf, without members in `PerRank`; errors as `state_digest`."""
    with rank_context(group.index, group.count) as rank:
        # The chief digests alone, so that nothing here may wait for other processes.
        leaves = leaf_digests(tree) if group.count == 1 else digests_of_leaves(_whole(tree))
        return {path: leaves[path] for path in leaves if not rank.owns(path)}


def show_doctor(where: str, step: int, tree: Any, group: Processes) -> None:
    """Under `perdure doctor`, show it a state that the program saves or records."""
    hook = drill_hook()
    if hook is not None and hook.is_doctor and group.is_chief:
        leaves = digests_by_path(tree, group)
        hook.recorded(where, step, {path: digest.hex for path, digest in leaves.items()})


def batch_digest(batch: Any) -> str:
    """`state_digest` of a batch, which need not come back: any array counts by its bytes."""
    with _refusing_batch():
        return state_digest(_by_bytes(batch))


def share_digests(shares: Sequence[Any]) -> list[str]:
    """`batch_digest` of each share of a batch, all in one pass."""
    with rank_context(0, 1) as rank, _refusing_batch():
        return [
            combined({path: leaves[path] for path in leaves if not rank.owns(f"{n}/{path}")}).hex
            for n, leaves in enumerate(leaf_digests_of_each(_by_bytes(list(shares))))
        ]


@contextmanager
def _refusing_batch() -> Iterator[None]:
    try:
        yield
    except UnsupportedLeafError as error:
        reason = str(error).replace("(the state itself)", "(the batch itself)")
        reason = reason.replace("leave it out of the state", "leave it out of the batch")
        raise UnsupportedLeafError(
            f"the batch has no digest, because of a value in it: {reason} A batch is any tree of "
            f"arrays, numbers and strings; pass these to `record`, or leave `batch` out."
        ) from error


def _by_bytes(value: Any) -> Any:
    """`value`, with dtype, shape and bytes in place of each array that no checkpoint takes."""
    if isinstance(value, dict):
        return {key: _by_bytes(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_by_bytes, value))
    if type(value) in (list, tuple):
        return [_by_bytes(item) for item in value]
    if isinstance(value, np.memmap):
        value = value.view(np.ndarray)
    if not isinstance(value, (np.ndarray, np.generic)):
        return value
    kind = value.dtype
    if kind.hasobject:
        return _by_bytes(value.tolist()) if kind.names is None else value
    if kind.kind in "USmM" or kind.type is np.void:
        octets = np.frombuffer(value.tobytes(), np.uint8)
        return {"dtype": str(kind), "shape": list(value.shape), "bytes": octets}
    return value


def _whole(tree: Any) -> Leaves:
    leaves = flatten(tree)
    for path, leaf in leaves.items():
        if leaf.shards is not None:
            raise UnsupportedLeafError(
                f"{path}: an array that is sharded over the processes of the group, and the journal "
                f"digests whole arrays. Leave `journal_every` out for this run."
            )
    return leaves


def is_tracing() -> bool:
    """Whether this process replays a step that is compared with a step of another run."""
    hook = drill_hook()
    return hook is not None and hook.traced is not None


def is_computing_traced(step: int) -> bool:
    """Whether the step that is asked for is, or may be, computed now: the first one after the step
    before was reported, or the one that the strategy counts as `step`."""
    hook = drill_hook()
    return hook is not None and hook.traced in (step, hook.finished + 1)


def trace_recorded(step: int, part: str, value: Any, group: Processes | None = None) -> None:
    """Report a part of a step (of `perdure.drill.step_bisect.PARTS`), if it is asked for. `step`
    counts how many steps the state contains."""
    hook = drill_hook()
    if hook is not None and hook.traced == step:
        trace_part(part, value, group=group)


def trace_part(
    part: str, value: Any, replica: int | None = None, group: Processes | None = None
) -> None:
    """Report a part of the step that is asked for, of a logical replica if it is one's."""
    hook = drill_hook()
    if hook is None:
        return
    with suppress(UnsupportedLeafError):
        digests = digests_by_path(value, group or SingleProcess())
        hook.trace(part, replica, {path: digest.hex for path, digest in digests.items()})
