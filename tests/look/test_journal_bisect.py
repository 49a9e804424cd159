"""`perdure bisect`: the step at which two journals part."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from perdure.checkpoint import CheckpointManager, ManagerOptions
from perdure.cli import main
from perdure.errors import ArgumentError, CorruptionError, NotARunError
from perdure.look.journal_bisect import Bisected, bisect_runs
from perdure.store import Run
from perdure.store.run_events import JournalEntry
from perdure.store.run_log import LOG_FILE


def journal(run: Path, steps: Any, parts_at: int | None = None, what: str = "state") -> Path:
    writer = Run(run, create=True)
    writer.begin_writing()
    for step in steps:
        digests: dict[str, Any] = {
            "batch": f"{step:032x}",
            "total": f"{step:032x}",
            "state": f"{step:032x}",
        }
        if parts_at is not None and step >= parts_at:
            digests["state"] = "f" * 32
            if step == parts_at:
                digests[what] = "f" * 32
        writer.log.append(JournalEntry(step=step, attempt=step % 3, **digests), durable=False)
    writer.close()
    return run


@pytest.mark.parametrize("parts_at", [1, 2, 777, 999, 1000])
def test_every_place_is_found(tmp_path: Path, parts_at: int) -> None:
    one = journal(tmp_path / "one", range(1, 1001))
    for what in ("batch", "total", "state"):
        found = bisect_runs(one, journal(tmp_path / what, range(1, 1001), parts_at, what))
        assert (found.compared, found.step, found.what) == ("journals", parts_at, what)
        assert found.last_equal == (parts_at - 1 or None)
        assert found.values == (f"{parts_at:032x}", "f" * 32)


def test_only_steps_that_both_have_are_compared(tmp_path: Path) -> None:
    one = journal(tmp_path / "one", range(6, 600, 2))
    two = journal(tmp_path / "two", range(3, 900, 3), 301)
    found = bisect_runs(one, two)
    assert (found.last_equal, found.step) == (300, 306)
    assert bisect_runs(one, journal(tmp_path / "same", range(0, 900, 3))).step is None
    with pytest.raises(ArgumentError, match="that both have recorded"):
        bisect_runs(one, journal(tmp_path / "odd", range(1, 600, 2)))


def trained(
    run: Path, *attempts: tuple[int, int | None], odd: int = -1, stays: bool = True
) -> Path:
    """A run with a checkpoint of every fifth step; at `odd` it parts from others, for ever if `stays`.

    Each attempt is the step up to which it trains, and its `journal_every`.
    """
    for stop, every in attempts:
        options = ManagerOptions(journal_every=every)
        with CheckpointManager(
            run, save_interval_steps=5, max_to_keep=None, options=options
        ) as manager:
            state, start = manager.restore_or_initialize({"w": np.zeros(4)})
            for step in range(start + 1, stop + 1):
                is_other = (step >= odd > 0) if stays else step == odd
                state = {"w": np.full(4, step + 0.5 * is_other)}
                manager.save(step, state)
    return run


def command(*arguments: str | Path) -> tuple[int, str]:
    ended = CliRunner().invoke(main, ["bisect", *map(str, arguments)])
    return ended.exit_code, ended.output


def test_checkpoints_after_and_between_the_lines_are_compared(tmp_path: Path) -> None:
    one = trained(tmp_path / "one", (10, 1), (20, None))
    assert bisect_runs(one, one) == Bisected("journals and checkpoints", 10, 4, 20)
    found = bisect_runs(one, trained(tmp_path / "later", (10, 1), (20, None), odd=12))
    assert (found.compared, found.last_equal, found.step) == ("checkpoints", 10, 15)
    assert (found.lines, found.checkpoints, found.what) == (10, 2, "state")
    # The journal of the other run begins after the step at which they part.
    late = trained(tmp_path / "late", (5, None), (20, 1), odd=4)
    found = bisect_runs(one, late)
    assert (found.compared, found.last_equal, found.step) == ("checkpoints", None, 5)
    assert command(one, late)[1].endswith(
        "`perdure replay RUN --steps 0:5 -- COMMAND` shows which of them is right\n"
    )
    found = bisect_runs(one, trained(tmp_path / "line", (10, 1), (20, None), odd=7))
    assert (found.compared, found.last_equal, found.step) == ("journals", 6, 7)


def test_without_a_common_line_the_checkpoints_are_compared(tmp_path: Path) -> None:
    one, two = trained(tmp_path / "one", (20, 7)), trained(tmp_path / "two", (20, 9), odd=12)
    found = bisect_runs(one, two)
    assert (found.compared, found.last_equal, found.step) == ("checkpoints", 10, 15)
    same = bisect_runs(one, trained(tmp_path / "same", (20, 9)))
    assert (same.compared, same.checkpoints, same.step) == ("checkpoints", 4, None)


@pytest.mark.parametrize("odd", [1, 5, 8, 19])
def test_a_difference_that_goes_away_again_is_found(tmp_path: Path, odd: int) -> None:
    one = trained(tmp_path / "one", (20, 1))
    found = bisect_runs(one, trained(tmp_path / "two", (20, 1), odd=odd, stays=False))
    assert (found.compared, found.step, found.last_equal) == ("journals", odd, odd - 1 or None)
    status, text = command(one, one)
    assert status == 0
    assert "equal up to step 20, the last that both have (20 lines of the journals, 4 " in text


def test_a_checkpoint_tells_what_its_line_does_not_cover(tmp_path: Path) -> None:
    for name, other in (("one", 0.0), ("two", 1.0)):
        with CheckpointManager(tmp_path / name, save_interval_steps=1) as manager:
            for step in (1, 2):
                manager.journal.record(step, {"w": step})
                manager.save(step, {"w": step, "moments": other * (step == 2)})
    found = bisect_runs(tmp_path / "one", tmp_path / "two")
    assert (found.compared, found.last_equal, found.step) == ("checkpoints", 1, 2)


def _cut(run: Path, _: Path) -> None:
    lines = (run / LOG_FILE).read_bytes().splitlines(keepends=True)
    (run / LOG_FILE).write_bytes(b"".join(lines[:8]))


def _replace(run: Path, other: Path) -> None:
    (run / LOG_FILE).write_bytes((other / LOG_FILE).read_bytes())


def _edit(line: int) -> Callable[[Path, Path], None]:
    def edit(run: Path, _: Path) -> None:
        lines = (run / LOG_FILE).read_bytes().splitlines(keepends=True)
        lines[line] = re.sub(rb'"state":"[^"]*"', b'"state":"%b"' % (b"0" * 32), lines[line])
        (run / LOG_FILE).write_bytes(b"".join(lines))

    return edit


def _remove(run: Path, _: Path) -> None:
    (run / LOG_FILE).unlink()


def _pipe(run: Path, _: Path) -> None:
    (run / LOG_FILE).unlink()
    os.mkfifo(run / LOG_FILE)


def _link(run: Path, _: Path) -> None:
    (run / LOG_FILE).unlink()
    (run / LOG_FILE).symlink_to("gone")


@pytest.mark.parametrize("attempts", [((20, 1),), ((19, 1), (20, None))])
def test_a_damaged_journal_is_not_believed(
    tmp_path: Path, attempts: tuple[tuple[int, int | None], ...]
) -> None:
    one, two = trained(tmp_path / "one", *attempts), trained(tmp_path / "two", *attempts, odd=13)
    intact = (two / LOG_FILE).read_bytes()
    for damage in (_cut, _replace, _edit(7), _edit(18), _remove, _pipe, _link):
        assert bisect_runs(one, two).step == 13
        damage(two, one)
        for runs in ((one, two), (two, one)):
            with pytest.raises(CorruptionError, match=LOG_FILE):
                bisect_runs(*runs)
        (two / LOG_FILE).unlink(missing_ok=True)
        (two / LOG_FILE).write_bytes(intact)


def test_a_link_to_nothing_is_no_missing_journal(tmp_path: Path) -> None:
    one = trained(tmp_path / "one", (5, None))
    (one / LOG_FILE).unlink()
    (one / LOG_FILE).symlink_to("gone")
    with pytest.raises(CorruptionError, match="a link to a file that is not there"):
        bisect_runs(one, one)


def test_the_command_and_runs_without_a_journal(tmp_path: Path) -> None:
    for name, parts_at in (("one", 99), ("two", 4)):
        with CheckpointManager(tmp_path / name, max_to_keep=None) as manager:
            for step in range(1, 7):
                manager.save(step, {"w": np.full(3, step + (step >= parts_at))})
    ended = CliRunner().invoke(main, ["bisect", str(tmp_path / "one"), str(tmp_path / "two")])
    assert ended.exit_code == 1
    assert "they part at step 4, after step 3, which is equal (checkpoints)" in ended.output
    for name in ("one", "two"):
        with Run(tmp_path / name) as run:
            run.delete([1, 2, 3])
    ended = CliRunner().invoke(main, ["bisect", str(tmp_path / "one"), str(tmp_path / "two")])
    assert ended.exit_code == 1
    assert (
        "they differ at step 4, the oldest that both still have; they part there or" in ended.output
    )
    assert "they part at" not in ended.output
    same = CliRunner().invoke(main, ["bisect", *[str(tmp_path / "one")] * 2, "--json"])
    assert same.exit_code == 0
    assert json.loads(same.stdout)["last_equal"] == 6


def test_what_cannot_be_compared_is_named(tmp_path: Path) -> None:
    one = journal(tmp_path / "one", range(1, 10))
    with pytest.raises(NotARunError):
        bisect_runs(one, tmp_path / "none")
    two = journal(tmp_path / "two", range(1, 10))
    with (two / LOG_FILE).open("ab") as file:
        file.write(b'{"hash":"torn')
    assert bisect_runs(one, two).last_equal == 9
    (two / LOG_FILE).write_bytes(b"nothing\n" * 9)
    with pytest.raises(CorruptionError, match="line 1: the hash does not fit"):
        bisect_runs(one, two)


def test_a_journal_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with Run(tmp_path / name, create=True) as run:
            run.save(1, {})
        (tmp_path / name / LOG_FILE).write_text("{}\n")
    (tmp_path / "a" / LOG_FILE).unlink()
    (tmp_path / "a" / LOG_FILE).mkdir()
    with pytest.raises(CorruptionError, match="directory"):
        bisect_runs(tmp_path / "a", tmp_path / "b")
