"""One call of `fit` under a backup: saves it, and brings it back.

Stands behind every other callback, so that a save holds what all of them know of the same step, and a
restore is the last word before the loop goes on. Invariant: `step` is the number of batches that are
in the model, and what the checkpoint of a step holds is a function of the step.
"""

from __future__ import annotations

import json
import warnings
from contextlib import suppress
from typing import Any
from weakref import ref

import keras
import numpy as np
from keras.callbacks import Callback

from perdure.checkpoint import Checkpoint, CheckpointManager
from perdure.checkpoint.recipe import allowed, check_resume
from perdure.errors import TrainError
from perdure.heartbeats import beat
from perdure.keras import fit_arguments, fit_inputs, model_state, packing
from perdure.keras.callback_state import CallbackState
from perdure.keras.fit_batches import FitBatches
from perdure.keras.fit_internals import RunningFit, is_running
from perdure.keras.open_managers import close_manager, finish_others
from perdure.state import flatten, restore, snapshot, unflatten
from perdure.state.snapshot_buffer import SnapshotBuffer
from perdure.store import Leaf

# Members that are restored in place.
_HERE = frozenset({"model", "optimizer", "metrics", model_state.ATTRIBUTES})


class FitSession(Callback):
    """Follows one call of `fit`; made by `BackupAndRestore` and gone with the call."""

    def __init__(
        self,
        fit: RunningFit,
        manager: CheckpointManager,
        save_freq: str | int | bool,
        **options: Any,
    ) -> None:
        super().__init__()
        if doubt := fit_inputs.doubts(fit.iterator.data_adapter):
            warnings.warn(f"BackupAndRestore: {doubt}", stacklevel=4)
        self._fit = fit
        self._manager = manager
        self._every = save_freq if type(save_freq) is int else None
        self._each_epoch = save_freq == "epoch"
        self._preemptible: bool = options["save_before_preemption"]
        self._allow: tuple[str, ...] = options["allow"]
        self._owner: Callback = options["owner"]
        self._batches = FitBatches(fit)
        self._epoch = 0
        self._step = 0
        self._saved = -1
        self._due = False
        self._logs: dict[str, float] = {}
        self._others: CallbackState
        self._recipe: dict[str, Any]
        self._ahead_of_test: dict[str, Leaf] = {}  # the whole state as validation begins
        self._arena = SnapshotBuffer()
        if self._preemptible:
            iterator = ref(fit.iterator)
            manager.preemption.install(lambda frame: is_running(frame, iterator()))

    def on_train_begin(self, logs: Any = None) -> None:
        """All other callbacks have begun: bring back what was saved."""
        fit, manager = self._fit, self._manager
        self._others = CallbackState(fit.callbacks.callbacks, (self, self._owner))
        self._recipe = fit_arguments.describe(fit, self._others.describe())
        fit.model._initial_epoch = None
        self._epoch = fit.arguments["initial_epoch"]
        try:
            model_state.attributes(fit.model)  # which refuses what could not be brought back
            manager.claim()  # before the newest is read: another process must not go on from it too
            if manager.latest_step() is not None:
                self._resume()
            if self._preemptible:
                fit.ahead_of_validation(self._ahead_of_validation)
            beat("compile", self._step)
        except BaseException:
            close_manager(manager)
            raise

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._fit.model._initial_epoch = None  # it was read; the next `fit` begins at its own

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # Not self.model: on JAX it fetches the whole state, in every step.
        before, batches = self._step, self._batches
        self._step += batches.executed(batch)
        self._logs = dict(logs or {})
        beat("step", self._step)
        if self._every is not None and self._step // self._every > before // self._every:
            self._due = True
        if self._preemptible:
            if self._manager.reached_preemption(self._step):
                self._leave()
            if batches.unknown or self._fit.model.stop_training:
                batches.keep()  # else Keras makes a pass behind the last batch, where it is noticed
        if self._due and not batches.at_end:  # where it is, the end of the epoch is worth more
            self._save()

    def _ahead_of_validation(self) -> None:
        """All is as it was behind the last batch. A resume begins the validation anew, which empties
        the metrics and may draw from seeds; other callbacks may swap the weights for it."""
        if self._manager.reached_preemption(self._step):
            self._leave()
        self._ahead_of_test = snapshot(self._state(), self._arena)

    def on_test_begin(self, logs: Any = None) -> None:
        """Of the validation of an epoch; no other `evaluate` calls the callbacks of this `fit`."""
        self.on_test_batch_end(-1)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._preemptible and self._manager.reached_preemption(self._step):
            self._leave(unflatten(self._ahead_of_test))
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
        if self._each_epoch or self._due:
            self._save()

    def on_train_end(self, logs: Any = None) -> None:
        self._fit.model._initial_epoch = None
        self._fit.release()
        self._fit.callbacks.callbacks.remove(self)

    def _resume(self) -> None:
        fit, manager = self._fit, self._manager
        tree, self._step = manager.restore()
        self._saved = self._step
        if not isinstance(tree, dict) or not {"fit", "recipe", "model"} <= tree.keys():
            raise TrainError(
                f"{manager.directory}: expected a backup of `fit`, found checkpoints of something "
                f"else. Give BackupAndRestore a directory of its own."
            )
        self._check(json.loads(bytes(tree["recipe"])))
        found = packing.unpack(tree["fit"])
        inside = bool(found["batches"]["executions"])
        begun = found["epoch"] + inside
        if begun > fit.arguments["epochs"]:
            raise TrainError(
                f"{manager.directory}: the backup of step {self._step} is "
                f"{'in' if inside else 'at the end of'} epoch {begun}, and fit was called with "
                f"epochs={fit.arguments['epochs']}, which ends before. Nothing was changed. Call fit "
                f"with epochs={begun} or more, or give BackupAndRestore another directory to begin "
                f"again."
            )
        fit.build()
        self._bring_back(tree)
        self._epoch, self._logs = found["epoch"], found["logs"]
        if found["batches"]["executions"]:
            fit.model._initial_epoch = self._epoch
            self._batches.go_back(found["batches"], lambda: self._again(tree, found))
        else:
            ended = found["stop_training"]
            fit.model._initial_epoch = fit.arguments["epochs"] if ended else self._epoch
            self._batches.go_back(found["batches"], lambda: None)
            self._others.restore(found["others"])
            fit.model.stop_training = ended

    def _check(self, there: dict[str, Any]) -> None:
        where = f"{self._manager.directory}: the backup of step {self._step}"
        if note := check_resume(where, there, self._recipe, allowed(self._allow)):
            warnings.warn(note, stacklevel=6)

    def _bring_back(self, tree: dict[str, Any]) -> None:
        here = {name: each for name, each in self._members().items() if name in _HERE}
        stored = {name: each for name, each in tree.items() if name in _HERE}
        restore(here, flatten(stored))

    def _again(self, tree: dict[str, Any], found: dict[str, Any]) -> Any:
        """Before the first batch, in the middle of an epoch: callbacks have begun the epoch anew, and
        Keras has emptied its metrics."""
        self._bring_back(tree)
        self._others.restore(found["others"])
        self._fit.model.stop_training = found["stop_training"]
        return self._fit.stand_in(self._logs)

    def _members(self) -> dict[str, Any]:
        model = self._fit.model
        named = model_state.members(model) | {"metrics": model_state.metrics(model)}
        more = model_state.attributes(model)
        return named | ({model_state.ATTRIBUTES: more} if more else {})

    def _position(self) -> dict[str, Any]:
        """Where `fit` is: what is no variable of the model."""
        found = {
            "epoch": self._epoch,
            "logs": {name: _logged(name, value) for name, value in self._logs.items()},
            "stop_training": bool(self._fit.model.stop_training),
            "batches": self._batches.position(),
            "others": self._others.state(),
        }
        return packing.pack(found)

    def _state(self) -> Checkpoint:
        model = self._fit.model
        if hasattr(model, "jax_state_sync"):
            model.jax_state_sync()
        recipe = np.frombuffer(json.dumps(self._recipe, sort_keys=True).encode(), np.uint8)
        return Checkpoint(**self._members(), fit=self._position(), recipe=recipe)

    def _save(self) -> None:
        self._due = False
        # The last batch of an epoch was saved before its end was known: a resume repeats the rest.
        if self._step != self._saved:
            numbers = {name: value for name, value in self._logs.items() if np.ndim(value) == 0}
            state = self._state()
            finish_others(self._manager)
            self._manager.save(self._step, state, numbers, force=True)
            self._saved = self._step

    def _leave(self, state: Any = None) -> None:
        finish_others(self._manager)
        if self._step == self._saved:
            self._manager.exit_preempted()
        self._manager.save_and_exit(self._step, self._state() if state is None else state)


def _logged(name: str, value: Any) -> Any:
    """What a `train_step` of the user's returned under `name`: a number most often, or an array."""
    if packing.is_plain(value):
        return value
    with suppress(Exception):  # whatever the backend raises for what it cannot convert
        array = np.asarray(keras.ops.convert_to_numpy(value))
        if packing.is_plain(array):
            return array
    raise TrainError(
        f"{name!r} in the logs of a step: expected a number or an array, found {type(value).__name__}, "
        f"which cannot be backed up. Return from `train_step` what can."
    )
