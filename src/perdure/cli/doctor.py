"""`perdure doctor [-- python train.py]`: which bits this machine, or a program on it, gives again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from perdure.cli import options as cli
from perdure.cli.output import document, progress, say, table
from perdure.text import few

if TYPE_CHECKING:
    from perdure.doctor import DoctorReport, ResultComparison

_MOST_LEAVES = 8
_MOST_LINES = 40


@cli.command("doctor")
@click.option("--run", metavar="RUN", help="Also try the file system of a run directory.")
@click.option(
    "--framework", "names", type=click.Choice(["jax", "torch"]), multiple=True, help="Else all."
)
@click.option("--repeats", type=click.IntRange(2), default=5, help="Results of each kernel.")
@click.option("--steps", type=cli.COUNT, default=2, help="End COMMAND after so many saved steps.")
@cli.workers_option
@cli.devices_option
@cli.read_only_option
@cli.command_argument(required=False)
def doctor(
    run: str | None,
    names: tuple[str, ...],
    repeats: int,
    as_json: bool,
    command: tuple[str, ...],
    **how: Any,
) -> bool:
    """Compute things several times, and compare the bits: on each device, and in several processes.

    Without COMMAND these are small kernels of each installed framework. With `-- COMMAND` it is the
    first training step of that program, which runs in a copy of the working directory. Exits with 1 if
    something differs or fails.

    \b
    Example:
      perdure doctor
      perdure doctor -- python train.py
    """
    from perdure.doctor import DoctorReport
    from perdure.doctor.kernels import check_framework
    from perdure.doctor.machine import check_file_system, describe_machine
    from perdure.doctor.program_check import ProgramOptions, check_program

    chosen = _chosen(names, needed=not command and run is None)
    _refuse_meaningless(click.get_current_context(), bool(command))
    machine = describe_machine()
    files = check_file_system(run) if run is not None else ()
    if command:
        with cli.kept_or_temporary(None, "doctor") as work:
            found = check_program(command, ProgramOptions(**how), work, progress)
        diagnosis = DoctorReport(machine, files, program=found)
    else:
        results = [check_framework(name, repeats, progress=progress) for name in chosen]
        diagnosis = DoctorReport(machine, files, results)
    if as_json:
        document(diagnosis.document())
    else:
        _print(diagnosis)
    return not diagnosis.is_equal


def _chosen(names: tuple[str, ...], needed: bool) -> list[str]:
    from perdure.doctor.kernels import FRAMEWORKS, installed_frameworks

    installed = installed_frameworks()
    missing = [name for name in names if name not in installed]
    if missing or (needed and not installed):
        extras = " or ".join(f"pip install 'perdure[{name}]'" for name in missing or FRAMEWORKS)
        raise click.UsageError(
            f"expected {' or '.join(names or FRAMEWORKS)} to be installed, found "
            f"{', '.join(installed) or 'neither'}: {extras}"
        )
    return list(dict.fromkeys(names)) or installed


def _refuse_meaningless(ctx: click.Context, has_command: bool) -> None:
    kernels, program = ("names", "repeats"), ("steps", "workers", "devices", "read_only")
    where = "only without -- COMMAND" if has_command else "only with -- COMMAND"
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(parameter.name or "")
        if source is click.core.ParameterSource.COMMANDLINE and (
            parameter.name in (kernels if has_command else program)
        ):
            raise click.UsageError(f"{parameter.opts[0]}: has a meaning {where}.")


def _print(diagnosis: DoctorReport) -> None:
    _section("machine", diagnosis.machine)
    for result in diagnosis.frameworks:
        _section(result.name, result.settings)
    files = diagnosis.file_system
    _section("file system", {f.name: f.found if f.is_right else f"WRONG: {f.found}" for f in files})
    _print_comparisons(diagnosis.comparisons)
    for result in diagnosis.frameworks:
        if result.by_threads is not None:
            names = ", ".join(result.by_threads) or "none"
            say(f"{result.name}: with one thread other bits in: {names}")
    say("equal" if diagnosis.is_equal else "differs")


def _section(title: str, found: Mapping[str, str]) -> None:
    if found:  # text: a table would align some values to the right
        say(title)
        width = max(map(len, found))
        for name, value in found.items():
            say(f"  {name:<{width}}  {value}")
        say("")


def _print_comparisons(comparisons: list[ResultComparison]) -> None:
    groups: dict[str, list[ResultComparison]] = {}
    for comparison in comparisons:
        groups.setdefault(comparison.group, []).append(comparison)
    rows = []
    for group, found in groups.items():
        places = {device for comparison in found for device in comparison.devices}
        processes = max(comparison.processes for comparison in found)
        wrong = sum(not comparison.is_equal for comparison in found)
        counts = (len(found), sum(comparison.results for comparison in found), len(places))
        rows.append((group, *counts, processes, f"different: {wrong}" if wrong else "equal"))
    table(("computed", "things", "results", "places", "processes", ""), rows)
    lines = [line for comparison in comparisons for line in _details(comparison)]
    for line in lines[:_MOST_LINES]:
        say(line)
    if len(lines) > _MOST_LINES:
        say(f"and {len(lines) - _MOST_LINES} more lines; --json has all")


def _details(comparison: ResultComparison) -> Iterator[str]:
    name = f"{comparison.group}: {comparison.what}"
    if comparison.problem:
        yield f"{name}: {comparison.problem}"
    for place in comparison.deviations:
        device = f" on {place.device}" if place.device else ""
        yield (
            f"{name}: other bits in {place.count} of {place.of} results{device}, process "
            f"{place.process}: {few(place.leaves, _MOST_LEAVES)}"
        )
