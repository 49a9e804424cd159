"""What commands print: a result as text or as one JSON document, lines, messages of errors."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import click

from perdure.look.tables import Shown, Table, plain
from perdure.text import printable_lines


def terminal_width() -> int | None:
    """The characters of a line by COLUMNS or the terminal; None if the output is no terminal."""
    if os.environ.get("COLUMNS", "").isdecimal() or sys.stdout.isatty():
        return shutil.get_terminal_size().columns or None
    return None


def print_result(result: Shown, as_json: bool) -> None:
    """Print a result: as text for people, or as one JSON document."""
    if as_json:
        document(result.as_dict())
    else:
        # One text, so that a reader who takes the first lines (`| head`) makes nothing fail.
        click.echo(result.text(terminal_width()))


def document(value: object) -> None:
    click.echo(json.dumps(plain(value), indent=2))


def say(*texts: object, err: bool = False) -> None:
    """Print lines, with escapes in place of characters that a terminal obeys."""
    for text in texts:
        click.echo(printable_lines(str(text)), err=err)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    click.echo(Table(header, rows).text(terminal_width()))


def progress(text: str) -> None:
    """Print what is under way, beside the result."""
    click.echo(f"{text} ...", err=True)


def print_leaves(leaves: Sequence[Mapping[str, Any]], form: str, most: int = 8) -> None:
    """Print leaves that differ: `form` gets their texts, `missing` where a side has none."""
    for leaf in leaves[:most]:
        sides = {side: leaf[side] or "missing" for side in ("expected", "found")}
        click.echo(f"    {leaf['path']}: {form.format(**sides)}")
    if len(leaves) > most:
        click.echo(f"    and {len(leaves) - most} more leaves")


def print_error(text: str, kind: str) -> None:
    """Print an error as the one JSON document of a command."""
    click.echo(json.dumps({"error": text, "kind": kind}))


def report(text: str) -> None:
    """Print a message on the standard error, which nobody may be able to read."""
    with suppress(OSError):
        say(f"perdure: {text}", err=True)


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
