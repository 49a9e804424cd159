"""`BackupAndRestore`: the drop-in for the callback of Keras of that name, with an exact resume."""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from typing import Any

import keras

from perdure.checkpoint import CheckpointManager
from perdure.errors import TrainError
from perdure.keras.directory import close_manager, open_manager
from perdure.keras.running import running_fit
from perdure.keras.session import Session
from perdure.store import LocalStorage
from perdure.store.format import LOCK, MANIFESTS, MARKER, PACKS, PINS, QUARANTINE
from perdure.store.urls import open_storage

_KEPT = 2  # so that there is one to fall back to if the newest is damaged on disk


class BackupAndRestore(keras.callbacks.Callback):
    """Backs up `fit`, and brings it back to the batch where it was: the run ends with the same bits.

    Called as Keras's own. With the same call of `fit`, a run that was interrupted anywhere goes on
    behind the last backup: weights, optimizer, seeds, metrics, the order of the data, `History` and
    the states of other callbacks are those of a run without the interruption.

    `save_freq` is "epoch", a number of batches, or False for nothing but `save_before_preemption`:
    then SIGTERM ends the step, saves, and leaves with status 75. A save is durable a moment after it
    returns, and the newest is used that is whole. `double_checkpoint` is accepted and changes
    nothing: two backups are kept in any case. `delete_checkpoint` deletes `backup_dir` once training
    is finished, but for what others have put there. Fields named in `allow` may differ between backup
    and run (`docs/RECIPE.md`).

    `fit` raises `TrainError` for an unbuilt model, `RecipeMismatchError` with a list of what changed
    where the arguments of `compile` or `fit`, the model or the data are others than those of the
    backup, and `LockedError` where another process uses `backup_dir`. It warns at its start where the
    data cannot be put back.
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: str | int | bool = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
        save_before_preemption: bool = False,
        *,
        allow: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        if not os.fspath(backup_dir):
            raise TrainError("backup_dir: expected a directory, found an empty name.")
        whole = type(save_freq) is int and save_freq >= 1
        if save_freq != "epoch" and save_freq is not False and not whole:
            raise TrainError(
                f"save_freq: expected 'epoch', a number of batches from 1 on, or False, found "
                f"{save_freq!r}."
            )
        if save_freq is False and not save_before_preemption:
            raise TrainError("save_freq=False saves nothing unless save_before_preemption=True.")
        self.backup_dir = os.fspath(backup_dir)
        self.save_freq = save_freq
        self.double_checkpoint = double_checkpoint
        self.delete_checkpoint = delete_checkpoint
        self.save_before_preemption = save_before_preemption
        self._allow = allow
        self._manager: CheckpointManager | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        model = self._model
        if model is None or not model.built:
            raise TrainError(
                "BackupAndRestore: expected a model that is built, found one without variables. Give "
                "it a `keras.Input`, or call it on a batch before `fit`."
            )
        fit = running_fit(model)
        manager = self._manager = open_manager(self.backup_dir, max_to_keep=_KEPT)
        session = Session(
            fit,
            manager,
            self.save_freq,
            save_before_preemption=self.save_before_preemption,
            allow=self._allow,
            owner=self,
        )
        session.set_params(self.params)
        session.set_model(model)
        # The list is being gone through, and calls what stands at its end last.
        fit.callbacks.callbacks.append(session)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Nothing to do; Keras calls callbacks in the step's own thread once one looks at batches."""

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Nothing to do; as for the batches of training."""

    def on_train_end(self, logs: Any = None) -> None:
        manager, self._manager = self._manager, None
        if manager is None:
            return
        manager.wait_until_finished()
        if self.delete_checkpoint:
            for step in manager.all_steps():
                manager.delete(step)
        close_manager(manager)
        storage = open_storage(self.backup_dir)
        if self.delete_checkpoint and isinstance(storage, LocalStorage):
            _delete(storage)


def _delete(storage: LocalStorage) -> None:
    """Delete a run directory, and nothing of it that is not the store's.

    Where `backup_dir` is a link, the link stays, and what it leads to.
    """
    try:
        for part in (MANIFESTS, PACKS, PINS, QUARANTINE):
            if os.path.isdir(path := os.path.normpath(storage.path(part))):
                shutil.rmtree(path)
        for name in (MARKER, LOCK):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(storage.path(name))
        if not os.path.islink(storage.where) and not os.listdir(storage.where):
            os.rmdir(storage.where)
    except OSError as error:
        warnings.warn(
            f"BackupAndRestore: {storage.where} could not be deleted: {error}. Training is finished, "
            f"and the checkpoints there are gone; delete the rest yourself.",
            stacklevel=3,
        )
