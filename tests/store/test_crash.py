"""A crash ahead of every operation: what was committed stays, the rest is whole or absent."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import Crash, Operations, contents, make_leaves, run_on

from perdure.store import Run, check

SIZES = (3000, 40, 0)
LARGE = (9 * 1024 * 1024, 40)


def save(run: Run) -> None:
    run.save(3, make_leaves(3, SIZES))


def save_large(run: Run) -> None:
    run.save(3, make_leaves(3, LARGE))


def delete(run: Run) -> None:
    run.delete([1])


def quarantine(run: Run) -> None:
    run.quarantine(2, "a reason")


def prepared(path: Path) -> Path:
    with run_on(path) as run:
        run.save(1, make_leaves(1, SIZES))
        run.save(2, make_leaves(2, SIZES))
    return path


def operations_of(path: Path, action: Callable[[Run], None]) -> list[tuple[str, str]]:
    recorder = Operations()
    with run_on(path, recorder) as run:
        action(run)
    return recorder.done


@pytest.mark.parametrize("action", [save, save_large, delete, quarantine])
def test_a_crash_at_any_operation_loses_nothing_that_was_committed(
    tmp_path: Path, action: Callable[[Run], None]
) -> None:
    total = len(operations_of(prepared(tmp_path / "counted"), action))
    assert total >= 2
    for number in range(total):
        path = prepared(tmp_path / f"crash{number}")
        crash = Operations(crash_at=number)
        run = run_on(path, crash)
        with pytest.raises(Crash):
            action(run)
        run.close()
        assert crash.fired
        report = check(Run(path))
        assert report.ok, report.problems
        expected = {"delete": {2}, "quarantine": {1}}.get(action.__name__, {1, 2})
        assert expected <= set(report.good)
        for step in report.good:
            sizes = LARGE if action is save_large and step == 3 else SIZES
            loaded = Run(path).load(step)
            assert contents(loaded.leaves) == contents(make_leaves(step, sizes))
        with run_on(path) as again:
            again.save(4, make_leaves(4))
            assert not again.leftovers()
            assert check(again).ok


def final(temporary: str) -> str:
    """The name that a temporary file is written for: `NAME.tmp`, or `NAME.<8 digits>.tmp`."""
    return re.sub(r"(\.[0-9a-f]{8})?\.tmp$", "", temporary)


def durable(operations: list[tuple[str, str]]) -> bool:
    """Whether each name is given to a synced file, and the directory synced before the next one."""
    synced: set[str] = set()
    unsynced_name = False
    for operation, name in operations:
        if operation == "fsync":
            synced.add(final(name))
        elif operation == "write":
            synced.discard(final(name))
        elif operation in ("link", "rename"):
            if name not in synced or unsynced_name:
                return False
            unsynced_name = True
        elif operation == "fsync_dir":
            unsynced_name = False
    return not unsynced_name


@pytest.mark.parametrize("action", [save, save_large])
@pytest.mark.parametrize("left_out", ["nothing", "fsync", "fsync_dir"])
def test_the_order_of_a_save_is_durable_and_the_check_sees_a_sync_left_out(
    tmp_path: Path, action: Callable[[Run], None], left_out: str
) -> None:
    done = operations_of(prepared(tmp_path), action)
    kept = [entry for entry in done if entry[0] != left_out]
    assert durable(kept) == (left_out == "nothing")
    assert (len(kept) < len(done)) == (left_out != "nothing")


def test_the_pack_is_durable_before_the_manifest_can_be_seen(tmp_path: Path) -> None:
    done = operations_of(prepared(tmp_path), save)
    names = [(operation, Path(name).suffix) for operation, name in done]
    pack, manifest = names.index(("link", ".pack")), names.index(("link", ".json"))
    assert ("fsync_dir", "") in names[pack:manifest]
