"""What the commands share: arguments, options, tables for people and JSON; imports little."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from perdure.errors import ArgumentError, PerdureError, StepExistsError, StoreError
from perdure.look.tables import Shown, Table, plain
from perdure.look.tables import printable as printable
from perdure.look.tables import size_text as size_text

EXIT_STATUS = (
    "Exit status: 0 if it is done, 1 if it failed, 2 for a mistake in the arguments, 130 after "
    "Ctrl-C."
)
"""Ends the help of each command whose status says no more than that."""

VALUE_CHARACTERS = 200
"""A longer value is cut in output for people; --json has all of it."""

PATH = click.Path(path_type=Path)
_TEXT_PATH = click.Path(path_type=str)
_STEPS = re.compile(r".+@(latest|best.*|\d+(,\d+)*)", re.DOTALL)


class NewRun(click.ParamType):
    """The path or URL of a run directory to write, which is not the name of a checkpoint."""

    name = "PATH"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if _STEPS.fullmatch(value) and not os.path.isdir(value):
            self.fail(
                f"expected a run directory to write, found a checkpoint: {value}.", param, ctx
            )
        return value


class Size(click.ParamType):
    """A number of bytes such as `5GB` or `500MiB`."""

    name = "SIZE"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d+)\s*([KMG]?)(I?)B?", str(value).upper())
        if match is None or not int(match[1]):
            self.fail(f"expected a size such as 5GB or 500MiB, found {value!r}.", param, ctx)
        base = 1024 if match[3] else 1000
        return int(match[1]) * base ** " KMG".index(match[2] or " ")


run_argument = click.argument("run", metavar="RUN", type=_TEXT_PATH)
runs_argument = click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=_TEXT_PATH)
command_argument = click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
leaves_option = click.option(
    "--leaves",
    metavar="PATTERN",
    multiple=True,
    help="Only these leaves, such as model, '*/bias' or 'model/**/kernel'. May be repeated.",
)
directory_option = click.option("--directory", type=PATH, help="Keep what is run here.")
workers_option = click.option(
    "--workers",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Processes of the group.",
)
devices_option = click.option("--devices", type=click.IntRange(1), help="Devices of each worker.")
seed_option = click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Of every random choice."
)
dry_run_option = click.option("--dry-run", is_flag=True, help="Print the plan; change nothing.")
read_only_option = click.option(
    "--read-only",
    metavar="RUN",
    multiple=True,
    type=click.Path(path_type=str, exists=True, file_okay=False),
    help="A run directory that COMMAND only reads; it is left where it is. May be repeated.",
)


def checkpoint_argument(name: str, metavar: str = "RUN[@STEP]", **more: Any) -> Any:
    """An argument that names one or several checkpoints."""
    return click.argument(name, metavar=metavar, type=_TEXT_PATH, **more)


def output_option(what: str, **more: Any) -> Any:
    """`-o`: where the result is written."""
    return click.option("-o", "--output", help=what, **{"type": PATH, **more})


def terminal_width() -> int | None:
    """The characters of a line by COLUMNS or the terminal; None if the output is no terminal."""
    if os.environ.get("COLUMNS", "").isdecimal() or sys.stdout.isatty():
        return shutil.get_terminal_size().columns or None
    return None


def show(result: Shown | Table) -> None:
    """Print a result for people."""
    click.echo(result.text(terminal_width()))


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows in aligned columns, with columns of numbers aligned to the right."""
    show(Table(header, rows))


def document(value: object) -> None:
    """Print one JSON document."""
    click.echo(json.dumps(plain(value), indent=2))


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
def options_of_library() -> Iterator[None]:
    """Count an option that the library refuses as wrong usage, whatever error it raises."""
    try:
        yield
    except PerdureError as error:
        raise error if isinstance(error, ArgumentError) else ArgumentError(str(error)) from error


@contextmanager
def new_run_argument() -> Iterator[None]:
    """Count a new run directory that cannot be one, such as a run that exists, as wrong usage."""
    try:
        yield
    except StoreError as error:
        if type(error) not in (StoreError, StepExistsError):
            raise
        raise ArgumentError(str(error)) from error


def leaves_text(count: int, nbytes: int) -> str:
    """Text such as `3 leaves, 1.5 MiB`."""
    return f"{count} {'leaf' if count == 1 else 'leaves'}, {size_text(nbytes)}"
