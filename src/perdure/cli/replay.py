"""`perdure replay` and `bisect`: computes steps of runs again, and finds where two of them part."""

from __future__ import annotations

import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from perdure.cli import options as cli
from perdure.cli.output import document, print_leaves, progress, say
from perdure.text import counted

_STEPS = re.compile(r"(\d*):(\d*)")


@cli.command("replay")
@cli.run_argument
@click.option("--steps", metavar="A:B", help="From the checkpoint at or before A up to step B.")
@click.option("--sample", type=cli.COUNT, help="Only so many stretches between two checkpoints.")
@cli.seed_option
@cli.workers_option
@cli.devices_option
@cli.read_only_option
@cli.directory_option
@cli.command_argument()
def replay(
    run: str,
    steps: str | None,
    directory: Path | None,
    as_json: bool,
    command: tuple[str, ...],
    **how: Any,
) -> bool:
    """Compute steps of the run directory RUN again with COMMAND, and compare them with its journal.

    COMMAND follows `--` and is what the run was started with. It runs in a copy of the working
    directory, with a fork of RUN in place of RUN. Without a journal the fingerprints of the checkpoints
    are compared. The result is also written into RUN/replays. Exits with 1 if something differs or
    cannot be compared.

    \b
    Example:
      perdure replay runs/a --steps 100:200 -- python train.py
    """
    from perdure.checkpoint.address import open_run
    from perdure.drill.replay import ReplayOptions, replay_document, replay_run, write_record
    from perdure.errors import SaveError

    if directory is not None and directory.resolve().is_relative_to(Path(run).resolve()):
        raise click.UsageError(
            f"--directory: expected a place outside of the run directory {run}, found {directory}."
        )
    storage = open_run(run).storage
    first, last = _parsed(steps)
    options = ReplayOptions(first, last, **how)
    with cli.kept_or_temporary(directory, "replay") as work:
        results = replay_run(command, run, options, work, progress)
    found = replay_document(storage.where, command, options, results)
    # The record first, because nobody may read the output; and the output if the disk is full.
    try:
        recorded = f"recorded in {storage.where}/{write_record(storage, found)}"
    except SaveError as error:
        recorded = str(error)
    if as_json:
        document(found)
    else:
        _print_replay(found)
    say(recorded, err=True)
    return found["verdict"] != "reproduced"


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


def _print_replay(found: dict[str, Any]) -> None:
    from perdure.store.format import span_text

    for part in found["stretches"]:
        steps = counted(part["steps"], "step")
        checkpoints = counted(part["checkpoints"], "checkpoint")
        place = span_text((part["start"] or 0) + 1, part["stop"])
        say(f"{place}: {part['verdict']} ({steps} and {checkpoints} compared)")
        if part["step"] is not None:
            what = f"the {part['what']}: expected {part['expected']}, found {part['found']}"
            difference = part["found"] if part["what"] == "end" else what
            say(f"  first difference: step {part['step']}: {difference}")
        print_leaves(part["leaves"], "expected {expected}, found {found}")
        say(*(f"  recipe: {field}" for field in part["recipe"]))
    has_lines = any(part["steps"] for part in found["stretches"])
    basis = "" if has_lines else " (no line of a journal was compared: the checkpoints alone)"
    say(f"{found['verdict']}: {found['run']}{basis}")


@cli.command("bisect")
@click.argument("one", metavar="RUN1", type=click.Path(path_type=str))
@click.argument("two", metavar="RUN2", type=click.Path(path_type=str))
@click.option(
    "--command2", metavar="'COMMAND2 ...'", help="What RUN2 was started with, if not COMMAND."
)
@click.option(*cli.WORKERS, type=cli.COUNT, help="Processes; by default as in each run.")
@cli.devices_option
@cli.read_only_option
@cli.directory_option
@cli.command_argument(required=False)
def bisect(
    one: str,
    two: str,
    command2: str | None,
    directory: Path | None,
    as_json: bool,
    command: tuple[str, ...],
    **how: Any,
) -> bool:
    """Find the first step at which the run directories RUN1 and RUN2 part.

    All lines of their journals are compared, and all checkpoints that both have. With COMMAND, which
    follows `--` and is what RUN1 was started with, that step is then replayed in both runs and compared
    in the order of the computation. COMMAND finds RUN2 in the place of RUN1, unless --command2 says how
    RUN2 was started. Exits with 1 if a step differs.

    \b
    Example:
      perdure bisect runs/a runs/b
      perdure bisect runs/a runs/b -- python train.py
    """
    from perdure.checkpoint.address import open_run
    from perdure.look.journal_bisect import bisect_runs

    if not command and (command2 is not None or directory or any(how.values())):
        raise click.UsageError("expected what RUN1 was started with after the options: -- COMMAND")
    for run in (one, two):
        open_run(run)  # refuses the name of a checkpoint
    found = bisect_runs(one, two)
    result: dict[str, Any] = {"runs": [one, two], **asdict(found)}
    if not as_json:
        _print_bisected(result, with_command=bool(command))
    if found.step is not None and command:
        from perdure.drill.step_bisect import BisectOptions, bisect_step

        options = BisectOptions(command, _words(command2), **how)
        with cli.kept_or_temporary(directory, "bisect") as work:
            stepped = bisect_step((one, two), found.step, found.last_equal, options, work, progress)
        result["replay"] = {**asdict(stepped), "part_name": stepped.part and stepped.part.name}
        if not as_json:
            _print_step(result["replay"])
    if as_json:
        document(result)
    return found.step is not None


def _words(command2: str | None) -> tuple[str, ...] | None:
    try:
        words = None if command2 is None else tuple(shlex.split(command2))
    except ValueError as error:
        raise click.UsageError(f"--command2: {error}: {command2!r}.") from error
    if words == ():
        raise click.UsageError("--command2: expected what RUN2 was started with, found nothing.")
    return words


def _print_bisected(found: dict[str, Any], with_command: bool) -> None:
    step, last_equal, compared = found["step"], found["last_equal"], found["compared"]
    if step is None:
        counts = found["lines"], found["checkpoints"]
        kinds = ("line of the journals", "lines of the journals"), ("checkpoint", "checkpoints")
        compared = ", ".join(counted(n, *kind) for n, kind in zip(counts, kinds, strict=True) if n)
        say(f"equal up to step {last_equal}, the last that both have ({compared})")
        return
    if last_equal is not None or step == 0:
        after = "" if last_equal is None else f", after step {last_equal}, which is equal"
        say(f"they part at step {step}{after} ({compared})")
    else:
        say(
            f"they differ at step {step}, the oldest that both still have; they part there or before"
        )
    say(f"  {found['what']}: {found['values'][0]} and {found['values'][1]}")
    if not with_command and step > 0:
        start = f"{last_equal or 0}:{step}"
        say(f"`perdure replay RUN --steps {start} -- COMMAND` shows which of them is right")


def _print_step(found: dict[str, Any]) -> None:
    part, diagnosis = found["part"], found["diagnosis"]
    if part is None:
        say(f"the replays of step {found['step']} have the same bits")
    else:
        say(f"the replays part at step {found['step']}: {found['part_name']}")
        print_leaves(part["leaves"], "{expected} and {found}")
    say(*(f"wrong: {run}" for run in found["wrong"]), f"likely cause: {diagnosis['what']}")
    say(*(f"  {line}" for line in (*diagnosis["evidence"], diagnosis["advice"])))
