"""The kernels of `perdure doctor`: planted differences are found and named, and real ones computed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from perdure.cli import main
from perdure.doctor import Computed, ResultComparison, compare, kernels
from perdure.doctor.kernels import AS_IT_IS, DETERMINISTIC, ONE_THREAD, check_framework

HERE = Path(__file__).parent
GROUP = "numpy on plain, as it is"
QUIET = ("right", "kind", "again", "process", "threads", "leaf", "refuses", "fails")


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A framework whose kernels are wrong on purpose, under the name of one that is installed."""
    monkeypatch.setattr(kernels, "FRAMEWORKS", {"numpy": "planted_kernels"})
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def by_name(found: list[ResultComparison], group: str = GROUP) -> dict[str, ResultComparison]:
    return {row.what.removesuffix(" float32"): row for row in found if row.group == group}


def test_each_planted_difference_is_named() -> None:
    conditions = (AS_IT_IS, AS_IT_IS, ONE_THREAD)
    result = check_framework("numpy", 3, only=QUIET, conditions=conditions)
    rows = by_name(result.comparisons)
    assert result.settings == {"version": "planted 1"}
    assert {name for name, row in rows.items() if not row.is_equal} == {
        "again",
        "process",
        "leaf",
        "fails",
    }
    assert (rows["right"].results, rows["right"].devices, rows["right"].processes) == (
        12,
        ("a", "b"),
        2,
    )
    # The results of each process alternate, on both devices: half of all.
    assert sum(place.count for place in rows["again"].deviations) == 6
    assert [(place.device, place.process) for place in rows["process"].deviations] == [
        ("a", 2),
        ("b", 2),
    ]
    assert [(p.device, p.process, p.count, p.of, p.leaves) for p in rows["leaf"].deviations] == [
        ("b", 1, 3, 3, ("gradient/x",)),
        ("b", 2, 3, 3, ("gradient/x",)),
    ]
    assert rows["refuses"].is_refusal
    assert rows["refuses"].problem == "refused: it has no deterministic form"
    assert rows["fails"].problem == "failed: ValueError: not on this device"
    # Another kind of device is compared with itself only; threads are a report and no difference.
    assert by_name(result.comparisons, "numpy on other, as it is")["kind"].is_equal
    assert result.by_threads == ("threads float32",)


def test_a_crash_and_a_hang_are_rows_and_not_the_end() -> None:
    result = check_framework("numpy", 2, only=("right", "killed"), conditions=(DETERMINISTIC,))
    rows = by_name(result.comparisons, "numpy on plain, deterministic")
    assert rows["right"].is_equal
    (end,) = by_name(result.comparisons, "numpy, deterministic").values()
    assert end.problem == "ended by SIGKILL in killed float32"
    assert not end.is_equal
    result = check_framework("numpy", 2, only=("hangs",), conditions=(AS_IT_IS,), limit_s=0.1)
    (row,) = result.comparisons
    assert row.problem.startswith("no result after 0.1 s")
    assert not row.is_equal


def test_the_process_ends_with_the_doctor(tmp_path: Path) -> None:
    request = {"module": "planted_kernels", "condition": AS_IT_IS, "repeats": 2, "only": ["hangs"]}
    command = [sys.executable, "-c", "from perdure.doctor.kernels import main; main()"]
    asked = json.dumps({**request, "file": str(tmp_path / "events")})
    with subprocess.Popen([*command, asked], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait() == 1


def test_a_framework_that_cannot_be_imported_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "FRAMEWORKS", {"numpy": "no_such_kernels"})
    (row,) = check_framework("numpy", 2, conditions=(AS_IT_IS,)).comparisons
    assert row.problem.startswith(
        "ended with status 1 before the first kernel: ModuleNotFoundError"
    )


def test_the_command_exits_with_1_and_names_what_differs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kernels, "CONDITIONS", (AS_IT_IS,))
    ended = CliRunner().invoke(main, ["doctor", "--run", str(tmp_path / "runs" / "mine")])
    assert ended.exit_code == 1, ended.output
    # `killed` is among the kernels, after those that differ.
    assert f"{GROUP}: leaf float32: other bits in 5 of 5 results on b, process 1: gradient/x" in (
        ended.stdout
    )
    assert "numpy, as it is: the process: ended by SIGKILL in killed float32" in ended.stdout
    assert "a second writer is refused" in ended.stdout
    assert ended.stdout.splitlines()[-1] == "differs"
    assert list(tmp_path.iterdir()) == []
    ended = CliRunner().invoke(main, ["doctor", "--json", "--repeats", "2"])
    found = json.loads(ended.stdout)
    assert (found["verdict"], ended.exit_code) == ("differs", 1)
    assert {row["what"] for row in found["comparisons"] if row["is_equal"]} >= {"right float32"}
    assert found["frameworks"] == {
        "numpy": {"settings": {"version": "planted 1"}, "by_threads": None}
    }


@pytest.mark.parametrize(
    "arguments",
    [
        ["--steps", "3"],
        ["--repeats", "2", "--", "true"],
        ["--framework", "numpi"],
        ["--repeats", "1"],
    ],
)
def test_mistakes_in_the_arguments_exit_with_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(main, ["doctor", *arguments]).exit_code == 2


@pytest.mark.parametrize("order", [("a1", "b0", "c0"), ("a1", "a1", "a1", "b0", "c0")])
def test_most_devices_are_what_is_expected(order: tuple[str, ...]) -> None:
    (row,) = compare(Computed("", "x", device, 1, {"y": bits}) for device, bits in order)
    assert [place.device for place in row.deviations] == ["a"]


def test_without_a_framework_only_a_file_system_can_be_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kernels, "FRAMEWORKS", {"no_such_framework": "planted_kernels"})
    assert CliRunner().invoke(main, ["doctor"]).exit_code == 2
    ended = CliRunner().invoke(main, ["doctor", "--run", str(tmp_path)])
    assert (ended.exit_code, ended.stdout.splitlines()[-1]) == (0, "equal")
    (tmp_path / "file").touch()
    ended = CliRunner().invoke(main, ["doctor", "--run", str(tmp_path / "file")])
    assert ended.exit_code == 1
    assert "WRONG" in ended.stdout
