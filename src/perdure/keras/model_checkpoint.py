"""`ModelCheckpoint`: checkpoints of a model while `fit` trains it, and `load_weights` out of them."""

from __future__ import annotations

import math
import os
import warnings
from typing import Any, Literal

import keras
import numpy as np
from keras import ops

from perdure.checkpoint import CheckpointManager, ManagerOptions
from perdure.checkpoint.address import step_or_name
from perdure.checkpoint.checkpoint import load_verified
from perdure.checkpoint.retention import MonitoredRetention
from perdure.errors import ArgumentError, TrainError
from perdure.keras import fit_internals, fit_saving
from perdure.state import restore
from perdure.state.keras_optimizers import known_left_out
from perdure.store import Run, Storage
from perdure.store.selection import Selection
from perdure.tensorflow_names import names_forms


class ModelCheckpoint(fit_internals.MonitorCallback):
    """Saves the model and its optimizer into a run directory while `fit` trains.

    Takes the arguments of `keras.callbacks.ModelCheckpoint`, in the same order. `filepath` is a
    directory instead of a file name: a checkpoint is named by the number of optimizer steps. If the
    model has no optimizer, or has further optimizers as attributes, the number of batches of this
    `fit` is used.

    Args:
        filepath: Run directory of the checkpoints (a path, a URL or a `Storage`).
        monitor: Metric that decides which checkpoint is best.
        verbose: 1 prints a line for each decision to save.
        save_best_only: Save only if `monitor` is better than ever before. NaN and infinities never
            are. If `fit` did not report `monitor`, or it is no scalar, the callback warns and saves,
            as Keras's does.
        save_weights_only: Save the model without its optimizer.
        mode: "min", "max", or "auto" to infer it from the metric.
        save_freq: "epoch" or a number of batches.
        initial_value_threshold: Value that `monitor` must beat before the first save of
            `save_best_only`.
        max_to_keep: How many of the newest checkpoints to keep, besides the best one. None keeps all.

    Saves run in the background. An error of a save is raised by the next save or when training ends.
    If `BackupAndRestore` is used too, a resumed `fit` continues with the best value so far.

    Raises:
        ArgumentError: An argument has a value that cannot be used (also a `ValueError`).
        StepExistsError: From `fit`, if the directory holds other weights for a step.
    """

    @names_forms("ModelCheckpoint")
    def __init__(
        self,
        filepath: str | os.PathLike[str] | Storage,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        initial_value_threshold: float | None = None,
        *,
        max_to_keep: int | None = 5,
    ) -> None:
        super().__init__(monitor, mode, initial_value_threshold)
        _check_directory(filepath)
        if isinstance(save_freq, np.integer):
            save_freq = int(save_freq)
        if save_freq != "epoch" and not (type(save_freq) is int and save_freq >= 1):
            raise ArgumentError(
                f"Unrecognized save_freq: expected 'epoch' or a number of batches of at least 1, "
                f"found {save_freq!r}."
            )
        self.filepath = filepath
        self.verbose = verbose
        self.save_best_only = save_best_only
        self.save_weights_only = save_weights_only
        self.save_freq = save_freq
        self.max_to_keep = max_to_keep
        self._batches = 0  # of this fit
        self._batch_of_epoch = -1
        self._epoch = 0
        self._last_step = -1  # of the last save; unknown when training begins
        self._manager: CheckpointManager | None = None
        self._has_saved = False  # in an earlier fit

    def on_train_begin(self, logs: Any = None) -> None:
        self._batches, self._batch_of_epoch, self._last_step = 0, -1, -1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        before = self._batches
        self._batches += batch - self._batch_of_epoch
        self._batch_of_epoch = batch
        if self._has_saved and before == 0:
            self._require_later_steps()
        if self.save_freq == "epoch":
            return
        interval = int(self.save_freq)
        if self._batches // interval > before // interval:
            self._save(logs or {})

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._batch_of_epoch = -1
        if self.save_freq == "epoch":
            self._save(logs or {})

    def on_train_end(self, logs: Any = None) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            fit_saving.close_manager(manager)
            self._has_saved = True

    def _require_later_steps(self) -> None:
        """Refuse a second `fit` that counts from 0 again, before it has trained an epoch."""
        self._has_saved = False
        model: Any = self.model
        if model.optimizer is not None and not fit_saving.optimizers(model):
            step = int(np.asarray(ops.convert_to_numpy(model.optimizer.iterations.value)))
            if step > self._batches:
                return
        raise TrainError(
            f"{self.filepath}: this ModelCheckpoint has the checkpoints of an earlier `fit` there, and "
            f"this `fit` counts its steps from 0 again (`compile` has made a new optimizer). Give each "
            f"`fit` a ModelCheckpoint with a directory of its own."
        )

    def _save(self, logs: dict[str, Any]) -> None:
        manager = self._manager or self._open()
        value = logs.get(self.monitor)
        if self.save_best_only and not self._can_compare(value):
            value = None
        if self.save_best_only and value is not None:
            if not math.isfinite(value) or not fit_internals.is_improvement(self, value):
                self._print(f"{self.monitor} did not improve from {_text(self.best)}")
                return
            message = f"{self.monitor} improved from {_text(self.best)} to {_text(value)}, saving"
        else:
            message = "saving"
        model: Any = self.model  # on JAX this copies the state out of the compiled step
        optimizer, further = model.optimizer, fit_saving.optimizers(model)
        step = self._batches
        if optimizer is not None and not further:
            step = int(np.asarray(ops.convert_to_numpy(optimizer.iterations.value)))
            if step == self._last_step and isinstance(
                optimizer, keras.optimizers.LossScaleOptimizer
            ):
                return  # the gradients were not finite: no step was made since the last save
        if self.save_best_only and value is not None:
            self.best = float(value)
        saved = fit_saving.members(model)
        if self.save_weights_only:
            saved = {"model": model}
            if optimizer is not None:
                known_left_out.add(optimizer)
        elif further:
            saved[fit_saving.ATTRIBUTES] = further
        metrics = {name: number for name, number in logs.items() if np.ndim(number) == 0}
        if not self._was_pruned(manager, step):
            self._print(f"{message} step {step} to {manager.directory}")
            manager.save(step, saved, metrics, force=True)
        self._last_step = step

    def _can_compare(self, value: Any) -> bool:
        if value is None:
            problem = f"Can save best model only with {self.monitor} available"
        elif np.ndim(value) != 0:
            problem = f"Can save best model only when `monitor` is a scalar value, found {value!r}"
        else:
            return True
        warnings.warn(f"ModelCheckpoint: {problem}. Saving without a comparison.", stacklevel=4)
        return False

    def _print(self, message: str) -> None:
        if self.verbose > 0:
            fit_internals.print_msg(f"\nEpoch {self._epoch + 1}: {message}")

    def _was_pruned(self, manager: CheckpointManager, step: int) -> bool:
        """Whether an earlier `fit` passed `step` and pruned its checkpoint: a resumed `fit` begins at
        its backup. Steps whose checkpoints still exist are compared bit for bit."""
        steps = manager.all_steps()
        if not steps or step >= steps[-1] or step in steps:
            return False
        warnings.warn(
            f"{manager.directory}: step {step} is not saved: an earlier fit reached step {steps[-1]} "
            f"there, and its checkpoint is gone. For another training use another directory.",
            stacklevel=2,
        )
        return True

    def _open(self) -> CheckpointManager:
        if not fit_internals.has_direction(self):
            try:
                fit_internals.set_direction(self)
            except ValueError as error:
                if self.save_best_only:
                    raise ArgumentError(
                        f"monitor={self.monitor!r}: whether higher or lower is better cannot be "
                        f"inferred from this metric. Pass mode='max' or mode='min'."
                    ) from error
        retention = None
        if (mode := fit_internals.direction(self)) is not None:
            retention = MonitoredRetention(best_metric=self.monitor, best_mode=mode)
        self._manager = fit_saving.open_manager(
            self.filepath,
            self.params,
            max_to_keep=self.max_to_keep,
            options=ManagerOptions(retention=retention),
        )
        return self._manager


