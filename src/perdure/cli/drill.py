"""`perdure drill -- python train.py`: runs the program under injected faults and compares the bits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from perdure.cli import options as cli
from perdure.cli.output import document
from perdure.cli.output import report as report_error
from perdure.errors import ArgumentError


@cli.command("drill")
@click.option("--faults", help="Kinds of faults, separated by commas; by default all.")
@click.option("--runs", type=cli.COUNT, default=20, help="Faulted runs, besides the restores.")
@cli.seed_option
@cli.workers_option
@cli.read_only_option
@cli.directory_option
@cli.output_option("Also write the report as an HTML file.")
@click.option("--fail-fast", is_flag=True, help="Stop at the first run that differs or fails.")
@cli.command_argument()
def drill(
    faults: str | None,
    directory: Path | None,
    output: Path | None,
    as_json: bool,
    command: tuple[str, ...],
    **how: Any,
) -> int:
    """Run COMMAND undisturbed, then again under faults; compare every checkpoint, bit by bit.

    COMMAND follows `--` and needs no change. Each run has a copy of the working directory, without the
    run directories in it. The exit status is 0 only if all runs end with the same bits, every fault has
    fired, and a run has continued from a checkpoint; 130 after Ctrl-C, with the report so far.

    \b
    Example:
      perdure drill --runs 4 -o drill.html -- python train.py --steps 40
    """
    from rich.console import Console

    from perdure.drill.drill import run_drill
    from perdure.drill.drill_report import DrillOptions, DrillStopped, TextReporter
    from perdure.drill.fault_plan import KINDS
    from perdure.report.run_report import render_drill, templates

    kinds = tuple(name for name in (faults or "").replace(" ", "").split(",") if name)
    if faults is not None and not kinds:
        raise ArgumentError(f"--faults: expected some of {', '.join(KINDS)}, found {faults!r}.")
    with cli.wrong_usage():
        options = DrillOptions(kinds, **how)
    if output is not None:
        templates()  # raises before the drill if they are not installed
        existed = os.path.lexists(output)
        try:  # its mode says little: root, a read-only file system
            output.open("a").close()
            if not existed:
                output.unlink()
        except OSError as error:
            raise ArgumentError(_unwritable(output, error)) from error
    reporter = TextReporter(Console(stderr=as_json, soft_wrap=True))
    with cli.kept_or_temporary(directory, "drill") as work:
        try:
            report = run_drill(command, options, work, reporter.progress).document()
        except DrillStopped as stopped:
            report = stopped.report.document()
    # The report is printed first: the disk may have become full during the drill.
    if as_json:
        document(report)
    else:
        reporter.summary(report)
    if output is not None:
        try:
            output.write_text(render_drill(report), encoding="utf-8")
        except OSError as error:
            # Not raised, because --json has printed its one document.
            report_error(_unwritable(output, error))
            return 1
    return 130 if report["stopped"] else 0 if report["pass"] else 1


def _unwritable(html: Path, error: OSError) -> str:
    return (
        f"-o {html}: the report cannot be written there: {error}. Expected the path of a file in a "
        f"directory that exists and can be written to."
    )
