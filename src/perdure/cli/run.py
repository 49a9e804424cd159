"""`perdure run` and `status`: starts the workers of a job, restarts them, and says what happened."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perdure.cli import options as cli
from perdure.cli.output import discard_unwritten, document, report, say, table
from perdure.supervise.attempts_log import DEFAULT_LOGS, RunHistory, runs_at
from perdure.text import counted

if TYPE_CHECKING:
    from perdure.supervise.worker_environment import Nodes


_TORCHRUN_OPTIONS = {"nproc-per-node": "workers", "nproc_per_node": "workers"}


# Options after the program belong to the program.
@cli.command(
    "run",
    context_settings={
        "allow_interspersed_args": False,
        "token_normalize_func": lambda name: _TORCHRUN_OPTIONS.get(name, name),
    },
)
@click.option(*cli.WORKERS, type=cli.COUNT, help="Processes of the group.  [default: 1, or MAX]")
@click.option("--multi-node", is_flag=True, help="One of several machines, by the environment.")
@cli.devices_option
@click.option(
    "--max-restarts", type=click.IntRange(0), default=100, help="Failures after which to restart."
)
@click.option(
    "--elastic", metavar="MIN:MAX", help="Continue with fewer workers if one fails again and again."
)
@click.option(
    "--limit",
    "limits",
    metavar="PHASE=SECONDS",
    multiple=True,
    help="Seconds without a heartbeat that count as hung, or 'none'. PHASE is start, restore, compile, "
    "step, save, evaluate, end or stopped.",
)
@click.option(
    "--grace", type=click.FloatRange(0), default=60.0, help="Seconds to save after a signal."
)
@click.option("--log-dir", type=click.Path(), help="For the logs of the run and of each worker.")
@click.option("--timestamps", is_flag=True, help="Begin each line with the time.")
@click.option(
    "--compilation-cache",
    type=cli.PATH,
    help="Of JAX; 'off' for none.  [default: in ~/.cache, on CPU]",
)
@click.option(
    "--warm", metavar="MODULE", multiple=True, help="Keep spare processes that have imported it."
)
@click.option(
    "--audit",
    type=click.FloatRange(0, 1),
    help="Share of the steps that are partly computed again.",
)
@click.option(
    "--on-corruption", type=click.Choice(["raise", "exclude"]), help="After wrong bits of a device."
)
@click.option(
    "--allow", metavar="FIELD", multiple=True, help="Resume although the recipe differs in FIELD."
)
@cli.command_argument()
def run(
    workers: int | None,
    multi_node: bool,
    devices: int | None,
    elastic: str | None,
    limits: tuple[str, ...],
    log_dir: str | None,
    compilation_cache: Path | None,
    audit: float | None,
    on_corruption: str | None,
    allow: tuple[str, ...],
    as_json: bool,
    command: tuple[str, ...],
    **others: Any,
) -> int:
    """Start COMMAND as the workers of a group, watch them, and restart them until they are done.

    All that follows the name of the program belongs to it. The exit status is 0 when all are done, 75
    when they saved and exited after SIGTERM or Ctrl-C, and 1 when they failed too often.

    \b
    Example:
      perdure run -- python train.py
      perdure run -n 2 --max-restarts 10 -- python train.py
    """
    from perdure.supervise.console import Console
    from perdure.supervise.options import Limits, RunOptions
    from perdure.supervise.supervisor import Supervisor

    bounds = _elastic(elastic)
    with cli.wrong_usage():
        options = RunOptions(
            workers=workers or (bounds[1] if bounds else 1),
            nodes=_nodes() if multi_node else None,
            devices_per_worker=devices,
            elastic=bounds,
            log_directory=_log_directory(log_dir),
            limits=Limits(**_limits(limits)),
            environment=_environment(allow, audit, on_corruption),
            compilation_cache=_cache(compilation_cache),
            **others,
        )
    _open_standard_streams()
    if os.getpid() == 1:
        from perdure.supervise.orphan_reaper import become_init

        become_init()
    console = Console(sys.stderr if as_json else None)
    run = Supervisor(command, options, console=console).run()
    if as_json:
        _print_document(run.document())
    return run.status


def _print_document(found: Any) -> None:
    try:
        document(found)
    except OSError as error:  # the status of the run counts, also for a reader that has gone
        discard_unwritten()
        report(f"the report of the run cannot be written to the standard output: {error}")


def _open_standard_streams() -> None:
    """A file that is opened later would get the number of a closed one."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _log_directory(text: str | None) -> Path | None:
    if text == "":
        raise click.BadParameter("--log-dir: expected the path of a directory, found an empty text")
    return None if text is None else Path(text)