def load_weights(
    model: Any,
    run: str | os.PathLike[str] | Storage,
    step: int | Literal["best"] | None = None,
) -> int:
    """Load the weights of a checkpoint into a model; nothing else of the model changes.

    Seeds and the statistics of BatchNormalization are among the weights. Warns about each newer
    checkpoint that is damaged, if `step` is None.

    Args:
        model: A built Keras model.
        run: Directory of a `ModelCheckpoint` or of a `BackupAndRestore`.
        step: A committed step; None for the newest good one; "best" for the best by the metric that
            `ModelCheckpoint` monitored.

    Returns:
        The step that was loaded.

    Raises:
        ArgumentError: `step` is of another type (also a `ValueError`), or the best is asked for and no
            metric was monitored.
        StepNotFoundError: There is no such checkpoint.
        MismatchError: The model does not fit; lists every difference. The model is unchanged.
    """
    if step is not None and step != "best" and type(step) is not int:
        raise ArgumentError(f"step: expected an int, 'best' or None, found {step!r}.")
    if step == "best":
        opened = Run(run)
        step = step_or_name(f"{opened.where}@best", opened)
    loaded = load_verified(run, step, Selection("model").matches)
    restore({"model": model}, loaded.leaves)
    return loaded.manifest.step


def _check_directory(filepath: Any) -> None:
    """Refuse a file name, which `keras.callbacks.ModelCheckpoint` takes here."""
    name = os.fspath(filepath) if isinstance(filepath, (str, os.PathLike)) else filepath
    is_file = isinstance(name, str) and (name.endswith((".keras", ".h5")) or "{" in name)
    if name is None or name == "" or is_file:
        raise ArgumentError(
            f"filepath: expected a directory, found {name!r}. All checkpoints are in one run directory "
            f"such as 'runs/model'; `perdure.keras.load_weights` loads one."
        )


def _text(value: Any) -> str:
    return "None" if value is None else f"{float(value):.5f}"
