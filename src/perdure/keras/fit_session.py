"""Saves one call of `fit`, and resumes it.

It is the last callback, so that a save holds the state of all others after the same step, and a restore
comes after all that they do. Invariant: `step` is the number of batches that are in the model, and what
the checkpoint of a step holds is a function of the step.
"""

from __future__ import annotations

import json
import warnings
from contextlib import suppress
from typing import Any

import keras
import numpy as np
from keras.callbacks import Callback

from perdure.checkpoint import Checkpoint, CheckpointManager
from perdure.checkpoint.recipe import allowed, check_resume
from perdure.errors import TrainError
from perdure.keras import fit_arguments, fit_saving
from perdure.keras.callback_state import CallbackState, is_plain, pack, unpack
from perdure.keras.fit_batches import FitBatches, position_warning
from perdure.keras.fit_internals import RunningFit
from perdure.runtime.heartbeats import beat
from perdure.state import flatten, restore, snapshot, unflatten
from perdure.state.snapshot_buffer import SnapshotBuffer
from perdure.store import Leaf

_REMEDY = (
    "If it is the backup of another `fit` (another fold, another stage), give each one a `backup_dir` "
    "of its own; else use the recipe of the backup"
)
_CALLBACKS = "callbacks"
_RESTORED_IN_PLACE = frozenset({"model", "optimizer", "metrics", fit_saving.ATTRIBUTES, _CALLBACKS})


