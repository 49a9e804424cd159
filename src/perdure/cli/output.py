"""Prints aligned columns for people and JSON for programs; imports little, so that `ls` is quick."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from perdure.errors import ArgumentError, StepExistsError, StoreError
from perdure.look.tables import Table
from perdure.look.tables import printable as printable
from perdure.look.tables import size_text as size_text

EXIT_STATUS = (
    "Exit status: 0 if it is done, 1 if it failed, 2 for a mistake in the arguments, 130 after "
    "Ctrl-C."
)
"""Ends the help of each command whose status says no more than that."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
run_argument = click.argument("run", metavar="RUN", type=click.Path(path_type=str))
checkpoint_argument = click.argument("run", metavar="RUN[@STEP]", type=click.Path(path_type=str))
leaves_option = click.option(
    "--leaves",
    metavar="PATTERN",
    multiple=True,
    help="Only these leaves, such as model, '*/bias' or 'model/**/kernel'. May be repeated.",
)
workers_option = click.option(
    "--workers",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Processes of the group.",
)
read_only_option = click.option(
    "--read-only",
    multiple=True,
    type=click.Path(path_type=str),
    help="Another run directory, which COMMAND only reads.",
)


VALUE_CHARACTERS = 200
"""A longer value is cut in output for people; --json has all of it."""


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows in aligned columns, with columns of numbers aligned to the right."""
    click.echo(str(Table(header, rows)))


def report(text: str) -> None:
    """Print a message on the standard error, which nobody may be able to read."""
    lines = "\n".join(printable(line) for line in text.split("\n"))
    with suppress(OSError):
        click.echo(f"perdure: {lines}", err=True)


def is_output_error(error: OSError) -> bool:
    """Whether `error` was raised by printing, and by nothing else that a command does."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
    return module.partition(".")[0] in ("click", "rich")


@contextmanager
def kept_or_temporary(directory: Path | None, name: str) -> Iterator[Path]:
    """The directory that `--directory` gives, or one that is removed at the end."""
    if directory is not None:
        yield directory
        return
    import tempfile  # few commands need it

    with tempfile.TemporaryDirectory(prefix=f"perdure-{name}-") as temporary:
        yield Path(temporary)


@contextmanager
def new_run_argument() -> Iterator[None]:
    """Count a new run directory that cannot be one, such as a run that exists, as wrong usage."""
    try:
        yield
    except StoreError as error:
        if type(error) not in (StoreError, StepExistsError):
            raise
        raise ArgumentError(str(error)) from error


def discard_unwritten() -> None:
    """Discard what the standard output holds: Python would try again at its exit, and exit with 120."""
    with suppress(OSError, ValueError):  # the stream may have no file
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def document(value: object) -> None:
    """Print one JSON document."""
    click.echo(json.dumps(value, indent=2))
