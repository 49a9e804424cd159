"""`perdure verify RUN`: reads and hashes every byte of a run directory; `--repair` repairs it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict

import click

from perdure.checkpoint.address import open_run
from perdure.cli.output import document, json_option, run_argument, size_text
from perdure.errors import NotARunError
from perdure.store import Run
from perdure.store.repair import repair
from perdure.store.verify import VerifyReport, verify_run
from perdure.text import counted


@click.command("verify", short_help="Read and hash everything, and report damage.")
@run_argument
@click.option(
    "--repair", "do_repair", is_flag=True, help="Set aside what is damaged, then check again."
)
@json_option
@click.pass_context
def command(ctx: click.Context, run: str, do_repair: bool, as_json: bool) -> None:
    """Read and hash everything in the run directory RUN, and report damage.

    Nothing changes without --repair. With it, damaged checkpoints and packs move to quarantine,
    leftovers of crashes are removed, a missing or damaged perdure.json is written again, and the
    checkpoints that can be restored are reported. What cannot be read (no permission, a disk error)
    is reported as UNREAD and stays where it is. Exits with 1 if anything is damaged or unread.

    \b
    Example:
      perdure verify runs/a
    """
    opened = _open(run, do_repair)
    actions: tuple[str, ...] = ()
    if do_repair:
        with opened:
            done = repair(opened)
        actions, report = done.actions, done.report
    else:
        report = verify_run(opened)
    if as_json:
        found = asdict(report)
        document({"ok": report.ok, "run": found.pop("where"), "actions": actions, **found})
    else:
        for action in actions:
            click.echo(f"repair  {action}")
        _print(report, do_repair)
    ctx.exit(0 if report.ok else 1)


def _open(where: str, do_repair: bool) -> Run:
    try:
        return Run(where, repair=do_repair)
    except NotARunError:
        with suppress(NotARunError):
            open_run(where)  # raises another error for the name of a checkpoint
        raise


def _print(report: VerifyReport, do_repair: bool) -> None:
    for problem in report.problems:
        kind = "UNREAD" if problem.unread else "DAMAGED" if problem.harmful else "note"
        click.echo(f"{kind}  {problem.name}: {problem.what}")
    decoded = (
        f", {size_text(report.decoded_nbytes)} decoded"
        if report.decoded_nbytes > report.nbytes
        else ""
    )
    unread = f", {len(report.unread)} could not be read" if report.unread else ""
    good = counted(len(report.good), "checkpoint")
    click.echo(
        f"{good} good, {len(report.bad)} damaged{unread}; "
        f"{counted(report.chunks, 'chunk')}, {size_text(report.nbytes)} read{decoded}"
    )
    if report.bad or report.unread or do_repair:
        newest = max(report.good, default=None)
        click.echo(
            "no checkpoint can be restored"
            if newest is None
            else f"a restore takes step {newest}, the newest good one"
        )
    if any(problem.unread for problem in report.problems):
        click.echo("the state of unread files is unknown; remove the cause and verify again")
    if any(problem.harmful and not problem.unread for problem in report.problems) and not do_repair:
        click.echo("`perdure verify --repair` sets aside what is damaged")
