"""`ModelCheckpoint`: checkpoints of a model while `fit` trains it, and `load_weights` out of them."""

from __future__ import annotations

import math
import os
import warnings
from typing import Any, Literal

import keras
import numpy as np
from keras import ops
from keras.src.callbacks.monitor_callback import MonitorCallback

from perdure.checkpoint import CheckpointManager, ManagerOptions, Retention, load
from perdure.checkpoint.prune import candidates
from perdure.checkpoint.retention import ranked
from perdure.errors import StepNotFoundError, TrainError
from perdure.keras import members
from perdure.keras.directory import close_manager, open_manager
from perdure.state import flatten, restore
from perdure.store import Run, Storage


class ModelCheckpoint(MonitorCallback):
    """Saves the model, and its optimizer, into a run directory while `fit` trains.

    Arguments have the names and meanings that they have in Keras's own callback. `directory` takes the
    place of its file name: checkpoints are named by the number of optimizer steps (by the number of
    batches of this `fit` where the model has no optimizer, or others as attributes), and
    `max_to_keep` newest ones stay, as well as the one that is best by `monitor`. `save_freq` is "epoch"
    or a number of batches. With `save_best_only` a checkpoint is saved only where `monitor` is better
    than ever before; NaN and the infinities never are. Saves go on in the background, and what went
    wrong in one is raised by the next or at the end.

    With `BackupAndRestore` beside it, a resumed `fit` goes on with the best value so far. `fit`
    raises `StepExistsError` where the directory holds other weights for a step.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | Storage,
        monitor: str = "val_loss",
        *,
        save_best_only: bool = False,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        max_to_keep: int | None = 5,
    ) -> None:
        super().__init__(monitor, mode)
        if save_freq != "epoch" and not (type(save_freq) is int and save_freq >= 1):
            raise TrainError(
                f"save_freq: expected 'epoch' or a number of batches from 1 on, found {save_freq!r}."
            )
        self.directory = directory
        self.save_best_only = save_best_only
        self.save_weights_only = save_weights_only
        self.save_freq = save_freq
        self.max_to_keep = max_to_keep
        self._seen = 0  # batches
        self._of_epoch = -1
        self._last = -1  # the step of the last save; at the start of training nobody knows
        self._manager: CheckpointManager | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self._seen, self._of_epoch, self._last = 0, -1, -1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        before = self._seen
        self._seen += batch - self._of_epoch
        self._of_epoch = batch
        if self.save_freq == "epoch":
            return
        every = int(self.save_freq)
        if self._seen // every > before // every:
            self._save(logs or {})

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._of_epoch = -1
        if self.save_freq == "epoch":
            self._save(logs or {})

    def on_train_end(self, logs: Any = None) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            close_manager(manager)

    def _save(self, logs: dict[str, Any]) -> None:
        manager = self._manager or self._open()
        value = logs.get(self.monitor)
        if self.save_best_only:
            if value is None:
                raise TrainError(
                    f"save_best_only: expected the metric {self.monitor!r}, found "
                    f"{', '.join(map(repr, sorted(logs))) or 'none'}."
                )
            if not math.isfinite(value) or not self._is_improvement(value, self.best):
                return
        model: Any = self.model  # which fetches the state, on JAX
        optimizer, more = model.optimizer, members.optimizers(model)
        step = self._seen
        if optimizer is not None and not more:
            step = int(np.asarray(ops.convert_to_numpy(optimizer.iterations.value)))
            if step == self._last and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                return  # the gradients were not finite: no step was made since
        if self.save_best_only and value is not None:
            self.best = float(value)
        saved = members.members(model)
        if self.save_weights_only:
            saved = {"model": model}
        elif more:
            saved[members.ATTRIBUTES] = more
        numbers = {name: each for name, each in logs.items() if np.ndim(each) == 0}
        if not self._was_pruned(manager, step):
            manager.save(step, saved, numbers, force=True)
        self._last = step

    def _was_pruned(self, manager: CheckpointManager, step: int) -> bool:
        """Whether a `fit` before this one was beyond `step` and let its checkpoint go: a resumed `fit`
        begins at its backup. Steps that are still there are compared bit for bit."""
        steps = manager.all_steps()
        if not steps or step >= steps[-1] or step in steps:
            return False
        warnings.warn(
            f"{manager.directory}: step {step} is not saved: an earlier fit reached step {steps[-1]} "
            f"there, and its checkpoint of step {step} is gone. A resumed fit saves again from step "
            f"{steps[-1]} on; for another training use another directory.",
            stacklevel=2,
        )
        return True

    def _open(self) -> CheckpointManager:
        if self.monitor_op is None:
            try:
                self._set_monitor_op()
            except ValueError as error:
                if self.save_best_only:
                    raise TrainError(
                        f"monitor={self.monitor!r}: expected to know whether more or less is better; "
                        f"pass mode='max' or mode='min'."
                    ) from error
        retention, recipe = Retention(), {}
        if self.monitor_op is not None:
            mode: Literal["min", "max"] = "min" if self.monitor_op is ops.less else "max"
            retention = Retention(best_metric=self.monitor, best_mode=mode)
            recipe = {"monitor": self.monitor, "mode": mode}
        self._manager = open_manager(
            self.directory,
            max_to_keep=self.max_to_keep,
            options=ManagerOptions(retention=retention),
            recipe=recipe,
        )
        return self._manager


def load_weights(
    model: Any,
    run: str | os.PathLike[str] | Storage,
    step: int | Literal["best"] | None = None,
) -> int:
    """Put the weights of a checkpoint into a model, and nothing else; returns its step.

    `run` is the directory of a `ModelCheckpoint` or of a `BackupAndRestore`; `step` a step of it,
    None for the newest, or "best" by the metric that `ModelCheckpoint` monitored. Seeds and statistics
    (of BatchNormalization) are among the weights. Raises `StepNotFoundError`, and `MismatchError` that
    lists every difference where the model is another one, which then is unchanged.
    """
    if step is not None and step != "best" and type(step) is not int:
        raise TrainError(f"step: expected an int, 'best' or None, found {step!r}.")
    chosen = _best(Run(run)) if step == "best" else step
    if chosen is None:
        newest = Run(run).load_newest(lambda path: path == "model" or path.startswith("model/"))
        if newest is None:
            raise StepNotFoundError(f"{Run(run).where}: expected a checkpoint, found none.")
        restore({"model": model}, newest.leaves)
        return newest.manifest.step
    restore({"model": model}, flatten(load(run, int(chosen), "model")))
    return int(chosen)


def _best(run: Run) -> int:
    held = run.contents()
    recipes = [each.recipe for each in held.manifests.values() if "monitor" in each.recipe]
    monitor = str(recipes[-1]["monitor"]) if recipes else ""
    mode: Literal["min", "max"] = "min" if recipes and recipes[-1]["mode"] == "min" else "max"
    best = ranked(candidates(held), monitor, mode)
    if not best:
        raise StepNotFoundError(
            f"{run.where}: expected a checkpoint with a metric that ModelCheckpoint monitored, found "
            f"none{f' with a finite {monitor}' if monitor else ''}. Name a step."
        )
    return best[0].step
