"""`perdure copy RUN[@STEP,...] NEW`: copies checkpoints into another run directory."""

from __future__ import annotations

from dataclasses import asdict

import click

from perdure.checkpoint.address import find_run, open_checkpoints
from perdure.cli.output import (
    NewRun,
    checkpoint_argument,
    document,
    dry_run_option,
    json_option,
    size_text,
)
from perdure.store.copy import Copied, copy_run
from perdure.text import counted


@click.command("copy", short_help="Copy checkpoints into another run directory or bucket.")
@checkpoint_argument("run", "RUN[@STEP,...]")
@click.argument("target", metavar="TARGET", type=NewRun())
@dry_run_option
@json_option
@click.pass_context
def command(ctx: click.Context, run: str, target: str, dry_run: bool, as_json: bool) -> None:
    """Copy checkpoints of the run directory RUN into the run directory TARGET, oldest first.

    Both are paths or URLs (s3://...). RUN@100,200 copies only these steps. Every byte is verified, and
    steps that TARGET holds already are skipped, so a copy can be repeated. A step is not copied if
    TARGET has other bits at that step or a newer step; the exit status is 1 then.

    \b
    Example:
      perdure copy runs/a s3://bucket/runs/a
    """
    source = find_run(run)
    steps = None if source.which is None else [each.step for each in open_checkpoints(run)]

    def progress(copied: Copied) -> None:
        line = f"step {copied.step}  {copied.outcome}"
        if copied.outcome == "copied":
            line += f"  {size_text(copied.nbytes)}"
        click.echo(f"{line}: {copied.reason}" if copied.reason else line)

    outcomes = copy_run(
        source.given, target, steps, dry_run=dry_run, progress=None if as_json else progress
    )
    missing = [copied.step for copied in outcomes if copied.outcome not in ("copied", "present")]
    if as_json:
        rows = [asdict(copied) for copied in outcomes]
        document({"executed": not dry_run, "run": target, "checkpoints": rows})
    elif dry_run:
        click.echo("nothing was changed (--dry-run)")
    else:
        click.echo(
            f"{len(outcomes) - len(missing)} of {counted(len(outcomes), 'checkpoint')} in {target}"
        )
    ctx.exit(1 if missing else 0)
