"""The drill as a test: one call proves exact resume in a project's own tests, of any framework."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from perdure.drill import DrillOptions, run_drill
from perdure.drill.text_report import TextReporter

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
