"""The rules of retention are in the run directory, and none of them is dropped in silence."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from perdure import CheckpointManager, ManagerOptions, MemoryStorage, Retention
from perdure.checkpoint.retention import (
    RecordedRetention,
    plan_prune,
    recorded_retention,
)
from perdure.errors import CorruptionError
from perdure.store import PruneRequest, Run, repair, verify_run
from perdure.store.run_log import LOG_FILE, line_references

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


def verify_log(run: Run) -> str | None:
    """What is wrong with the log, without the rest of `verify_run`."""
    return run.log.view.problem_with(line_references(run.contents().manifests.values()))


def test_the_rules_of_the_last_manager_are_recorded() -> None:
    storage = MemoryStorage()
    assert saved(storage, range(1, 8), 2, BEST) == [3, 5, 6, 7]
    assert recorded_retention(Run(storage)) == RecordedRetention(2, BEST)
    saved(storage, range(8, 9), None, Retention())
    assert recorded_retention(Run(storage)) == RecordedRetention(None, Retention())


def whole(where: Path) -> bytes:
    """A run whose log has the rules, and whose checkpoints 5 to 7 were saved after them."""
    assert saved(where, range(1, 8), 2, BEST) == [3, 5, 6, 7]
    return (where / LOG_FILE).read_bytes()


def assert_keeps_all(where: Path) -> None:
    """A manager without rules warns and deletes nothing; one with rules deletes nothing either."""
    with pytest.warns(UserWarning, match=r"othing is deleted"):
        assert saved(where, range(8, 10), 1, None) == [3, 5, 6, 7, 8, 9]
    with pytest.warns(UserWarning, match=r"othing is deleted"):
        assert saved(where, range(10, 11), 1, Retention()) == [3, 5, 6, 7, 8, 9, 10]
    problems = [problem for problem in verify_run(Run(where)).problems if problem.harmful]
    assert [problem.name for problem in problems] == [LOG_FILE]


@pytest.mark.parametrize(
    "change",
    [
        lambda _: b"",
        lambda _: b"{}",
        lambda _: b"null\n",
        lambda data: data[:-1],
        lambda data: data[: data.index(b'"rules"')],
        lambda data: data[: data.index(b"\n") + 1],
        lambda data: data.replace(b'"loss"', b'"lass"'),
        lambda data: data.replace(b'"run":"', b'"run":"0'),
        None,
    ],
    ids=["empty", "braces", "null", "torn", "cut", "one line", "flipped", "other run", "deleted"],
)
def test_rules_that_were_damaged_or_lost_delete_nothing(tmp_path: Path, change: Any) -> None:
    data = whole(tmp_path)
    path = tmp_path / LOG_FILE
    path.unlink()
    if change is not None:
        path.write_bytes(change(data))
    assert_keeps_all(tmp_path)
    # The control, with the log as it was. What was saved meanwhile refers to no line.
    path.write_bytes(data)
    assert saved(tmp_path, range(11, 12), 1, None) == [3, 5, 10, 11]


def test_a_save_without_a_manager_does_not_hide_that_lines_are_lost(tmp_path: Path) -> None:
    data = whole(tmp_path)
    cut = data[: data.index(b"\n") + 1]
    (tmp_path / LOG_FILE).write_bytes(cut)
    with Run(tmp_path) as run:
        run.save(8, run.load(7).leaves)
    assert (tmp_path / LOG_FILE).read_bytes() == cut, "nothing is added to a log that lacks lines"
    with pytest.warns(UserWarning, match=r"the log ends before it"):
        assert saved(tmp_path, range(9, 10), 1, None) == [3, 5, 6, 7, 8, 9]
    (tmp_path / LOG_FILE).write_bytes(data)
    assert saved(tmp_path, range(10, 11), 1, None) == [3, 5, 10]  # the control


def test_a_deletion_is_refused_if_an_older_checkpoint_refers_to_a_line_that_is_lost(
    tmp_path: Path,
) -> None:
    data = whole(tmp_path)
    with Run(tmp_path) as run:  # as after a copy: the newest refers to no line
        newest = msgspec.structs.replace(run.manifest(7), log=None)
        run.committer.commit_manifest(newest, {}, replace=True)
    (tmp_path / LOG_FILE).write_bytes(data[: data.index(b"\n") + 1])
    with Run(tmp_path) as run, pytest.raises(CorruptionError, match="nothing is deleted"):
        run.delete([3])
    assert Run(tmp_path).steps() == [3, 5, 6, 7]
    (tmp_path / LOG_FILE).write_bytes(data)
    with Run(tmp_path) as run:
        assert run.delete([3]) == [3]  # the control


def test_each_flipped_byte_of_a_small_log_is_seen_before_anything_is_deleted(
    tmp_path: Path,
) -> None:
    data = whole(tmp_path)
    request = PruneRequest(frozenset({3, 5, 6}))
    for place in range(len(data)):
        flipped = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        (tmp_path / LOG_FILE).write_bytes(flipped)
        assert Run(tmp_path).plan(request).empty, place
        assert verify_log(Run(tmp_path)) is not None, place
    (tmp_path / LOG_FILE).write_bytes(data)
    assert Run(tmp_path).plan(request).steps == (3, 5, 6)  # the control


def test_rules_that_a_repair_could_not_keep_delete_nothing_until_others_are_given(
    tmp_path: Path,
) -> None:
    data = whole(tmp_path)
    (tmp_path / LOG_FILE).write_bytes(data.replace(b'"loss"', b'"lass"'))
    with Run(tmp_path) as run:
        assert repair(run).report.ok
    with pytest.warns(UserWarning, match=r"lost in a repair"):
        assert saved(tmp_path, range(8, 9), 1, None) == [3, 5, 6, 7, 8]
    assert saved(tmp_path, range(9, 10), 1, BEST) == [3, 5, 9]
    assert saved(tmp_path, range(10, 11), 1, None) == [3, 5, 10]


def test_rules_that_cannot_be_recorded_cost_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("perdure.checkpoint.retention.record_retention", full)
    with pytest.warns(UserWarning, match=r"could not be recorded"):
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
            manager.wait_until_finished(mirror=True)  # what is being copied is not deleted
        assert manager.all_steps() == CheckpointManager(mirror).all_steps() == [3, 5, 6, 10, 11]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "Retention(keep_period=5, best_metric='loss', best_mode='min')" in line
    assert recorded_retention(Run(where)) == RecordedRetention(1, BEST)


def test_control_a_manager_that_is_given_other_rules_warns_and_deletes() -> None:
    storage = MemoryStorage()
    saved(storage, range(1, 8), 2, BEST)
    with pytest.warns(UserWarning, match=r"deletes steps 3, which .* best loss \(0\)") as warned:
        assert saved(storage, range(8, 10), 2, Retention(keep_period=5)) == [5, 8, 9]
    assert "Retention(keep_period=5, best_metric='loss', best_mode='min')" in str(warned[0].message)
    assert len(warned) == 1
    assert saved(storage, range(10, 12), 2, Retention(keep_period=5)) == [5, 10, 11]  # said once


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


def with_packs(where: Path) -> None:
    with CheckpointManager(where, max_to_keep=None) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"w": np.arange(100.0) * step})


@pytest.mark.parametrize("size", [0, 100, None], ids=["empty", "cut", "deleted"])
def test_a_checkpoint_whose_pack_is_cut_is_neither_counted_nor_deleted(
    tmp_path: Path, size: int | None
) -> None:
    with_packs(tmp_path)
    *_, newest = sorted((tmp_path / "packs").iterdir())
    if size is None:
        newest.unlink()
    else:
        os.truncate(newest, size)
    with Run(tmp_path) as run:
        run.execute(plan_prune(run, 1, Retention()).store)
    assert verify_run(Run(tmp_path)).good == (2,), "a good one stays"


def test_a_whole_newest_checkpoint_is_the_one_that_stays(tmp_path: Path) -> None:
    with_packs(tmp_path)
    with Run(tmp_path) as run:
        run.execute(plan_prune(run, 1, Retention()).store)
    assert verify_run(Run(tmp_path)).good == (3,)
