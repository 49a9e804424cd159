"""The rules of retention are in the run directory, and nothing that deletes reads them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from perdure import CheckpointManager, ManagerOptions, MemoryStorage, Retention
from perdure.checkpoint.recorded_retention import RecordedRetention, recorded_retention
from perdure.store.format import RETENTION

BEST = Retention(best_metric="loss", best_mode="min", keep_period=5)


def saved(where: Any, steps: range, max_to_keep: int | None, retention: Retention) -> list[int]:
    options = ManagerOptions(retention=retention)
    with CheckpointManager(where, max_to_keep=max_to_keep, options=options) as manager:
        for step in steps:
            manager.save(step, {"w": step}, metrics={"loss": abs(step - 3.0)})
        manager.wait_until_finished()
        return list(manager.all_steps())


def test_the_rules_of_the_last_manager_are_recorded() -> None:
    storage = MemoryStorage()
    assert recorded_retention(storage) is None
    assert saved(storage, range(1, 8), 2, BEST) == [3, 5, 6, 7]
    assert recorded_retention(storage) == RecordedRetention(2, BEST)
    saved(storage, range(8, 9), None, Retention())
    assert recorded_retention(storage) == RecordedRetention(None, Retention())


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"max_to_keep":0.5}', b'{"max_to_keep":1,"best_to_keep":-1}']
)
def test_a_damaged_record_changes_no_prune(data: bytes) -> None:
    storage = MemoryStorage()
    saved(storage, range(1, 8), 2, BEST)
    storage.replace(RETENTION, data)
    assert recorded_retention(storage) is None
    assert saved(storage, range(8, 9), 2, BEST) == [3, 5, 7, 8]
    assert recorded_retention(storage) == RecordedRetention(2, BEST)


def test_a_record_that_cannot_be_written_costs_no_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, range(1, 2), 2, BEST)
    os.unlink(tmp_path / RETENTION)
    (tmp_path / RETENTION).mkdir()
    with pytest.warns(UserWarning, match=r"retention\.json was not written"):
        assert saved(tmp_path, range(2, 5), 2, BEST) == [3, 4]
