"""`CheckpointManager`: when to save, what to keep, and where to go on.

In a group every process writes its share and the chief commits. A save is committed in the
background, and what went wrong there is raised by the next call of the manager.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NoReturn, SupportsFloat

from perdure.checkpoint.background import Background
from perdure.checkpoint.mirror import EXIT_WAIT_S, Mirror
from perdure.checkpoint.preemption import PreemptionFlag
from perdure.checkpoint.processes import Processes, SingleProcess
from perdure.checkpoint.prune import candidates, execute_prune, plan_prune
from perdure.checkpoint.recipe import allowed, check_group, check_resume
from perdure.checkpoint.retention import Retention, ranked
from perdure.checkpoint.together import load_together, save_together
from perdure.errors import (
    PruneError,
    SaveError,
    StepNotFoundError,
    StoreError,
    WorkerLostError,
)
from perdure.heartbeats import beat, saving
from perdure.state import restore as restore_state
from perdure.state import snapshot, unflatten
from perdure.state.arena import Arena
from perdure.store import Leaf, Loaded, Run, Storage
from perdure.store.format import RecipeValue


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
    gives seconds since 1970. `mirror_wait` is how many seconds `close` waits at most for the mirror.
    """

    retention: Retention = field(default_factory=Retention)
    on_error: Literal["raise", "continue"] = "raise"
    codec: Literal["shuffle-zstd"] | None = None
    clock: Callable[[], float] = time.time
    mirror_wait: float = 300.0

    def __post_init__(self) -> None:
        if not self.mirror_wait >= 0:
            raise StoreError(f"mirror_wait: expected at least 0 seconds, found {self.mirror_wait}.")
        if self.on_error not in ("raise", "continue"):
            raise StoreError(f"on_error: expected 'raise' or 'continue', found {self.on_error!r}.")


