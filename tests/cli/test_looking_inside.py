"""`perdure show`, `diff` and `ls` as they are typed: output, JSON, exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from perdure.cli import main
from perdure.state.leaf_values import array_leaf, scalar_leaf
from perdure.store import Leaf, Run


def perdure(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    where = tmp_path / "run"
    with Run(where, create=True) as opened:
        for step in (10, 20):
            leaves = {
                "model/w": array_leaf(np.full((3, 4), step, np.float32)),
                "model/b": array_leaf(np.array([np.inf, 0])),
                "name": scalar_leaf("digits\x1b[2J"),
            }
            opened.save(step, leaves, {"seed": step}, {"loss": 1 / step})
    return where


def test_tree(run: Path) -> None:
    result = perdure("tree", f"{run}@10")
    assert result.exit_code == 0
    assert "float32[3,4]" in result.output
    assert "\x1b" not in result.output
    document = json.loads(perdure("tree", run, "--leaves", "model", "--json").output)
    assert document["checkpoint"] == f"{run}@20"
    assert [node["path"] for node in document["nodes"]] == ["", "model", "model/b", "model/w"]
    assert len(perdure("tree", run, "--depth", 0).output.splitlines()) == 3


def test_stats(run: Path) -> None:
    result = perdure("stats", f"{run}@best:max:loss")
    assert result.exit_code == 0
    assert "model/w" in result.output
    document = json.loads(perdure("stats", run, "--depth", "0", "--json").output)
    [row] = document["rows"]
    assert (row["count"], row["infinities"], row["max"]) == (14, 1, 20)
    with Run(run) as opened:
        opened.save(30, {"odd": Leaf("float7_x8", (1,), memoryview(b"1"))})
    result = perdure("stats", run)
    assert result.exit_code == 1
    assert "float7_x8" in result.output


def test_diff(run: Path) -> None:
    same = perdure("diff", f"{run}@10", f"{run}@10")
    assert (same.exit_code, same.output.splitlines()[-1]) == (0, "equal")
    other = perdure("diff", f"{run}@10", f"{run}@20")
    assert (other.exit_code, other.output.splitlines()[-1]) == (1, "different")
    document = json.loads(perdure("diff", f"{run}@10", f"{run}@20", "--json").output)
    assert document["equal"] is False
    [leaf] = document["changed"]
    assert (leaf["path"], leaf["differing"], leaf["max_abs"]) == ("model/w", 12, 10)
    assert document["recipe"] == [{"name": "seed", "first": 10, "second": 20}]
    assert perdure("diff", f"{run}@10", f"{run}@20", "--leaves", "name").exit_code == 0


def test_json_tells_nan_and_infinity_apart(tmp_path: Path) -> None:
    for name, value in (("a", 0.0), ("b", 1.0)):
        with Run(tmp_path / name, create=True) as run:
            run.save(1, {"w": array_leaf(np.array([value]))})
    output = perdure("diff", tmp_path / "a", tmp_path / "b", "--json").output

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    [leaf] = json.loads(output, parse_constant=refuse)["changed"]
    assert (leaf["max_abs"], leaf["rel_norm"], leaf["cosine"]) == (1, "Infinity", None)


def test_show_cuts_a_text_with_its_own_length_and_prints_once(tmp_path: Path) -> None:
    with Run(tmp_path, create=True) as run:
        run.save(1, {"n": scalar_leaf(10**400), "w": array_leaf(np.arange(2.0))})
    shown = perdure("show", tmp_path).output
    assert f"int {str(10**400)[:200]}... (401 characters)" in shown
    assert "in 1 pack\n" in shown
    read, write = os.pipe()
    program = [sys.executable, "-m", "perdure.cli", "show", str(tmp_path)]
    with os.fdopen(write, "wb") as end, subprocess.Popen(program, stdout=end) as process:
        end.close()
        with os.fdopen(read, "rb") as lines:
            assert lines.read(1)  # as `head -1`: the first block, and no more
        assert process.wait(120) == 0


def test_show_takes_the_name_of_a_checkpoint(run: Path) -> None:
    for name in (f"{run}@10", f"{run}@best:max:loss"):
        result = perdure("show", name)
        assert result.exit_code == 0
        assert "step         10" in result.output
    assert "kept         the newest" in perdure("show", run).output
    document = json.loads(perdure("show", f"{run}@10", "--json").output)
    assert (document["kept"], document["nbytes"]) == ("not recorded", 74)


def test_ls_says_why_each_checkpoint_is_kept(run: Path) -> None:
    with Run(run) as opened:
        opened.pin(10)
    rows = json.loads(perdure("ls", run, "--json").output)["checkpoints"]
    assert [(row["kept"], row["pinned"]) for row in rows] == [
        ("pinned", True),
        ("the newest", False),
    ]


@pytest.mark.parametrize(
    ("arguments", "status", "phrase"),
    [
        (("tree", "{run}@14"), 2, "the nearest is step 10"),
        (("tree", "{run}x"), 2, "run directory"),
        (("tree", "@3"), 2, "run directory"),
        (("stats", "@best"), 2, "run directory"),
        (("ls", ""), 2, "an empty string"),
        (("average", "{run}@10,20", "-o", "{run}"), 2, "apart from"),
        (("average", "{run}@10,20", "-o", ""), 2, "an empty string"),
        (("tree", "{run}@best"), 2, "@best:max:METRIC"),
        (("tree", "{run}", "--leaves", "modell"), 2, "no leaf matches 'modell'"),
        (("stats", "{run}", "--leaves", ""), 2, "leaves"),
        (("diff", "{run}", "{run}@14"), 2, "the nearest"),
        (("diff", "{run}"), 2, "Missing argument"),
        (("stats", "{run}@20"), 1, "perdure verify"),
        (("diff", "{run}@10", "{run}@20"), 1, "expected a pack"),
    ],
)
def test_a_mistake_is_one_message_and_an_exit_status(
    run: Path, arguments: tuple[str, ...], status: int, phrase: str
) -> None:
    if status == 1:
        for pack in (run / "packs").iterdir():
            pack.unlink()
    result = perdure(*(argument.format(run=run) for argument in arguments))
    assert result.exit_code == status
    assert phrase in result.output
    assert "Traceback" not in result.output


def test_the_commands_load_numpy_only_where_they_compute(run: Path) -> None:
    program = (
        "import sys; from perdure.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as exit: assert not exit.code\n"
        "print(sorted({'numpy', 'jax', 'torch', 'rich'} & sys.modules.keys()))"
    )
    loaded: dict[str, Any] = {}
    for command in ("tree", "stats"):
        done = subprocess.run(
            [sys.executable, "-c", program, command, str(run)],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        loaded[command] = done.stdout.splitlines()[-1]
    assert loaded == {"tree": "[]", "stats": "['numpy']"}
