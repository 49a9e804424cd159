"""`perdure bisect RUN1 RUN2`: the first step at which two runs part, and what differs in it."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from perdure.cli.output import (
    devices_option,
    directory_option,
    document,
    json_option,
    kept_or_temporary,
    print_leaves,
    progress,
    read_only_option,
)
from perdure.text import counted


@click.command("bisect", short_help="Find the first step at which two runs part.")
@click.argument("one", metavar="RUN1", type=click.Path(path_type=str))
@click.argument("two", metavar="RUN2", type=click.Path(path_type=str))
@click.option(
    "--command2",
    metavar="'COMMAND2 ...'",
    help="What RUN2 was started with, in quotes, if that is not COMMAND.",
)
@click.option("--workers", type=click.IntRange(1), help="Processes; by default as in each run.")
@devices_option
@read_only_option
@directory_option
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(
    ctx: click.Context,
    one: str,
    two: str,
    command2: str | None,
    workers: int | None,
    devices: int | None,
    read_only: tuple[str, ...],
    directory: Path | None,
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """Find the first step at which the run directories RUN1 and RUN2 part.

    All lines of their journals are compared, and all checkpoints that both have. With COMMAND, which
    follows `--` and is what RUN1 was started with, that step is then replayed in both runs and compared
    in the order of the computation: random generators, state, batch, random keys, the contribution of
    each logical replica, total, update. COMMAND finds RUN2 in the place of RUN1, unless --command2 says
    how RUN2 was started. The exit status is 0 if all steps that both have are equal, 1 if one differs.

    \b
    Example:
      perdure bisect runs/a runs/b
      perdure bisect runs/a runs/b -- python train.py
    """
    from perdure.checkpoint.address import open_run
    from perdure.look.journal_bisect import bisect_runs

    options = (command2, workers, devices, read_only or None, directory)
    if not command and any(option is not None for option in options):
        raise click.UsageError("expected what RUN1 was started with after the options: -- COMMAND")
    for run in (one, two):
        open_run(run)  # refuses the name of a checkpoint
    found = bisect_runs(one, two)
    result: dict[str, Any] = {"runs": [one, two], **asdict(found)}
    if not as_json:
        _print(result, with_command=bool(command))
    if found.step is not None and command:
        from perdure.drill.step_bisect import BisectOptions, bisect_step

        options = BisectOptions(command, _words(command2), workers, devices, read_only)
        with kept_or_temporary(directory, "bisect") as work:
            stepped = bisect_step((one, two), found.step, found.last_equal, options, work, progress)
        result["replay"] = {**asdict(stepped), "part_name": stepped.part and stepped.part.name}
        if not as_json:
            _print_replay(result["replay"])
    if as_json:
        document(result)
    ctx.exit(0 if found.step is None else 1)


def _words(command2: str | None) -> tuple[str, ...] | None:
    try:
        words = None if command2 is None else tuple(shlex.split(command2))
    except ValueError as error:
        raise click.UsageError(f"--command2: {error}: {command2!r}.") from error
    if words == ():
        raise click.UsageError("--command2: expected what RUN2 was started with, found nothing.")
    return words


def _print(found: dict[str, Any], with_command: bool) -> None:
    step, last_equal, compared = found["step"], found["last_equal"], found["compared"]
    if step is None:
        counts = found["lines"], found["checkpoints"]
        kinds = ("line of the journals", "lines of the journals"), ("checkpoint", "checkpoints")
        compared = ", ".join(counted(n, *kind) for n, kind in zip(counts, kinds, strict=True) if n)
        click.echo(f"equal up to step {last_equal}, the last that both have ({compared})")
        return
    if last_equal is not None:
        click.echo(
            f"they part at step {step}, after step {last_equal}, which is equal ({compared})"
        )
    elif step == 0:
        click.echo(f"they part at step 0 ({compared})")
    else:
        click.echo(
            f"they differ at step {step}, the oldest that both still have; they part there or before "
            f"it ({compared})"
        )
    click.echo(f"  {found['what']}: {found['values'][0]} and {found['values'][1]}")
    if not with_command and step > 0:
        start = f"{last_equal or 0}:{step}"
        click.echo(f"`perdure replay RUN --steps {start} -- COMMAND` shows which of them is right")


def _print_replay(found: dict[str, Any]) -> None:
    part, diagnosis = found["part"], found["diagnosis"]
    if part is None:
        click.echo(f"the replays of step {found['step']} have the same bits")
    else:
        click.echo(f"the replays part at step {found['step']}: {found['part_name']}")
        print_leaves(part["leaves"], "{expected} and {found}")
    for run in found["wrong"]:
        click.echo(f"wrong: {run}")
    click.echo(f"likely cause: {diagnosis['what']}")
    for line in diagnosis["evidence"]:
        click.echo(f"  {line}")
    click.echo(f"  {diagnosis['advice']}")
