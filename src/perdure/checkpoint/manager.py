"""`CheckpointManager`: when to save, what to keep, and where to resume.

In a group every process writes its share and the chief commits. A save is committed in the
background, and its error is raised by the next call of the manager. Invariant: one call at a time
changes a manager, in the process that made it.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import (
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    SupportsFloat,
)

from perdure.checkpoint.arguments import makes_state, metric_numbers, positive, step_number
from perdure.checkpoint.background import Background
from perdure.checkpoint.preemption import PreemptionFlag
from perdure.checkpoint.processes import Processes, SingleProcess
from perdure.checkpoint.prune import candidates, execute_prune, plan_prune
from perdure.checkpoint.recipe import allowed, check_group, check_resume, checked
from perdure.checkpoint.retention import Retention, ranked
from perdure.checkpoint.together import (
    all_do,
    as_save_error,
    chief_does,
    decline_save,
    load_together,
    save_together,
)
from perdure.checkpoint.turns import Turns, exclusive, exclusive_also_closed
from perdure.errors import (
    ArgumentError,
    PruneError,
    SaveError,
    StepNotFoundError,
    StoreError,
    WorkerLostError,
)
from perdure.heartbeats import beat, saving
from perdure.state import part_filter, part_names, restore_part, snapshot, unflatten
from perdure.state import restore as restore_state
from perdure.state.arena import Arena
from perdure.store import Leaf, Loaded, Run, Storage
from perdure.store.format import RecipeValue
from perdure.store.urls import name_at_step, split_step


class Restored(NamedTuple):
    """A state, and the step whose checkpoint it came from (0 for a fresh one)."""

    state: Any
    step: int


@dataclass(frozen=True)
class ManagerOptions:
    """What a manager does beyond saving at an interval and keeping the newest.

    `retention` says what stays besides the newest `max_to_keep`. `on_error` is what a save that does
    not commit (disk full, permission, ...) means: "raise" it at the next call, or "continue" with a
    warning and try again at the next save; the last good checkpoint stays in both. `codec`
    ("shuffle-zstd") stores chunks smaller where it can, for slow or dear storage; it may change from
    one session to the next, fingerprints do not depend on it, and it needs the extra `zstd`. `clock`
    gives seconds since 1970.
    """

    retention: Retention = field(default_factory=Retention)
    on_error: Literal["raise", "continue"] = "raise"
    codec: Literal["shuffle-zstd"] | None = None
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "continue"):
            raise StoreError(f"on_error: expected 'raise' or 'continue', found {self.on_error!r}.")


class CheckpointManager(Turns):
    """Saves a state every so many steps into a run directory, keeps some, restores the newest good.

    `directory` becomes a run directory at the first save; it must be empty, missing, or one
    already. A step is saved if a multiple of `save_interval_steps` has been passed since the last
    save, or since the restored step. `max_to_keep` (5, as in TensorFlow; None keeps
    all) bounds how many stay; `options` has the rest of it (best by a metric, one an hour, ...) and
    what a failed save means. `recipe` (from `strategy.recipe(dataset)`) is recorded in every
    checkpoint; one of another recipe is refused (`RecipeMismatchError`), save for the fields in `allow`
    and in PERDURE_ALLOW, which are a warning. In a group pass `processes=strategy.processes`: the
    recipes of all are compared too, at the first save or restore; every process makes the same calls,
    and an error in one process is raised in all of them.

    Threads may share a manager: their calls run one after the other. After `close`, and in a forked
    child, the calls that change something raise `StoreError`; those that only read still work.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | Storage,
        *,
        max_to_keep: int | None = 5,
        save_interval_steps: int = 1,
        options: ManagerOptions | None = None,
        recipe: Mapping[str, RecipeValue] | None = None,
        allow: tuple[str, ...] = (),
        processes: Processes | None = None,
    ) -> None:
        self._max_to_keep = None if max_to_keep is None else positive("max_to_keep", max_to_keep)
        self._interval = positive("save_interval_steps", save_interval_steps)
        self._recipe = checked({} if recipe is None else recipe)
        self._allow = allowed(allow)
        self._options = options or ManagerOptions()
        self._run = Run(
            directory, create=True, codec=self._options.codec, clock=self._options.clock
        )
        super().__init__(self._run.where)
        self._compared = False
        self._processes: Processes = processes or SingleProcess()
        self._background = Background()
        self._arena = Arena()
        self._last: int | None = None  # the step of the last save or restore
        self._entered = False
        # Neither holds the manager: one that nobody refers to any more lets the next writer in, as in
        # a notebook whose cell is run again.
        self.preemption = PreemptionFlag(describe=partial(_newest, self._run))
        self._finalizer = weakref.finalize(self, _abandon, self._run, self.preemption, self._pid)
        self._finalizer.atexit = False
        self._notes: list[str] = []
        self._told: set[str] = set()

    @property
    def directory(self) -> str:
        """Path or URL of the run directory."""
        return self._run.where

    @property
    def checkpoint_interval(self) -> int:
        """`save_interval_steps`, under the name that it has in TensorFlow."""
        return self._interval

    @property
    def latest_checkpoint(self) -> str | None:
        """The newest committed checkpoint as `RUN@STEP`, None before the first.

        `restore`, `Checkpoint.restore` and `perdure.load` accept that name.
        """
        step = self.latest_step()
        return None if step is None else name_at_step(self.directory, step)

    @property
    def checkpoints(self) -> list[str]:
        """The committed checkpoints as `RUN@STEP`, oldest first."""
        return [name_at_step(self.directory, step) for step in self.all_steps()]

    def all_steps(self) -> list[int]:
        """Committed steps, oldest first."""
        return self._run.steps()

    def latest_step(self) -> int | None:
        """The newest committed step, None before the first."""
        steps = self._run.steps()
        return steps[-1] if steps else None

    def best_step(self) -> int | None:
        """The committed step that is best by the retention's metric, None where none has it."""
        retention = self._options.retention
        if retention.best_metric is None:
            raise StoreError(
                f"{self.directory}: expected a metric to judge by, found none; name it: "
                f"options=ManagerOptions(retention=Retention(best_metric='accuracy'))."
            )
        held = candidates(self._run.contents())
        best = ranked(held, retention.best_metric, retention.best_mode)
        return best[0].step if best else None

    def metrics(self, step: int) -> dict[str, float | None]:
        """The metrics that `step` was saved with; None stands for NaN or an infinity."""
        return dict(self._run.manifest(step_number(step)).metrics)

    @exclusive
    def pin(self, step: int) -> None:
        """Keep `step` whatever retention says, until `unpin`; durable on return, in every later run.

        May be called twice. In a group every process calls it.

        Raises:
            StepNotFoundError: there is no checkpoint of that step.
        """
        self._change("pin", step, self._run.pin)

    @exclusive
    def unpin(self, step: int) -> None:
        """Let retention decide about `step` again. May be called twice."""
        self._change("unpin", step, self._run.unpin)

    def pinned_steps(self) -> list[int]:
        """Steps that were pinned."""
        return sorted(self._run.pinned())

    def fingerprint(self, step: int) -> str:
        """Fingerprint of a committed checkpoint: equal fingerprints are equal bits."""
        return self._run.manifest(step_number(step)).fingerprint

    def should_save(self, step: int) -> bool:
        """Whether `save` would save at this step without `force`. Changes nothing.

        True for a multiple of the interval, and if a multiple lies between the last saved (or
        restored) step and this one. A forced save counts as a save.
        """
        step = step_number(step)
        if step % self._interval == 0:
            return True
        if (
            self._last is None
        ):  # no restore, no save yet: a run continues from its newest checkpoint
            self._last = self.latest_step() or 0
        return step > self._last and step // self._interval > self._last // self._interval

    @exclusive
    def save(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, SupportsFloat] | None = None,
        *,
        force: bool = False,
    ) -> bool:
        """Save `state` as `step` if it is time, or in any case with `force`; True if it is saved.

        Returns as soon as `state` may change again; the checkpoint is durable once
        `wait_until_finished` or `close` returns. In a group every process calls this at the same steps
        with its own copy of the state, writes its share, and has the same result.

        Args:
            step: an integer from 0, of Python, NumPy or a framework.
            state: a tree of values that a checkpoint takes.
            metrics: numbers that are recorded with it, for retention and for people.
            force: save even if `should_save(step)` is False.

        Raises:
            ArgumentError: `step` is no step, or a metric is no number.
            UnsupportedLeafError: a value in `state` has no exact form.
            LockedError: another process writes there (in a group: at the next call).
            StateError: in a group, the copies of the state differ (at the next call).
            SaveError: the save before this one failed (a warning under `on_error="continue"`).
        """
        step = step_number(step)
        beat("step", step)
        if self._processes.count == 1:  # in a group only where all of them do: in a due save
            self._settle(wait=False)
        if not force and not self.should_save(step):
            return False
        beat("save", step)
        self._settle(wait=True)
        if self._processes.count > 1:
            self._last = step  # also in a process that raises: all decide alike at the next step
        try:
            if self._processes.count == 1:
                self._run.claim()
            self._submit(step, state, metrics)
        except SaveError as error:
            self._tolerate(error, stacklevel=4)
            return False
        finally:
            beat("step", step)
        self._last = step
        return True

    @exclusive_also_closed
    def wait_until_finished(self) -> bool:
        """Wait for the save under way; what it saved is durable then. Raises what it raised.

        Under `on_error="continue"` a failed save is a warning here too, `all_steps` lacks it, and this
        returns False.
        """
        return self._settle(wait=True)

    def is_saving_in_progress(self) -> bool:
        """Whether a save runs in the background."""
        return self._background.busy

    def restore(
        self,
        step: int | str | None = None,
        like: Any = None,
        *,
        leaves: str | Iterable[str] | None = None,
    ) -> Restored:
        """Restore `step`, or the newest good checkpoint, into `like`.

        Containers come back new; modules, optimizers and other stateful objects in `like` are
        changed in place. Newer checkpoints that are damaged are skipped with a warning and moved to
        quarantine. In a group every process restores the same step.

        Args:
            step: a step, a name such as `latest_checkpoint`, or None for the newest.
            like: the template; without one the state is nested dicts of NumPy arrays.
            leaves: paths of leaves or of branches (`"model"` for all below it): only these are read
                and replaced, and the rest of `like` stays as it is.

        Raises:
            StepNotFoundError: there is no such checkpoint.
            CorruptionError: the `step` that was asked for is damaged.
            MismatchError: `like` does not fit, or has nothing at one of `leaves`.
        """
        restored = self._restore(self._step_named(step), like, leaves)
        if restored is None:
            raise StepNotFoundError(
                f"{self.directory}: expected a checkpoint, found none. Save one first, or use "
                f"`restore_or_initialize`."
            )
        beat("compile", restored.step)
        return restored

    def restore_or_initialize(self, init: Any) -> Restored:
        """The newest good checkpoint, or a fresh state at step 0 where there is none.

        `init` is the fresh state, or a function without arguments that makes it; it also serves as
        the template of the restore. Modules can be called too, and are states: only a function, a
        method, a class or a `functools.partial` is called, and what cannot be saved itself.
        """
        self.require_open("restore_or_initialize")
        # Not in turn with other calls: it is the caller's function.
        like = all_do(self._processes, init) if makes_state(init) else init
        if (restored := self._restore(None, like, None)) is None:
            restored = Restored(like, 0)
            self._last = 0
        beat("compile", restored.step)
        return restored

    @exclusive
    def reached_preemption(self, step: int) -> bool:
        """Whether a process of the group got SIGTERM. Every process must ask at the same steps.

        The first call takes over SIGTERM: from then on the signal no longer ends the process, and
        the loop has to, by `save_and_exit`.
        """
        beat("step", step_number(step))
        self.preemption.install()
        return self._processes.any(self.preemption.raised)

    def save_and_exit(
        self, step: int, state: Any, metrics: Mapping[str, SupportsFloat] | None = None
    ) -> NoReturn:
        """Save `state` as `step`, wait until it is durable, and leave with exit status 75.

        Raises what the save raised, whatever `on_error` says: status 75 means that it is saved. A
        `TerminationConfig` may name another way to leave.
        """
        self._save_and_exit(step, state, metrics)
        self.exit_preempted()

    @exclusive
    def _save_and_exit(
        self, step: int, state: Any, metrics: Mapping[str, SupportsFloat] | None
    ) -> None:
        step = step_number(step)
        beat("save", step)
        self._settle(wait=True)
        self.preemption.before_saving(step)
        self._submit(step, state, metrics)
        self._background.wait()

    def exit_preempted(self) -> NoReturn:
        """Leave with exit status 75 once what was saved before is durable, without another save."""
        self._exit_preempted()
        self.preemption.leave()  # not in turn: `exit_fn` is the caller's

    @exclusive
    def _exit_preempted(self) -> None:
        self._settle(wait=True)
        self._closed = True
        self._release()
        self._processes.barrier()

    @exclusive
    def claim(self) -> None:
        """Become the writer now and not at the first save; `LockedError` where there is another.

        The directory is a run directory from here on, so that more may be put into it. In a group
        every process calls it, and the chief becomes the writer.
        """
        chief_does(self._processes, "claim()", self._run.begin_writing)

    @exclusive
    def delete(self, step: int) -> None:
        """Delete one checkpoint. In a group every process calls it.

        Raises:
            StepNotFoundError: there is no checkpoint of that step.
            StoreError: it is pinned.
            PruneError: deleting stopped in the middle.
        """

        def delete(step: int) -> None:
            if not self._run.delete([step]):
                self._run.manifest(step)

        self._change("delete", step, delete)

    def close(self) -> None:
        """Wait for the save under way, and let another writer in. Raises what the save raised.

        A closed manager stays closed: calls that change something raise `StoreError`. May be called
        twice; in a forked child it does nothing. While a `WorkerLostError` is being raised it does not
        wait: the save would wait for the lost process.
        """
        if self.in_forked_child:
            return
        self.require_no_call("close")
        beat("end")
        lost = isinstance(sys.exception(), WorkerLostError)
        with self._turn:
            self._closed = True
            try:
                if not (lost and self._background.busy):
                    self._settle(wait=True)
            finally:
                self.preemption.remove()
                if not self._background.busy:  # it is, if the wait was interrupted or left out
                    self._release()

    def __enter__(self) -> CheckpointManager:
        self.require_open("__enter__")
        if self._entered:
            raise StoreError(
                f"{self.directory}: expected one `with` for a manager, found a second one. The first "
                f"closes the manager at its end; make another manager after it."
            )
        self._entered = True
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _step_named(self, step: Any) -> int | None:
        """The step that the argument of `restore` means; None for the newest."""
        if not isinstance(step, str):
            return None if step is None else step_number(step)
        run, named = split_step(step)
        if named is None or run != self.directory:
            raise ArgumentError(
                f"step: expected a step, or a name such as {name_at_step(self.directory, 120)!r}, "
                f"found {step!r}. For another run directory use `perdure.load`."
            )
        return named

    def _change(self, call: str, step: Any, change: Callable[[int], None]) -> None:
        """One change of the run directory by the chief, with the same outcome in every process."""
        step = step_number(step)
        self._settle(wait=True)

        def named() -> None:
            try:
                change(step)
            except OSError as error:
                raise StoreError(
                    f"{self.directory}: {call}({step}) failed: {error}. No checkpoint was lost; try "
                    f"again."
                ) from error

        chief_does(self._processes, f"{call}({step})", named)

    def _submit(self, step: int, state: Any, metrics: Mapping[str, SupportsFloat] | None) -> None:
        self._check_group()
        try:
            numbers = metric_numbers({} if metrics is None else metrics)
            leaves = snapshot(state, self._arena)
        except BaseException as error:
            if self._processes.count > 1:  # the others are saving, and must not wait for this one
                self._background.submit(partial(self._decline, step, error))
                shared = as_save_error(error)
                if shared is not error and isinstance(error, Exception):
                    raise shared from error
            raise
        self._background.submit(self.preemption.timed(lambda: self._commit(step, leaves, numbers)))

    def _decline(self, step: int, error: BaseException) -> None:
        decline_save(self._processes.channel("save"), step, error)

    def _release(self) -> None:
        self._arena.release()
        self._run.close()

    def _commit(self, step: int, leaves: Mapping[str, Leaf], metrics: Mapping[str, float]) -> None:
        def prune() -> None:
            self._prune(step)

        saving(step)
        try:
            if self._processes.count == 1:
                self._run.save(step, leaves, self._recipe, metrics)
            else:
                group = self._processes.channel("save")
                save_together(self._run, group, step, leaves, self._recipe, metrics, prune)
                return
        finally:
            saving(None)
        prune()

    def _prune(self, step: int) -> None:
        if self._max_to_keep is None:
            return
        plan = plan_prune(self._run, self._max_to_keep, self._options.retention, saved=step)
        if plan.store.held_back:
            self._notes.append(f"{self.directory}: packs stay: {plan.store.held_back}")
        if plan.store.empty:
            return
        for pack, why in execute_prune(self._run, plan).left.items():
            self._notes.append(f"{self.directory}: {pack} was not compacted: {why}")

    def _settle(self, *, wait: bool) -> bool:
        """Raise the error of the background save, or warn and return False if that was asked for."""
        good = True
        try:
            if wait:
                self._background.wait()
            else:
                self._background.check()
        except (SaveError, PruneError) as error:
            self._tolerate(error)
            good = isinstance(error, PruneError)  # it comes after the commit
        if not self._background.busy:
            notes, self._notes = self._notes, []
            for note in notes:
                if note not in self._told:
                    self._told.add(note)
                    warnings.warn(note, stacklevel=4)
        return good

    def _tolerate(self, error: StoreError, stacklevel: int = 5) -> None:
        if self._options.on_error == "raise":
            raise error
        warnings.warn(
            f"{error} Training goes on; the next save tries again.", stacklevel=stacklevel
        )

    @exclusive
    def _restore(
        self, step: int | None, like: Any, leaves: str | Iterable[str] | None
    ) -> Restored | None:
        names = None if leaves is None else part_names(leaves)
        beat("restore")
        self._settle(wait=True)
        self._check_group()
        wanted = None if names is None else part_filter(names)
        loaded, elsewhere = load_together(self._run, self._processes, step, wanted)
        if loaded is None:
            return None
        if self._processes.is_chief:
            self._set_aside(loaded, elsewhere)

        def rebuild() -> Any:
            self._check_recipe(loaded)
            if like is None:
                return unflatten(loaded.leaves)
            if names is not None:
                return restore_part(like, loaded.leaves, names)
            return restore_state(like, loaded.leaves)

        state = all_do(self._processes, rebuild)
        if names is None:
            self._last = loaded.manifest.step
        return Restored(state, loaded.manifest.step)

    def _set_aside(self, loaded: Loaded, elsewhere: Collection[int]) -> None:
        for step, reason in loaded.skipped:
            if step in elsewhere:
                where = "It stays where it is, because process 0 can read it."
            else:
                try:
                    where = f"It was moved to {self._run.quarantine(step, reason)}."
                except StoreError as error:
                    where = f"It stays where it is: {error}"
            warnings.warn(
                f"{self.directory}: step {step} is damaged and was passed over for step "
                f"{loaded.manifest.step}: {reason} {where}",
                stacklevel=5,
            )

    def _check_recipe(self, loaded: Loaded) -> None:
        where = f"{self.directory}: step {loaded.manifest.step}"
        note = check_resume(where, loaded.manifest.recipe, self._recipe, self._allow)
        if note and self._processes.is_chief:
            warnings.warn(note, stacklevel=7)

    def _check_group(self) -> None:
        """Once: the recipe with its dataset, which the strategy could not compare."""
        if not self._compared:
            note = check_group(self._processes, self._recipe, self._allow)
            self._compared = True
            if note:
                warnings.warn(note, stacklevel=5)


def _newest(run: Run) -> str:
    """For people, when time runs out."""
    steps = run.steps()
    return (
        f"The newest committed checkpoint in {run.where} is step {steps[-1]}."
        if steps
        else f"{run.where} holds no checkpoint yet."
    )


def _abandon(run: Run, preemption: PreemptionFlag, pid: int) -> None:
    """What `close` does for a manager that nobody refers to any more; its save has ended then."""
    if os.getpid() != pid:  # the lock is the parent's
        return
    preemption.abandon()
    run.close()
