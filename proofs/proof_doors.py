"""The plug-ins in their trainers, and programs of other repositories: kill, resume, compare the bits.

Part one runs the tests of `tests/plugins`, none of which may be skipped here. Part two restores sharded
states on other meshes; about fifteen minutes on two cores. Part three, with `--programs DIR`, runs
programs from clones of other repositories with the lines that perdure needs: undisturbed, and
interrupted in the middle of an epoch and resumed, by SIGKILL and SIGTERM in turn. All weights and
moments at the end have to have the bits of the undisturbed run. Beside it stands what the program's own
way of resuming gives. Nothing of the programs is stored here.

Run by `make proof-doors`; ARGS='-k lightning' picks tests, as for pytest; ARGS=--meshes runs the meshes
alone, and ARGS='--programs ../programs --digits ../mnist --only nanoGPT' one program alone.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import doors_meshes
import pytest
import real_jax
import real_torch
from real_program import REPOSITORIES, Program
from real_runs import Findings, Laboratory, trial

from report import Row, finish, row

TESTS = Path(__file__).parent.parent / "tests"
PROGRAMS = (*real_torch.PROGRAMS, *real_jax.PROGRAMS)
TABLE = Path("build") / "proof-doors.md"
GROUPS = "test_two_processes_resume_to_the_same_bits"


class Counts:
    """How many tests passed, failed and were skipped, and those of several processes by host."""

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = {}
        self.of_groups: dict[str, list[bool]] = {}

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._writer = session.config.get_terminal_writer()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] = self.outcomes.get(report.outcome, 0) + 1
            if report.failed:  # at once, because the others take an hour
                self._writer.line(f"\n{report.nodeid}\n{report.longreprtext}")
            if GROUPS in report.nodeid:
                host, how, _ = report.nodeid.partition("[")[2].split("-")
                self.of_groups.setdefault(f"{host} {how}", []).append(report.outcome == "passed")

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome != "passed":
            self.outcomes[report.outcome] = self.outcomes.get(report.outcome, 0) + 1


def plugin_tests(arguments: list[str]) -> Iterator[Row]:
    """The tests of the plug-ins, and for each host with several processes what it does by itself."""
    for name in ("torch", "transformers", "accelerate", "lightning", "mlflow-skinny"):
        print(f"{name} {metadata.version(name)}")
    counts = Counts()
    status = pytest.main(
        [
            f"{TESTS}/plugins",
            f"{TESTS}/train/test_trackers.py",
            "-p",
            "no:cacheprovider",
            "-o",
            "faulthandler_timeout=0",
            *arguments,
        ],
        plugins=[counts],
    )
    print(counts.outcomes)
    passed = counts.outcomes.get("passed", 0)
    tried = sum(counts.outcomes.values())
    is_proof = status == 0 and 0 < passed == tried
    yield {"what": "tests of the plug-ins", "tried": tried, "held": passed, "met": is_proof}
    for name, outcomes in counts.of_groups.items():
        host, how = name.split()
        yield row(f"{name}: interrupted, resumed; in its own way {own_way(host, how)}", outcomes)


def own_way(host: str, how: str) -> str:
    """What a host's own way of resuming gives after a SIGKILL in the middle of an epoch."""
    sys.path[:0] = [str(TESTS), str(TESTS / "plugins")]
    import test_groups

    if host == "fabric":
        return "none for a loop"
    endings: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        status, whole, _ = test_groups.run(host, f"{how}_own", Path(scratch) / "whole")
        for step in (5, 7) if status == 0 else ():
            directory = Path(scratch) / str(step)
            test_groups.run(host, f"{how}_own-killed{step}", directory)
            status, ended, _ = test_groups.run(host, f"{how}_own", directory)
            is_equal = [each["bits"] for each in ended] == [each["bits"] for each in whole]
            endings.append("an error" if status else "equal" if is_equal else "other bits")
    return " and ".join(endings) or "an error"


def real_programs(lab: Laboratory, chosen: list[Program]) -> Iterator[Row]:
    """A row for each program."""
    table = [
        "| program | lines (meant) | equal | its own way to resume |",
        "|---|---|---|---|",
    ]
    for program in chosen:
        if reason := lab.missing(program):
            print(f"not tried: {program.name}: {reason}", flush=True)
            table.append(
                f"| {program.name} | {program.lines} ({program.limit}) | not tried: {reason} | |"
            )
        else:
            print(program.name, flush=True)
            findings = trial(lab, program)
            table.append(_line(program, findings))
            what = f"{program.name}, {program.lines} lines; in its own way: {findings.own}"
            yield row(what, findings.outcomes)
        TABLE.write_text("\n".join(table) + "\n")


def _line(program: Program, findings: Findings) -> str:
    outcomes = findings.outcomes
    equal = f"{sum(outcomes)} of {len(outcomes)}"
    return f"| {program.name} | {program.lines} ({program.limit}) | {equal} | {findings.own} |"


def how_to_get() -> str:
    """Why the second part is not run, and the commands that fetch the programs."""
    clones = "\n".join(
        f"  git clone --depth 1 https://github.com/{repository} {folder}"
        for folder, repository in REPOSITORIES.items()
    )
    return (
        "The programs of other repositories are not run: --programs is not given. To run them, in a "
        f"folder of their own:\n{clones}\nand then make proof-doors ARGS='--programs FOLDER --digits "
        "MNIST --python .venv/bin/python', where MNIST is a folder with the IDX files of digits, and "
        ".venv (make setup) has JAX, Flax, Equinox and TensorFlow."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The proof of the plug-ins.")
    parser.add_argument("--programs", type=Path, help="folder with clones of the repositories")
    parser.add_argument("--digits", type=Path, help="folder with MNIST's IDX files")
    parser.add_argument("--meshes", action="store_true", help="the sharded states alone")
    parser.add_argument("--runs", type=int, default=10, help="interrupted runs of each program")
    parser.add_argument("--only", action="append", help="a part of a program's name; no tests then")
    parser.add_argument(
        "--python", action="append", default=[], help="another interpreter, for what this one lacks"
    )
    arguments, rest = parser.parse_known_args()
    if arguments.programs is not None and arguments.digits is None:
        parser.error("--programs also needs --digits, a folder with MNIST's IDX files")

    only = arguments.only or [""]
    chosen = [program for program in PROGRAMS if any(part in program.name for part in only)]
    if not chosen:
        parser.error(f"--only: found none of {only} in {[program.name for program in PROGRAMS]}")

    def rows() -> Iterator[Row]:
        if arguments.meshes:
            yield from doors_meshes.rows()
            return
        if not arguments.only:
            yield from plugin_tests(rest)
            if not rest:
                yield from doors_meshes.rows()
        if arguments.programs is None:
            print(how_to_get(), flush=True)
            return
        # A test that a signal has ended leaves it ignored, and every program would inherit that.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        pythons = [sys.executable, *(shutil.which(name) or name for name in arguments.python)]
        programs, digits = arguments.programs.resolve(), arguments.digits.resolve()
        lab = Laboratory(programs, digits, pythons, arguments.runs)
        try:
            yield from real_programs(lab, chosen)
        finally:
            lab.close()

    finish("doors", rows())


if __name__ == "__main__":
    main()
