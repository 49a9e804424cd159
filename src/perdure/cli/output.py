"""Prints aligned columns for people and JSON for programs; imports little, so that `ls` is quick."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

import click

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
run_argument = click.argument("run", metavar="RUN", type=click.Path(path_type=str))


VALUE_CHARACTERS = 200
"""A longer value is cut in output for people; --json has all of it."""


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows in aligned columns, with integers aligned to the right."""
    cells = [list(header), *[[printable(str(cell)) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    right = [bool(rows) and isinstance(rows[0][i], int) for i in range(len(header))]
    for row in cells:
        line = "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        )
        click.echo(line.rstrip())


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


def printable(text: str, most: int | None = None) -> str:
    """`text` with escapes in place of characters that a terminal obeys, cut after `most` characters."""
    cut = ""
    if most is not None and len(text) > most:
        cut = f"... ({len(text)} characters)"
        text = text[:most]
    return (
        "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text) + cut
    )


def document(value: object) -> None:
    """Print one JSON document."""
    click.echo(json.dumps(value, indent=2))


def size_text(nbytes: int) -> str:
    """A size in bytes as text, such as `1.5 MiB`."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
