"""`perdure rollback RUN@STEP`: makes an older checkpoint the newest; `--undo` reverts that."""

from __future__ import annotations

import click

from perdure.checkpoint.address import find_run, open_checkpoint
from perdure.cli.output import (
    EXIT_STATUS,
    checkpoint_argument,
    document,
    dry_run_option,
    json_option,
)
from perdure.store import Run
from perdure.store.format import span_text
from perdure.store.rollback import plan_undo


@click.command("rollback", short_help="Set aside the checkpoints after a step.", epilog=EXIT_STATUS)
@checkpoint_argument("run")
@click.option("--undo", is_flag=True, help="Bring back what rollbacks of RUN set aside.")
@dry_run_option
@json_option
def command(run: str, undo: bool, dry_run: bool, as_json: bool) -> None:
    """Make RUN@STEP the newest checkpoint of its run; newer ones are set aside.

    They move to quarantine, and later lines of the journal do not count any more. --undo brings both
    back as long as nothing newer was saved since; `perdure prune RUN --rolled-back` removes them.

    \b
    Example:
      perdure rollback runs/a@1000
    """
    address = find_run(run)
    if undo == (address.which is not None):
        raise click.UsageError("expected either RUN@STEP or RUN --undo.")
    step = None if undo else open_checkpoint(run).step
    with Run(address.given) as opened:
        replaced = None
        if step is None:
            if not dry_run:
                opened.begin_writing()  # it finishes what a crash has left
            returning = plan_undo(opened.storage, opened.log.view).lines
            lines = None if returning is None else returning.steps
            replaced = None if returning is None else returning.replaced
            steps = opened.undo_rollback(dry_run=dry_run)
        else:
            lines = opened.log.view.steps_after(step)
            steps = opened.rollback(step, dry_run=dry_run)
        newest = max(opened.steps(), default=None)
    if as_json:
        moved = "brought_back" if undo else "set_aside"
        result = {moved: steps, f"lines_{moved}": lines, "newest": newest}
        if undo:
            result["lines_set_aside"] = replaced
        document({"executed": not dry_run, "run": opened.where, **result})
        return
    for moved_step in steps:
        click.echo(f"{'bring back' if undo else 'set aside'}  step {moved_step}")
    _print_lines("bring back" if undo else "set aside", lines)
    _print_lines("set aside", replaced)
    if not steps and not lines:
        click.echo("nothing is set aside" if undo else f"step {step} is the newest already")
    if dry_run:
        click.echo("nothing was changed (--dry-run)")
    elif steps or lines:
        click.echo(f"the newest checkpoint is step {newest}")
        if not undo:
            click.echo("`perdure rollback RUN --undo` brings them back")


def _print_lines(moved: str, lines: tuple[int, int] | None) -> None:
    if lines is not None:
        click.echo(f"{moved}  lines of the journal, of {span_text(*lines)}")
