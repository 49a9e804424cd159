"""What the declarations of commands share: arguments, options, and the types of their values."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from perdure.errors import ArgumentError, PerdureError

EXIT_STATUS = (  # ends the help of each command whose status says no more than that
    "Exit status: 0 if it is done, 1 if it failed, 2 for a mistake in the arguments, 130 after "
    "Ctrl-C."
)

PATH = click.Path(path_type=Path)
COUNT = click.IntRange(1)
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


def command(name: str, **settings: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """A command with `--json`, whose function returns the exit status; None and False are 0."""

    def declare(function: Callable[..., Any]) -> click.Command:
        declared = click.command(name, **settings)(function)
        declared.context_settings.setdefault("show_default", True)
        flag = click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON document.")
        declared.params.append(flag)
        return declared

    return declare


run_argument = click.argument("run", metavar="RUN", type=_TEXT_PATH)
runs_argument = click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=_TEXT_PATH)
leaves_option = click.option(
    "--leaves", metavar="PATTERN", multiple=True, help="Only leaves such as 'model/**/kernel'."
)
directory_option = click.option("--directory", type=PATH, help="Keep what is run here.")
WORKERS = ("-n", "-np", "--workers")
workers_option = click.option(*WORKERS, type=COUNT, default=1, help="Processes of the group.")
devices_option = click.option("--devices", type=COUNT, help="Devices of each worker.")
seed_option = click.option("--seed", type=click.IntRange(0), default=0, help="Of random choices.")
dry_run_option = click.option("--dry-run", is_flag=True, help="Print the plan; change nothing.")
_existing = click.Path(path_type=str, exists=True, file_okay=False)
read_only_option = click.option(
    "--read-only",
    metavar="RUN",
    multiple=True,
    type=_existing,
    help="A run that COMMAND only reads.",
)


def checkpoint_argument(name: str, metavar: str = "RUN[@STEP]", **more: Any) -> Any:
    return click.argument(name, metavar=metavar, type=_TEXT_PATH, **more)


def new_run_argument(name: str, metavar: str) -> Any:
    return click.argument(name, metavar=metavar, type=NewRun())


def command_argument(required: bool = True) -> Any:
    return click.argument("command", nargs=-1, type=click.UNPROCESSED, required=required)


def output_option(what: str, **more: Any) -> Any:
    return click.option("-o", "--output", help=what, **{"type": PATH, **more})


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
def wrong_usage(*kinds: type[PerdureError]) -> Iterator[None]:
    """Count these errors (by default all) as wrong usage: options, or a run that cannot be new."""
    try:
        yield
    except PerdureError as error:
        if isinstance(error, ArgumentError) or (kinds and type(error) not in kinds):
            raise
        raise ArgumentError(str(error)) from error
