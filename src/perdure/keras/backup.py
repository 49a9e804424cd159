"""`BackupAndRestore`: the drop-in for the callback of Keras of that name, with an exact resume."""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from typing import Any

import keras
import numpy as np

from perdure.checkpoint import CheckpointManager, ManagerOptions
from perdure.errors import ArgumentError, TrainError
from perdure.keras import fit_saving
from perdure.keras.fit_internals import attached_model, running_fit
from perdure.keras.fit_session import FitSession
from perdure.store import LocalStorage
from perdure.store.format import LOCK, MANIFESTS, MARKER, PACKS, PINS, QUARANTINE
from perdure.store.run_log import LOG_FILE
from perdure.store.urls import open_storage
from perdure.tensorflow_names import names_forms

_MAX_TO_KEEP = 2  # the older one is for the case that the newest is damaged


class BackupAndRestore(keras.callbacks.Callback):
    """Backs up `fit` and resumes it at the batch where it was interrupted, with the same bits.

    Takes the arguments of `keras.callbacks.BackupAndRestore`. If the same program calls `fit` again
    after an interruption, training resumes after the last backup, with weights, optimizer, seeds,
    metrics, the order of the data, `History` and the state of other callbacks as without it. `epochs`
    may be another number.

    Args:
        backup_dir: Directory of the backups, for this callback alone.
        save_freq: "epoch", a number of batches, or False to save before a preemption only. A save
            runs in the background; a resume uses the newest backup that is complete and undamaged.
        double_checkpoint: Accepted for compatibility. Two backups are always kept.
        delete_checkpoint: Delete what the callback wrote when training is finished.
        save_before_preemption: On SIGTERM, finish the step, save, and exit with status 75.
        allow: Fields of the recipe that may differ between the backup and this run
            (`docs/STRATEGIES.md`).
        journal_every: Record a digest of the model, its optimizer and its metrics in the journal of
            `backup_dir` after every so many batches (`docs/JOURNAL.md`).

    Raises:
        ArgumentError: An argument has a value that cannot be used (also a `ValueError`).
        TrainError: From `fit`, if the model has no variables yet.
        RecipeMismatchError: From `fit`, with a list of what changed, if the arguments of `compile` or
            `fit`, the model or the data differ from those of the backup.
        LockedError: From `fit`, if another process uses `backup_dir`.
        JournalMismatchError: From `fit`, if a repeated batch has other bits than the journal.

    `fit` warns when it starts if the position in the data cannot be restored exactly.
    """

    @names_forms("BackupAndRestore")
    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: str | int | bool = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
        save_before_preemption: bool = False,
        *,
        allow: tuple[str, ...] = (),
        journal_every: int | None = None,
    ) -> None:
        super().__init__()
        if backup_dir is None or not os.fspath(backup_dir):
            # The errors have the phrases of Keras, for which users and their tests look.
            raise ArgumentError(
                f"Empty `backup_dir` argument passed: expected a directory, found {backup_dir!r}."
            )
        if isinstance(save_freq, np.integer):
            save_freq = int(save_freq)
        is_count = type(save_freq) is int and save_freq >= 1
        if save_freq != "epoch" and save_freq is not False and not is_count:
            raise ArgumentError(
                f"Invalid value for argument `save_freq`: expected 'epoch', a number of batches of "
                f"at least 1, or False, found {save_freq!r}."
            )
        if save_freq is False and not save_before_preemption:
            raise ArgumentError(
                "save_freq=False saves nothing unless save_before_preemption=True. Pass one of them."
            )
        self.backup_dir = os.fspath(backup_dir)
        self.save_freq = save_freq
        self.double_checkpoint = double_checkpoint
        self.delete_checkpoint = delete_checkpoint
        self.save_before_preemption = save_before_preemption
        self._allow = allow
        self._options = ManagerOptions(journal_every=journal_every)
        self._manager: CheckpointManager | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        model = attached_model(self)
        if model is None:
            raise TrainError("BackupAndRestore: expected to be a callback of `fit`.")
        fit = running_fit(model)
        fit.build_model()
        manager = self._manager = fit_saving.open_manager(
            self.backup_dir,
            self.params,
            self._options,
            max_to_keep=_MAX_TO_KEEP,
            recipe={"engine": keras.backend.backend()},  # the backup itself has the settings
        )
        session = FitSession(
            fit,
            manager,
            self,
            save_freq=self.save_freq,
            preemptible=self.save_before_preemption,
            allow=self._allow,
        )
        session.set_params(self.params)
        session.set_model(model)
        # `fit` is iterating over this list, and calls the session last.
        fit.callbacks.callbacks.append(session)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Does nothing. But for such a method Keras might call callbacks in another thread."""

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Does nothing; as `on_train_batch_end`."""

    def on_train_end(self, logs: Any = None) -> None:
        manager, self._manager = self._manager, None
        if manager is None:
            return
        manager.wait_until_finished()
        if self.delete_checkpoint:
            for step in manager.all_steps():
                manager.delete(step)
        fit_saving.close_manager(manager)
        storage = open_storage(self.backup_dir)
        if self.delete_checkpoint and isinstance(storage, LocalStorage):
            _delete(storage)


def _delete(storage: LocalStorage) -> None:
    """Delete the files of a run directory that belong to the store; a link and its target stay."""
    try:
        for name in (MANIFESTS, PACKS, PINS, QUARANTINE):
            if os.path.isdir(path := os.path.normpath(storage.path(name))):
                shutil.rmtree(path)
        for name in (MARKER, LOCK, LOG_FILE):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(storage.path(name))
        if not os.path.islink(storage.where) and not os.listdir(storage.where):
            os.rmdir(storage.where)
    except OSError as error:
        warnings.warn(
            f"BackupAndRestore: {storage.where} could not be deleted: {error}. Training is finished, "
            f"and its checkpoints have been deleted; delete the rest yourself.",
            stacklevel=3,
        )
