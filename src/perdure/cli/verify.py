"""`perdure verify RUN`: reads and hashes every byte of a run directory. Changes nothing."""

from __future__ import annotations

from dataclasses import asdict

import click

from perdure.cli.output import document, json_option, run_argument, size_text
from perdure.store import Run, check


@click.command("verify")
@run_argument
@json_option
@click.pass_context
def command(ctx: click.Context, run: str, as_json: bool) -> None:
    """Read and hash everything in the run directory RUN, and say what is damaged."""
    report = check(Run(run))
    if as_json:
        document({"ok": report.ok, **asdict(report)})
    else:
        for problem in report.problems:
            click.echo(
                f"{'DAMAGED' if problem.harmful else 'note'}  {problem.name}: {problem.what}"
            )
        click.echo(
            f"{len(report.good)} checkpoints good, {len(report.bad)} damaged; "
            f"{report.chunks} chunks, {size_text(report.nbytes)} read"
        )
        if report.bad:
            newest = max(report.good, default=None)
            click.echo(
                "no checkpoint can be restored"
                if newest is None
                else f"a restore takes step {newest}, the newest good one"
            )
    ctx.exit(0 if report.ok else 1)
