"""`perdure drill -- python train.py`: the program under faults on purpose, compared bit by bit."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

import click

from perdure.cli.output import document, json_option
from perdure.errors import LaunchError


@click.command("drill", context_settings={"ignore_unknown_options": False})
@click.option("--faults", default="", help="Kinds of faults, by comma; all that can happen.")
@click.option("--runs", type=click.IntRange(1), default=20, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--leave", multiple=True, type=click.Path(path_type=str), help="A run directory only read."
)
@click.option(
    "--directory", type=click.Path(path_type=Path), help="Keep the runs that differ in here."
)
@click.option("--html", type=click.Path(path_type=Path), help="Write the report as a page, too.")
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
@click.pass_context
def command(
    ctx: click.Context,
    faults: str,
    runs: int,
    seed: int,
    workers: int,
    leave: tuple[str, ...],
    directory: Path | None,
    html: Path | None,
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND undisturbed, then RUNS times under faults; compare every checkpoint, bit by bit.

    COMMAND comes behind `--` and needs no change. Its run directories are led elsewhere meanwhile.
    Exit status 0 only if all runs end with the same bits and every fault has fired.
    """
    from rich.console import Console

    from perdure.drill import DrillOptions, run_drill
    from perdure.drill.html_report import page
    from perdure.drill.text_report import TextReporter

    wanted = tuple(name for name in faults.replace(" ", "").split(",") if name)
    options = DrillOptions(wanted, runs, seed, workers, leave)
    if html is not None:
        _require_writable(html)
    reporter = TextReporter(Console(stderr=as_json, quiet=as_json, soft_wrap=True), runs)
    with ExitStack() as stack:
        if directory is None:
            directory = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="perdure-drill-"))
            )
        report = run_drill(command, options, directory, reporter.tell).document()
    # First what needs no place on a disk, which may have become full meanwhile.
    if as_json:
        document(report)
    else:
        reporter.summary(report)
    if html is not None:
        try:
            html.write_text(page(report))
        except OSError as error:
            # Not raised: --json has had its one document.
            click.echo(f"perdure: {_refusal(html, error)}", err=True)
            ctx.exit(1)
    ctx.exit(0 if report["pass"] else 1)


def _require_writable(html: Path) -> None:
    """Raise `LaunchError` now and not behind the whole drill. Opened, because a mode says little (root,
    a file system that is read-only); a file that is there keeps what it holds."""
    there = os.path.lexists(html)
    try:
        html.open("a").close()
        if not there:
            html.unlink()
    except OSError as error:
        raise LaunchError(_refusal(html, error)) from error


def _refusal(html: Path, error: OSError) -> str:
    return (
        f"--html {html}: the report cannot be written there: {error}. Expected the path of a file in a "
        f"directory that exists and can be written to."
    )
