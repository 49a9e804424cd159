"""`perdure verify RUN`: reads and hashes every byte of a run directory; `--repair` mends it."""

from __future__ import annotations

from dataclasses import asdict

import click

from perdure.cli.output import document, json_option, run_argument, size_text
from perdure.store import Report, Run, check, repair


@click.command("verify")
@run_argument
@click.option("--repair", "mend", is_flag=True, help="Set aside what is damaged, then check again.")
@json_option
@click.pass_context
def command(ctx: click.Context, run: str, mend: bool, as_json: bool) -> None:
    """Read and hash everything in the run directory RUN, and say what is damaged.

    Changes nothing without --repair. With it, damaged checkpoints and packs move to quarantine,
    leftovers of crashes are removed, and what can be restored is said.
    """
    opened = Run(run)
    actions: tuple[str, ...] = ()
    if mend:
        with opened:
            done = repair(opened)
        actions, report = done.actions, done.report
    else:
        report = check(opened)
    if as_json:
        document({"ok": report.ok, "actions": actions, **asdict(report)})
    else:
        for action in actions:
            click.echo(f"repair  {action}")
        _print(report, mend)
    ctx.exit(0 if report.ok else 1)


def _print(report: Report, mend: bool) -> None:
    for problem in report.problems:
        click.echo(f"{'DAMAGED' if problem.harmful else 'note'}  {problem.name}: {problem.what}")
    decoded = (
        f", {size_text(report.decoded_nbytes)} decoded"
        if report.decoded_nbytes > report.nbytes
        else ""
    )
    click.echo(
        f"{len(report.good)} checkpoints good, {len(report.bad)} damaged; "
        f"{report.chunks} chunks, {size_text(report.nbytes)} read{decoded}"
    )
    if report.bad or mend:
        newest = max(report.good, default=None)
        click.echo(
            "no checkpoint can be restored"
            if newest is None
            else f"a restore takes step {newest}, the newest good one"
        )
    if not report.ok and not mend:
        click.echo("`perdure verify --repair` sets aside what is damaged")
