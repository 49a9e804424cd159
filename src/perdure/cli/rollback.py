"""`perdure rollback RUN STEP`: makes an older checkpoint the newest; `--undo` reverts that."""

from __future__ import annotations

import click

from perdure.cli.output import document, json_option, run_argument
from perdure.store import Run


@click.command("rollback")
@run_argument
@click.argument("step", type=int, required=False)
@click.option("--undo", is_flag=True, help="Bring back what rollbacks set aside.")
@click.option("--dry-run", is_flag=True, help="Check and print what would be done; change nothing.")
@json_option
def command(run: str, step: int | None, undo: bool, dry_run: bool, as_json: bool) -> None:
    """Make STEP the newest checkpoint of the run directory RUN; newer ones are set aside.

    They move to quarantine. --undo brings them back as long as nothing newer was saved since;
    `perdure prune RUN --rolled-back` removes them.
    """
    if undo == (step is not None):
        raise click.UsageError("give either STEP or --undo.")
    with Run(run) as opened:
        if step is None:
            steps = opened.undo_rollback(dry_run=dry_run)
        else:
            steps = opened.rollback(step, dry_run=dry_run)
        newest = max(opened.steps(), default=None)
    if as_json:
        moved = "brought_back" if undo else "set_aside"
        document({"executed": not dry_run, "run": opened.where, moved: steps, "newest": newest})
        return
    for moved_step in steps:
        click.echo(f"{'bring back' if undo else 'set aside'}  step {moved_step}")
    if not steps:
        click.echo("nothing is set aside" if undo else f"step {step} is the newest already")
    if dry_run:
        click.echo("nothing was changed (--dry-run)")
    elif steps:
        click.echo(f"the newest checkpoint is step {newest}")
        if not undo:
            click.echo("`perdure rollback RUN --undo` brings them back")
