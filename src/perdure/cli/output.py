"""Prints aligned columns for people and JSON for programs; imports little, so that `ls` is quick."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

import click

from perdure.inspect.tables import Table
from perdure.inspect.tables import printable as printable
from perdure.inspect.tables import size_text as size_text

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
run_argument = click.argument("run", metavar="RUN", type=click.Path(path_type=str))
checkpoint_argument = click.argument("run", metavar="RUN[@STEP]", type=click.Path(path_type=str))
leaves_option = click.option(
    "--leaves",
    metavar="PATTERN",
    multiple=True,
    help="Only these leaves, such as model, '*/bias' or 'model/**/kernel'. May be repeated.",
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


def discard_unwritten() -> None:
    """Discard what the standard output holds: Python would try again at its exit, and exit with 120."""
    with suppress(OSError, ValueError):  # the stream may have no file
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def document(value: object) -> None:
    """Print one JSON document."""
    click.echo(json.dumps(value, indent=2))
