"""`perdure replay RUN -- python train.py`: computes steps of a run again and compares every one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from perdure.checkpoint.address import open_run
from perdure.cli.output import (
    command_argument,
    devices_option,
    directory_option,
    document,
    json_option,
    kept_or_temporary,
    print_leaves,
    progress,
    read_only_option,
    run_argument,
    seed_option,
    workers_option,
)
from perdure.store.format import span_text
from perdure.text import counted

_STEPS = re.compile(r"(\d*):(\d*)")


@click.command("replay", short_help="Compute steps again, and compare them with the journal.")
@run_argument
@click.option(
    "--steps",
    metavar="A:B",
    help="From the checkpoint at or before A up to step B; by default from the oldest checkpoint to "
    "the last step. `0:` replays from the beginning.",
)
@click.option(
    "--sample", type=click.IntRange(1), help="Only so many stretches between two checkpoints."
)
@seed_option
@workers_option
@devices_option
@read_only_option
@directory_option
@json_option
@command_argument
@click.pass_context
def command(
    ctx: click.Context,
    run: str,
    steps: str | None,
    directory: Path | None,
    as_json: bool,
    command: tuple[str, ...],
    **how: Any,
) -> None:
    """Compute steps of the run directory RUN again with COMMAND, and compare them with its journal.

    COMMAND follows `--` and needs no change: it is what the run was started with. It runs in a copy of
    the working directory, with a fork of RUN in place of RUN, and is ended after the last step. Without
    a journal the fingerprints of the checkpoints are compared. The result is also written into
    RUN/replays. The exit status is 0 if all is reproduced, 1 if something differs or cannot be
    compared, 2 for a mistake in the arguments.

    \b
    Example:
      perdure replay runs/a --steps 100:200 -- python train.py
    """
    from perdure.drill.replay import ReplayOptions, replay_run
    from perdure.drill.replay_record import replay_document, write_record
    from perdure.errors import SaveError
    from perdure.store import Run

    if directory is not None and directory.resolve().is_relative_to(Path(run).resolve()):
        raise click.UsageError(
            f"--directory: expected a place outside of the run directory {run}, which is only read; "
            f"found {directory}."
        )
    open_run(run)  # refuses the name of a checkpoint
    first, last = _parsed(steps)
    options = ReplayOptions(first, last, **how)
    with kept_or_temporary(directory, "replay") as work:
        results = replay_run(command, run, options, work, progress)
    storage = Run(run).storage
    found = replay_document(storage.where, command, options, results)
    # The record first, because nobody may read the output; and the output if the disk is full.
    try:
        recorded = f"recorded in {storage.where}/{write_record(storage, found)}"
    except SaveError as error:
        recorded = str(error)
    if as_json:
        document(found)
    else:
        _print(found)
    click.echo(recorded, err=True)
    ctx.exit(0 if found["verdict"] == "reproduced" else 1)


def _parsed(steps: str | None) -> tuple[int | None, int | None]:
    if steps is None:
        return None, None
    match = _STEPS.fullmatch(steps)
    if match is None or match[0] == ":":
        raise click.UsageError(f"--steps: expected A:B, A: or :B with two steps, found {steps!r}.")
    first, last = (int(text) if text else None for text in match.groups())
    if first is not None and last is not None and last <= first:
        raise click.UsageError(f"--steps: expected B after A, found {steps!r}.")
    return first, last


def _print(found: dict[str, Any]) -> None:
    for part in found["stretches"]:
        compared = (
            f"{counted(part['steps'], 'step')} and {counted(part['checkpoints'], 'checkpoint')}"
        )
        place = span_text((part["start"] or 0) + 1, part["stop"])
        click.echo(f"{place}: {part['verdict']} ({compared} compared)")
        if part["step"] is not None:
            click.echo(f"  first difference: step {part['step']}: {_difference(part)}")
        print_leaves(part["leaves"], "expected {expected}, found {found}")
        for field in part["recipe"]:
            click.echo(f"  recipe: {field}")
    has_lines = any(part["steps"] for part in found["stretches"])
    basis = "" if has_lines else " (no line of a journal was compared: the checkpoints alone)"
    click.echo(f"{found['verdict']}: {found['run']}{basis}")


def _difference(part: dict[str, Any]) -> str:
    if part["what"] == "end":
        return part["found"]
    return f"the {part['what']}: expected {part['expected']}, found {part['found']}"
