"""The drill as a test: one call keeps the proof of exact resume in a team's own suite."""

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
    leave: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    directory: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Run `command` undisturbed and `runs` times under faults; fail unless all bits are the same.

    The arguments are those of `perdure drill`; `environment` is added to that of the command.
    Returns the document that `perdure drill --json` prints. Raises `AssertionError` with the report
    (first step and leaves that differ, the cause, how to mend it), and `LaunchError` where there is
    nothing to try: the command does not exist, fails by itself, or saves nothing.
    """
    options = DrillOptions(
        tuple(faults), runs, seed, workers, tuple(leave), dict(environment or {})
    )
    with ExitStack() as stack:
        if directory is None:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="perdure-drill-"))
        document = run_drill(command, options, Path(directory)).document()
    if not document["pass"]:
        said = io.StringIO()
        TextReporter(Console(file=said, width=_WIDTH), runs).summary(document)
        raise AssertionError(f"{' '.join(command)}\n{said.getvalue()}")
    return document
