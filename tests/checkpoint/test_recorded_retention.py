"""The rules of retention are in the run directory, and none of them is dropped in silence."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from perdure import CheckpointManager, LocalStorage, ManagerOptions, MemoryStorage, Retention
from perdure.checkpoint.recorded_retention import RecordedRetention, recorded_retention
from perdure.store.format import RETENTION

BEST = Retention(best_metric="loss", best_mode="min", keep_period=5)


def saved(
    where: Any, steps: range, max_to_keep: int | None, retention: Retention | None
) -> list[int]:
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


def test_a_manager_without_retention_goes_on_with_the_recorded_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where, mirror = tmp_path / "run", tmp_path / "mirror"
    saved(where, range(1, 8), 2, BEST)
    caplog.set_level(logging.INFO, "perdure")
    with CheckpointManager(where, mirror=mirror, max_to_keep=1) as manager:
        assert manager.best_step() == 3
        manager.pin(
            6
        )  # brings the mirror up to date before the first save: nothing is deleted there
        assert manager.wait_until_finished(mirror=True)
        assert CheckpointManager(mirror).all_steps() == [3, 5, 6, 7]
        for step in range(8, 12):
            manager.save(step, {"w": step})
        manager.wait_until_finished(mirror=True)
        assert manager.all_steps() == CheckpointManager(mirror).all_steps() == [3, 5, 6, 10, 11]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "Retention(keep_period=5, best_metric='loss', best_mode='min')" in line
    assert recorded_retention(LocalStorage(where)) == RecordedRetention(1, BEST)


def test_control_a_manager_that_is_given_other_rules_warns_and_deletes() -> None:
    storage = MemoryStorage()
    saved(storage, range(1, 8), 2, BEST)
    with pytest.warns(UserWarning, match=r"deletes steps 3, which .* best loss \(0\)") as warned:
        assert saved(storage, range(8, 10), 2, Retention(keep_period=5)) == [5, 8, 9]
    assert "Retention(keep_period=5, best_metric='loss', best_mode='min')" in str(warned[0].message)
    assert len(warned) == 1
    assert saved(storage, range(10, 12), 2, Retention(keep_period=5)) == [5, 10, 11]  # said once


def test_rules_that_cannot_be_read_delete_nothing(tmp_path: Path) -> None:
    saved(tmp_path, range(1, 8), 2, BEST)
    data = (tmp_path / RETENTION).read_bytes()
    os.unlink(tmp_path / RETENTION)
    (tmp_path / RETENTION).mkdir()
    with pytest.warns(UserWarning, match=r"Nothing is deleted"):
        assert saved(tmp_path, range(8, 10), 1, None) == [3, 5, 6, 7, 8, 9]
    (tmp_path / RETENTION).rmdir()
    (tmp_path / RETENTION).write_bytes(data)
    assert saved(tmp_path, range(10, 11), 1, None) == [3, 5, 10]


@pytest.mark.parametrize(
    ("metric", "rows", "warns"),
    [
        ("val_acc", [{}, {"acc": 1.0, "loss": 2.0}, {"acc": 1.0}], True),
        ("acc", [{}, {"acc": 1.0}, {"loss": 1.0}], False),
        ("eval/acc", [{"loss": 1.0}, {"loss": 1.0, "eval/acc": 1.0}], False),
        ("eval/acc", [{"loss": 1.0}, {"loss": 1.0, "eval/accuracy": 1.0}], True),
    ],
)
def test_a_metric_that_no_save_has_is_a_warning(
    metric: str, rows: list[dict[str, float]], warns: bool
) -> None:
    options = ManagerOptions(retention=Retention(best_metric=metric))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with CheckpointManager(MemoryStorage(), options=options) as manager:
            for step, metrics in enumerate(rows):
                manager.save(step, {"w": step}, metrics)
    assert [metric in str(warning.message) for warning in caught] == [True] * warns
    if warns:
        assert all(f"found '{name}'" in str(caught[0].message) for name in sorted(rows[1])[:1])
