"""For tests of programs: `drill` proves exact resume, `check_run` verifies a run directory.

`StorageConformance` tests a storage and needs pytest.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perdure.errors import MissingExtraError
from perdure.store import Run, Storage, VerifyReport, verify_run

if TYPE_CHECKING:
    from perdure.testing.conformance import StorageConformance

__all__ = ["StorageConformance", "check_run", "drill"]

_WIDTH = 110


def drill(
    command: Sequence[str],
    *,
    faults: Sequence[str] = (),
    runs: int = 10,
    seed: int = 0,
    workers: int = 1,
    read_only: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    fail_fast: bool = False,
    directory: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Run `command` undisturbed and `runs` times under faults; fail unless all bits are the same.

    Args:
        command: The program and its arguments.
        faults: Kinds of faults by name; by default all that can happen to the program.
        runs: How many faulted runs to try, besides the restores that every drill tries; they take
            the kinds in turn.
        seed: Decides the places and times of the faults.
        workers: Processes of the group.
        read_only: Run directories that the program only reads; they are left where they are.
        environment: Variables for the program, on top of those of this process.
        fail_fast: Stop at the first run that differs or fails.
        directory: Keeps the runs that differ; by default a temporary directory.

    Returns:
        The document that `perdure drill --json` prints.

    Raises:
        AssertionError: If a run differs, fails, or a fault did not fire, or if no run continued from
            a checkpoint, with the report: the first step and leaves that differ, the cause, and how
            to repair it.
        LaunchError: If the command does not exist, fails by itself, or saves nothing.
    """
    from rich.console import Console

    from perdure.drill.drill import run_drill
    from perdure.drill.drill_report import DrillOptions, TextReporter

    options = DrillOptions(
        tuple(faults), runs, seed, workers, tuple(read_only), dict(environment or {}), fail_fast
    )
    with ExitStack() as stack:
        if directory is None:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="perdure-drill-"))
        document = run_drill(command, options, Path(directory)).document()
    if not document["pass"]:
        text = io.StringIO()
        TextReporter(Console(file=text, width=_WIDTH)).summary(document)
        raise AssertionError(f"{' '.join(command)}\n{text.getvalue()}")
    return document


def check_run(where: str | os.PathLike[str] | Storage) -> VerifyReport:
    """Read and hash every byte of a run directory.

    Args:
        where: The path, URL or storage of the run directory.

    Returns:
        The report; harmless leftovers of a crash appear only there.

    Raises:
        AssertionError: If a manifest or a pack is damaged or missing; it lists all of them.
    """
    report = verify_run(Run(where))
    harmful = [
        f"  {problem.name}: {problem.what}" for problem in report.problems if problem.harmful
    ]
    if harmful:
        lines = "\n".join(harmful)
        raise AssertionError(f"{report.where}: expected a whole run directory, found:\n{lines}")
    return report


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name == "StorageConformance":
        try:
            import pytest  # the conformance tests alone need it
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                f"{error.name} is not installed. StorageConformance is a suite of tests for it: "
                f"pip install pytest.",
                name=error.name,
            ) from error
        pytest.register_assert_rewrite("perdure.testing.conformance")
        return import_module("perdure.testing.conformance").StorageConformance
    raise AttributeError(f"module 'perdure.testing' has no attribute {name!r}")
