"""The journal of `BackupAndRestore(journal_every=n)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest
from cases import BATCHES, EPOCHS, Fault, train

from perdure.errors import JournalMismatchError
from perdure.store import LocalStorage
from perdure.store.run_events import JournalEntry
from perdure.store.run_log import read_journal


class OtherRate(keras.callbacks.Callback):
    """Trains the third batch of the second epoch at another rate."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.now = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if (self.now, batch) == (1, 2):
            model: Any = self.model
            model.optimizer.learning_rate = 0.02


def entries(run: Path) -> list[JournalEntry]:
    return [*read_journal(LocalStorage(run))]


def test_an_interrupted_fit_has_the_journal_of_an_undisturbed_one(tmp_path: Path) -> None:
    options = {"journal_every": 1, "delete_checkpoint": False}
    given: Any = {"save_freq": 3, "options": options}
    train(tmp_path / "whole", **given)
    with pytest.raises(Fault):
        train(tmp_path / "parts", (1, 3), **given)
    # The fault comes before the callback in step 8, and the backup is that of step 6.
    assert [entry.step for entry in entries(tmp_path / "parts")] == [1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(JournalMismatchError) as error:
        train(tmp_path / "parts", callbacks=[OtherRate()], **given)
    assert (error.value.step, error.value.what) == (7, "state")
    train(tmp_path / "parts", **given)
    whole, parts = (
        [(entry.step, entry.state, entry.metrics) for entry in entries(tmp_path / name)]
        for name in ("whole", "parts")
    )
    assert parts == whole
    assert [step for step, *_ in whole] == [*range(1, EPOCHS * BATCHES + 1)]
    assert len({state for _, state, _ in whole}) == EPOCHS * BATCHES