class FitSession(Callback):
    """Follows one call of `fit`. Made by `BackupAndRestore`; it ends with the call."""

    def __init__(
        self,
        fit: RunningFit,
        manager: CheckpointManager,
        owner: Callback,
        *,
        save_freq: str | int | bool,
        preemptible: bool,
        allow: tuple[str, ...],
    ) -> None:
        super().__init__()
        validation = fit.arguments["validation_data"]
        if problem := position_warning(fit.iterator.data, validation, fit.model):
            warnings.warn(f"BackupAndRestore: {problem}", stacklevel=4)
        self._fit = fit
        self._manager = manager
        self._save_interval_steps = save_freq if type(save_freq) is int else None
        self._save_each_epoch = save_freq == "epoch"
        self._preemptible = preemptible
        self._allow = allow
        self._owner = owner
        self._batches = FitBatches(fit.iterator)
        self._epoch = 0
        self._step = 0
        self._saved_step = -1
        self._save_is_due = False
        self._logs: dict[str, float] = {}
        self._callback_state: CallbackState
        self._recipe: dict[str, Any]
        self._state_before_validation: dict[str, Leaf] = {}
        self._buffer = SnapshotBuffer()
        if self._preemptible:
            manager.preemption.install(fit.iterator.frame_test())

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore what was saved. All other callbacks have begun."""
        fit, manager = self._fit, self._manager
        others = (self, self._owner)
        self._callback_state = CallbackState(fit.callbacks.callbacks, others, fit.model)
        self._recipe = fit_arguments.describe(fit, self._callback_state.describe())
        fit.set_initial_epoch(None)
        self._epoch = fit.arguments["initial_epoch"]
        try:
            fit_saving.attributes(fit.model)  # refuses what could not be restored
            manager.claim()  # first, so that no other process resumes from the same checkpoint
            if manager.latest_step() is not None:
                self._resume()
            if self._preemptible:
                fit.call_before_validation(self._before_validation)
            beat("compile", self._step)
        except BaseException:
            fit_saving.close_manager(manager)
            raise

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._fit.set_initial_epoch(None)  # it has been read; the next `fit` begins at its own

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # Not self.model: on JAX it fetches the whole state, in every step.
        before, batches = self._step, self._batches
        self._step += batches.count_execution(batch)
        self._logs = dict(logs or {})
        self._callback_state.stepped()
        beat("step", self._step)
        self._record()
        interval = self._save_interval_steps
        if interval is not None and self._step // interval > before // interval:
            self._save_is_due = True
        if self._preemptible:
            if self._manager.reached_preemption(self._step):
                self._leave()
            if batches.length_is_unknown or self._fit.model.stop_training:
                batches.keep_position()  # this may be the last batch, and Keras makes no other pass
        if self._save_is_due and not batches.at_end:  # at the end, the end of the epoch is saved
            self._save()

    def _before_validation(self) -> None:
        """Copy the state after the last batch. A resume repeats the validation, which resets the
        metrics and may draw from seeds; other callbacks may swap the weights for it."""
        if self._manager.reached_preemption(self._step):
            self._leave()
        self._state_before_validation = snapshot(self._state(), self._buffer)

    def on_test_begin(self, logs: Any = None) -> None:
        """A validation of this `fit` begins; other calls of `evaluate` have other callbacks."""
        self.on_test_batch_end(-1)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._preemptible and self._manager.reached_preemption(self._step):
            self._leave(unflatten(self._state_before_validation))
        beat("evaluate", self._step)

    def on_test_end(self, logs: Any = None) -> None:
        beat("step", self._step)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch + 1
        self._logs = dict(logs or {})
        self._batches.next_epoch()
        beat("step", self._step)
        if self._preemptible and self._manager.reached_preemption(self._step):
            self._leave()
        if self._save_each_epoch or self._save_is_due:
            self._save()

    def on_train_end(self, logs: Any = None) -> None:
        self._fit.set_initial_epoch(None)
        self._fit.restore_callbacks()
        self._fit.callbacks.callbacks.remove(self)

    def _resume(self) -> None:
        fit, manager = self._fit, self._manager
        tree, self._step = manager.restore()
        self._saved_step = self._step
        if not isinstance(tree, dict) or not {"fit", "recipe", "model"} <= tree.keys():
            raise TrainError(
                f"{manager.directory}: expected a backup of `fit`, found checkpoints of something "
                f"else. Give BackupAndRestore a directory of its own."
            )
        where = f"{manager.directory}: the backup of step {self._step}"
        saved = json.loads(bytes(tree["recipe"]))
        if note := check_resume(where, saved, self._recipe, allowed(self._allow), _REMEDY):
            warnings.warn(note, stacklevel=5)
        position = unpack(tree["fit"])
        in_epoch = bool(position["batches"]["executions"])
        begun = position["epoch"] + in_epoch
        if begun > fit.arguments["epochs"]:
            raise TrainError(
                f"{where} is {'in' if in_epoch else 'at the end of'} epoch {begun}, and fit was called "
                f"with epochs={fit.arguments['epochs']}, which ends before. Nothing was changed. Call "
                f"fit with epochs={begun} or more, or give BackupAndRestore another directory."
            )
        fit.build()
        self._callback_state.reset()
        self._restore_members(tree)
        self._epoch, self._logs = position["epoch"], position["logs"]
        if in_epoch:
            fit.set_initial_epoch(self._epoch)
            self._batches.restore(position["batches"], lambda: self._reenter(tree, position))
        else:
            stopped = position["stop_training"]
            fit.set_initial_epoch(fit.arguments["epochs"] if stopped else self._epoch)
            self._batches.restore(position["batches"], lambda: None)
            self._callback_state.restore(position["others"])
            fit.model.stop_training = stopped

    def _restore_members(self, tree: dict[str, Any]) -> None:
        members = {n: member for n, member in self._members().items() if n in _RESTORED_IN_PLACE}
        saved = {name: member for name, member in tree.items() if name in _RESTORED_IN_PLACE}
        # Callbacks may be added and left out.
        held, kept = members.pop(_CALLBACKS, {}), saved.pop(_CALLBACKS, {})
        if both := held.keys() & kept.keys():
            members[_CALLBACKS] = {name: held[name] for name in both}
            saved[_CALLBACKS] = {name: kept[name] for name in both}
        restore(members, flatten(saved))

    def _reenter(self, tree: dict[str, Any], position: dict[str, Any]) -> Any:
        """Before the first batch in the middle of an epoch: restore all again, because callbacks have
        begun the epoch a second time and Keras has reset its metrics."""
        self._restore_members(tree)
        self._callback_state.restore(position["others"])
        self._fit.model.stop_training = position["stop_training"]
        return self._fit.replay_step(self._logs)

    def _members(self) -> dict[str, Any]:
        model = self._fit.model
        named = fit_saving.members(model) | {"metrics": fit_saving.metrics(model)}
        others = {
            fit_saving.ATTRIBUTES: fit_saving.attributes(model),
            _CALLBACKS: self._callback_state.members(),
        }
        return named | {name: held for name, held in others.items() if held}

    def _position(self) -> dict[str, Any]:
        position = {
            "epoch": self._epoch,
            "logs": {name: _logged(name, value) for name, value in self._logs.items()},
            "stop_training": bool(self._fit.model.stop_training),
            "batches": self._batches.position(),
            "others": self._callback_state.state(),
        }
        return pack(position)

    def _state(self) -> Checkpoint:
        self._fit.update_model()
        recipe = np.frombuffer(json.dumps(self._recipe, sort_keys=True).encode(), np.uint8)
        return Checkpoint(**self._members(), fit=self._position(), recipe=recipe)

    def _save(self) -> None:
        self._save_is_due = False
        # Not again if the last batch was saved before the epoch ended: a resume repeats its end.
        if self._step != self._saved_step:
            numbers = {
                "epoch": self._epoch
            }  # how many are finished; a log of this name replaces it
            numbers |= self._numbers()
            state = self._state()
            fit_saving.finish_others(self._manager)
            self._manager.save(self._step, state, numbers, force=True)
            self._saved_step = self._step

    def _record(self) -> None:
        journal = self._manager.journal
        if journal.records_saves and journal.wants(self._step):
            self._fit.update_model()
            journal.record(self._step, self._members(), metrics=self._numbers())

    def _numbers(self) -> dict[str, Any]:
        return {name: value for name, value in self._logs.items() if np.ndim(value) == 0}

    def _leave(self, state: Any = None) -> None:
        fit_saving.finish_others(self._manager)
        if self._step == self._saved_step:
            self._manager.exit_preempted()
        self._manager.save_and_exit(self._step, self._state() if state is None else state)


def _logged(name: str, value: Any) -> Any:
    """A plain value for what a `train_step` returned under `name`: a number or an array."""
    if is_plain(value):
        return value
    with suppress(Exception):  # whatever the backend raises for what it cannot convert
        array = np.asarray(keras.ops.convert_to_numpy(value))
        if is_plain(array):
            return array
    raise TrainError(
        f"{name!r} in the logs of a step: expected a number or an array, found {type(value).__name__}, "
        f"which cannot be saved. Return numbers or arrays from `train_step`."
    )