def _nodes() -> Nodes | None:
    """The machines of the group; None for one machine."""
    from perdure.distribute.cluster import resolve  # and NumPy with it
    from perdure.supervise.worker_environment import Nodes

    cluster = resolve()
    if cluster.coordinator is None and cluster.source == "the environment":
        raise click.UsageError(
            "--multi-node: expected a description of the machines in the environment, found none. "
            "Start this command by srun or a JobSet, or set MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE"
        )
    if cluster.coordinator is None:  # a job of one machine
        return None
    return Nodes(cluster.num_processes, cluster.process_id, cluster.coordinator)


def _environment(
    allow: tuple[str, ...], audit: float | None, on_corruption: str | None
) -> dict[str, str]:
    from perdure.runtime.excluded_devices import AUDIT, ON_CORRUPTION

    given = {AUDIT: audit, ON_CORRUPTION: on_corruption}
    variables = {name: str(value) for name, value in given.items() if value is not None}
    if allow:
        from perdure.checkpoint.recipe import ALLOW, allowed  # and NumPy with it

        variables[ALLOW] = ",".join(sorted(allowed(allow)))
    return variables


def _cache(named: Path | None) -> Path | None:
    from perdure.supervise.worker_environment import default_cache

    if named is None:
        return default_cache()
    return None if str(named) == "off" else named.absolute()


def _elastic(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    fewest, colon, most = text.partition(":")
    if not (colon and fewest.isdecimal() and most.isdecimal()):
        raise click.BadParameter(f"expected MIN:MAX, for instance 1:4, found {text!r}")
    return int(fewest), int(most)


def _limits(texts: tuple[str, ...]) -> dict[str, float]:
    from dataclasses import fields

    from perdure.supervise.options import Limits

    known = [field.name for field in fields(Limits)]
    limits: dict[str, float] = {}
    for text in texts:
        name, _, seconds = text.partition("=")
        try:
            limits[name] = math.inf if seconds == "none" else float(seconds)
        except ValueError:
            name = ""
        if name not in known:
            raise click.BadParameter(
                f"expected PHASE=SECONDS with one of {', '.join(known)}, found {text!r}"
            )
    return limits


@cli.command("status", epilog=cli.EXIT_STATUS)
@click.argument(
    "logs", metavar="LOG_DIR", required=False, default=DEFAULT_LOGS, type=click.Path(path_type=Path)
)
def status(logs: Path, as_json: bool) -> None:
    """Show the attempts, causes and steps of the newest `perdure run`, and of its earlier starts.

    LOG_DIR is its --log-dir, by default perdure-logs, or one of the directories in it.

    \b
    Example:
      perdure status perdure-logs
    """
    path, runs = runs_at(logs)
    runs = [run for run in runs if run.program == runs[-1].program]  # of the newest
    unreadable = sum(run.unreadable for run in runs)
    if as_json:
        rows = [run.history() for run in runs]
        document({"logs": str(path), "unreadable_lines": unreadable, "starts": rows})
        return
    for run in runs:
        _print_history(run)
    if unreadable:
        text = f"{counted(unreadable, 'line')} cannot be believed: a log was changed or damaged"
        say(f"{path}: {text}")


def _print_history(run: RunHistory) -> None:
    from perdure.supervise.console import ATTEMPT_COLUMNS, attempt_rows

    start, end, last = run.start, run.end, run.last_time
    states = {
        "ended": f"ended {end.get('time')} with status {end.get('status')}: {end.get('reason')}",
        "lost": f"ended without a word after {last}: killed, or the machine went down",
        "unknown": f"not ended by {last}; ask on its machine, and in its container, whether it runs",
    }
    say(f"run      {run.name}  {' '.join(start.get('command', []))}")
    place = f"{start.get('host')}, process {start.get('pid')}, in {start.get('directory')}"
    say(f"started  {start.get('time', 'unknown')} on {place}")
    say(f"logs     {start.get('logs')}")
    say(f"state    {states.get(run.state, run.state)}")
    if rows := attempt_rows(run):
        table(ATTEMPT_COLUMNS, rows)
    if run.goodput is not None:
        say(f"goodput  {run.goodput:.3f}, {counted(sum(run.repeated), 'step')} repeated")
    say("")