class CheckpointManager:
    """Saves a state every so many steps into a run directory, keeps some, restores the newest good.

    `directory` becomes a run directory at the first save; it must be empty, missing, or one
    already. `save_interval_steps` spaces the saves, `max_to_keep` (5, as in TensorFlow; None keeps
    all) bounds how many stay; `options` has the rest of it (best by a metric, one an hour, ...) and
    what a failed save means. `recipe` (from `strategy.recipe(dataset)`) is recorded in every
    checkpoint; one of another recipe is refused (`RecipeMismatchError`), save for the fields in `allow`
    and in PERDURE_ALLOW, which are a warning. In a group pass `processes=strategy.processes`: the
    recipes of all are compared too, at the first save or restore.

    `mirror` (a path, a URL or a `Storage`) is a second run directory that receives a copy of every
    committed checkpoint in the background, under the same retention. It never delays or fails a save:
    a mirror that does not answer or lags is a warning, and is brought up to date after later saves and
    by `close`. A restore takes the newest good checkpoint of either, and warns when that is the
    mirror's.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | Storage,
        *,
        mirror: str | os.PathLike[str] | Storage | None = None,
        max_to_keep: int | None = 5,
        save_interval_steps: int = 1,
        options: ManagerOptions | None = None,
        recipe: Mapping[str, RecipeValue] | None = None,
        allow: tuple[str, ...] = (),
        processes: Processes | None = None,
    ) -> None:
        if max_to_keep is not None and max_to_keep < 1:
            raise StoreError(f"max_to_keep: expected None or at least 1, found {max_to_keep}.")
        if save_interval_steps < 1:
            raise StoreError(
                f"save_interval_steps: expected at least 1, found {save_interval_steps}."
            )
        self._options = options or ManagerOptions()
        self._run = Run(
            directory, create=True, codec=self._options.codec, clock=self._options.clock
        )
        self._mirror: Mirror | None = None
        if mirror is not None:
            kept, clock = self._options.retention, self._options.clock
            self._mirror = Mirror(self._run, mirror, max_to_keep, kept, clock)
        self._max_to_keep = max_to_keep
        self._interval = save_interval_steps
        self._recipe = dict(recipe or {})
        self._allow = allowed(allow)
        self._compared = False
        self._processes: Processes = processes or SingleProcess()
        self._background = Background()
        self._arena = Arena()
        self.preemption = PreemptionFlag(describe=self._newest)
        self._notes: list[str] = []
        self._told: set[str] = set()

    @property
    def directory(self) -> str:
        """Path or URL of the run directory."""
        return self._run.where

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
        return dict(self._run.manifest(step).metrics)

    def pin(self, step: int) -> None:
        """Keep `step` whatever retention says, until `unpin`; durable on return, in every later run.

        Raises `StepNotFoundError` where there is none. May be called twice.
        """
        self._settle(wait=True)
        if self._processes.is_chief:
            self._run.pin(step)
            self._update_mirror()

    def unpin(self, step: int) -> None:
        """Let retention decide about `step` again. May be called twice."""
        self._settle(wait=True)
        if self._processes.is_chief:
            self._run.unpin(step)
            self._update_mirror()

    def pinned_steps(self) -> list[int]:
        """Steps that were pinned."""
        return sorted(self._run.pinned())

    def fingerprint(self, step: int) -> str:
        """Fingerprint of a committed checkpoint: equal fingerprints are equal bits."""
        return self._run.manifest(step).fingerprint

    def should_save(self, step: int) -> bool:
        """Whether `save` would save at this step without `force`."""
        beat("step", step)
        return step % self._interval == 0

    def save(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, SupportsFloat] | None = None,
        *,
        force: bool = False,
    ) -> bool:
        """Save `state` as `step` if it is time, or in any case with `force`; True if it is saved.

        `metrics` are recorded with it, for retention and for people. Returns as soon as `state` may
        change again; the checkpoint is durable once `wait_until_finished` or `close` returns. Raises
        what the save before this one raised (or warns, see `ManagerOptions`), and `LockedError` when
        another process writes there (in a group: at the next call).

        In a group every process calls this at the same steps with its own copy of the state, writes
        its share, and comes out with the same result; copies that differ raise `StateError`.
        """
        self._settle(wait=False)
        if not self.should_save(step) and not force:
            return False
        beat("save", step)
        self._settle(wait=True)
        if self._processes.count == 1:
            try:
                self._run.claim()
            except SaveError as error:
                self._tolerate(error)
                return False
        self._submit(step, state, metrics)
        beat("step", step)
        return True

    def wait_until_finished(self, *, mirror: bool = False) -> None:
        """Wait for the save under way; what it saved is durable then. Raises what it raised.

        Under `on_error="continue"` a failed save is a warning here too, and `all_steps` lacks it.
        With `mirror` it also waits, for at most `ManagerOptions.mirror_wait` seconds, until the mirror
        has what was saved, and warns when it has not.
        """
        self._settle(wait=True)
        if mirror and self._mirror is not None and self._processes.is_chief:
            self._mirror.wait(self._options.mirror_wait)
            self._warn_of_mirror()

    def is_saving_in_progress(self) -> bool:
        """Whether a save runs in the background."""
        return self._background.busy

    def restore(self, step: int | None = None, like: Any = None) -> Restored:
        """Restore `step`, or the newest good checkpoint, into `like`.

        Containers come back new; modules, optimizers and other stateful objects in `like` are
        changed in place. Without `like` the state is nested dicts of NumPy arrays. Newer
        checkpoints that are damaged are passed over with a warning and moved to quarantine; a
        damaged `step` that was asked for raises `CorruptionError`. Raises `StepNotFoundError`
        where there is none, `MismatchError` where `like` does not fit.
        """
        restored = self._restore(step, like)
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
        the template of the restore.
        """
        like = init() if callable(init) and not hasattr(init, "state_dict") else init
        restored = self._restore(None, like) or Restored(like, 0)
        beat("compile", restored.step)
        return restored

    def reached_preemption(self, step: int) -> bool:
        """Whether a process of the group got SIGTERM. Every process must ask at the same steps.

        The first call takes over SIGTERM: from then on the signal no longer ends the process, and
        the loop has to, by `save_and_exit`.
        """
        beat("step", step)
        self.preemption.install()
        return self._processes.any(self.preemption.raised)

    def save_and_exit(
        self, step: int, state: Any, metrics: Mapping[str, SupportsFloat] | None = None
    ) -> NoReturn:
        """Save `state` as `step`, wait until it is durable, and leave with exit status 75.

        Raises what the save raised, whatever `on_error` says: status 75 means that it is saved. A
        `TerminationConfig` may name another way to leave.
        """
        beat("save", step)
        self._settle(wait=True)
        self.preemption.before_saving(step)
        self._submit(step, state, metrics)
        self._background.wait()
        self.exit_preempted()

    def exit_preempted(self) -> NoReturn:
        """Leave with exit status 75 once what was saved before is durable, without another save."""
        self._settle(wait=True)
        if self._mirror is not None:
            left = self.preemption.seconds_left()
            self._mirror.close(EXIT_WAIT_S if left is None else max(0.0, left - 1))
            for (
                note
            ) in self._mirror.notes():  # no warning: it could become an error and another status
                logging.getLogger(__name__).warning("%s", note)
        self._release()
        self._processes.barrier()
        self.preemption.leave()

    def claim(self) -> None:
        """Become the writer now and not at the first save; `LockedError` where there is another.

        The directory is a run directory from here on, so that more may be put into it.
        """
        if self._processes.is_chief:
            self._run.begin_writing()
            self._update_mirror()

    def delete(self, step: int) -> None:
        """Delete one checkpoint, in the mirror too. Raises `StepNotFoundError` where there is none,
        `StoreError` for a pinned one."""
        self._settle(wait=True)
        if not self._processes.is_chief:
            return
        if not self._run.delete([step]):
            self._run.manifest(step)
        if self._mirror is not None:
            # Waited for: a restore would take it from the mirror again.
            self._mirror.delete(step)
            self._mirror.wait(self._options.mirror_wait)
            self._warn_of_mirror()

    def close(self) -> None:
        """Wait for the save under way, and let another writer in. Raises what the save raised.

        Then it waits for the mirror, `ManagerOptions.mirror_wait` seconds at most, and warns with the
        steps that the mirror still lacks. While a `WorkerLostError` is on its way it does not wait: the
        save would, for who is gone.
        """
        beat("end")
        lost = isinstance(sys.exception(), WorkerLostError)
        try:
            if not (lost and self._background.busy):
                self._settle(wait=True)
        finally:
            self.preemption.remove()
            try:
                if self._mirror is not None:
                    self._mirror.close(0.0 if lost else self._options.mirror_wait)
            finally:
                if (
                    not self._background.busy
                ):  # as it is where the wait was interrupted, or left out
                    self._release()
            self._warn_of_mirror()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _submit(self, step: int, state: Any, metrics: Mapping[str, SupportsFloat] | None) -> None:
        self._check_group()
        leaves = snapshot(state, self._arena)
        numbers = {name: float(value) for name, value in (metrics or {}).items()}
        self._background.submit(self.preemption.timed(lambda: self._commit(step, leaves, numbers)))

    def _release(self) -> None:
        self._arena.release()
        self._run.close()

    def _newest(self) -> str:
        """For people, when time runs out."""
        steps = self._run.steps()
        return (
            f"The newest committed checkpoint in {self.directory} is step {steps[-1]}."
            if steps
            else f"{self.directory} holds no checkpoint yet."
        )

    def _commit(self, step: int, leaves: Mapping[str, Leaf], metrics: Mapping[str, float]) -> None:
        saving(step)
        try:
            if self._processes.count == 1:
                self._run.save(step, leaves, self._recipe, metrics)
            else:
                group = self._processes.channel("save")
                save_together(self._run, group, step, leaves, self._recipe, metrics)
        finally:
            saving(None)
        if not self._processes.is_chief:
            return
        try:
            self._prune(step)
        finally:
            self._update_mirror()

    def _prune(self, step: int) -> None:
        if self._max_to_keep is None:
            return
        in_use = None if self._mirror is None else self._mirror.copying
        plan = plan_prune(
            self._run, self._max_to_keep, self._options.retention, saved=step, in_use=in_use
        )
        if plan.store.held_back:
            self._notes.append(f"{self.directory}: packs stay: {plan.store.held_back}")
        if plan.store.empty:
            return
        for pack, why in execute_prune(self._run, plan).left.items():
            self._notes.append(f"{self.directory}: {pack} was not compacted: {why}")

    def _update_mirror(self) -> None:
        if self._mirror is not None:
            self._mirror.notify()

    def _warn_of_mirror(self) -> None:
        if self._mirror is not None:
            for note in self._mirror.notes():
                warnings.warn(note, stacklevel=4)

    def _settle(self, *, wait: bool) -> None:
        """Deal with what the background said: raise it, or warn where that was asked for."""
        try:
            if wait:
                self._background.wait()
            else:
                self._background.check()
        except (SaveError, PruneError) as error:
            self._tolerate(error)
        if not self._background.busy:
            notes, self._notes = self._notes, []
            for note in notes:
                if note not in self._told:
                    self._told.add(note)
                    warnings.warn(note, stacklevel=4)
        self._warn_of_mirror()

    def _tolerate(self, error: StoreError) -> None:
        if self._options.on_error == "raise":
            raise error
        warnings.warn(f"{error} Training goes on; the next save tries again.", stacklevel=4)

    def _restore(self, step: int | None, like: Any) -> Restored | None:
        beat("restore")
        self._settle(wait=True)
        self._check_group()
        found = load_together(self._run, self._processes, step, self._mirror)
        for note in found.notes:
            warnings.warn(f"{self.directory}: {note}", stacklevel=4)
        if (loaded := found.loaded) is None:
            return None
        if self._processes.is_chief:
            self._set_aside(loaded)
        self._check_recipe(loaded)
        state = unflatten(loaded.leaves) if like is None else restore_state(like, loaded.leaves)
        return Restored(state, loaded.manifest.step)

    def _set_aside(self, loaded: Loaded) -> None:
        for step, reason in loaded.skipped:
            try:
                where = f"It was moved to {self._run.quarantine(step, reason)}."
            except StoreError as error:
                where = f"It stays where it is: {error}"
            newest = loaded.manifest.step
            instead = f"step {newest}" if step != newest else "its copy in the mirror"
            warnings.warn(
                f"{self.directory}: step {step} is damaged and was passed over for {instead}: "
                f"{reason} {where}",
                stacklevel=5,
            )

    def _check_recipe(self, loaded: Loaded) -> None:
        where = f"{self.directory}: step {loaded.manifest.step}"
        note = check_resume(where, loaded.manifest.recipe, self._recipe, self._allow)
        if note and self._processes.is_chief:
            warnings.warn(note, stacklevel=5)

    def _check_group(self) -> None:
        """Once: the recipe with its dataset, which the strategy could not compare."""
        if not self._compared:
            note = check_group(self._processes, self._recipe, self._allow)
            self._compared = True
            if note:
                warnings.warn(note, stacklevel=4)
