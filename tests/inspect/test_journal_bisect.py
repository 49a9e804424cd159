"""`perdure bisect`: the step at which two journals part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from perdure.checkpoint import CheckpointManager
from perdure.cli import main
from perdure.errors import ArgumentError, CorruptionError, NotARunError, UnreachableError
from perdure.inspect.journal_bisect import _Journal, bisect_runs
from perdure.store import LocalStorage, Run
from perdure.store.journal_file import JOURNAL, JournalEntry, JournalWriter


def journal(run: Path, steps: Any, parts_at: int | None = None, what: str = "state") -> Path:
    Run(run, create=True).begin_writing()
    writer = JournalWriter(LocalStorage(run))
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
        writer.append(JournalEntry(step=step, attempt=step % 3, **digests))
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


def test_few_lines_of_a_long_journal_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = journal(tmp_path / "one", range(1, 20_001))
    two = journal(tmp_path / "two", range(1, 20_001), 12_345)
    read: list[int] = []
    entry = _Journal._entry

    def counted(self: Any, start: int, stop: int) -> JournalEntry:
        read.append(start)
        return entry(self, start, stop)

    monkeypatch.setattr(_Journal, "_entry", counted)
    assert bisect_runs(one, two).step == 12_345
    assert len(read) < 2000


def test_the_command_and_runs_without_a_journal(tmp_path: Path) -> None:
    for name, parts_at in (("one", 99), ("two", 4)):
        with CheckpointManager(tmp_path / name, max_to_keep=None) as manager:
            for step in range(1, 7):
                manager.save(step, {"w": np.full(3, step + (step >= parts_at))})
    ended = CliRunner().invoke(main, ["bisect", str(tmp_path / "one"), str(tmp_path / "two")])
    assert ended.exit_code == 1
    assert "they part at step 4, after step 3, which is equal (checkpoints)" in ended.output
    same = CliRunner().invoke(main, ["bisect", *[str(tmp_path / "one")] * 2, "--json"])
    assert same.exit_code == 0
    assert json.loads(same.stdout)["last_equal"] == 6


def test_what_cannot_be_compared_is_named(tmp_path: Path) -> None:
    one = journal(tmp_path / "one", range(1, 10))
    with pytest.raises(NotARunError):
        bisect_runs(one, tmp_path / "none")
    two = journal(tmp_path / "two", range(1, 10))
    with (two / JOURNAL).open("ab") as file:
        file.write(b'{"hash":"torn')
    assert bisect_runs(one, two).last_equal == 9
    (two / JOURNAL).write_bytes(b"nothing\n" * 9)
    with pytest.raises(CorruptionError, match="no line of a journal"):
        bisect_runs(one, two)


def test_a_journal_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with Run(tmp_path / name, create=True) as run:
            run.save(1, {})
        (tmp_path / name / JOURNAL).write_text("{}\n")
    (tmp_path / "a" / JOURNAL).unlink()
    (tmp_path / "a" / JOURNAL).mkdir()
    with pytest.raises(UnreachableError, match=r"journal\.jsonl: the journal cannot be read"):
        bisect_runs(tmp_path / "a", tmp_path / "b")
