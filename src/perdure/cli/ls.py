"""`perdure ls RUN`: the checkpoints of a run directory. Reads manifests, not packs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from perdure.cli.output import EXIT_STATUS, document, json_option, run_argument, show
from perdure.look.listing import RunListing, list_run, listing_table
from perdure.store import Run


@click.command("ls", short_help="List the checkpoints of a run directory.", epilog=EXIT_STATUS)
@run_argument
@json_option
@click.pass_context
def command(ctx: click.Context, run: str, as_json: bool) -> None:
    """List the checkpoints of the run directory RUN, oldest first.

    "own" are the bytes of packs that deleting this checkpoint alone frees, as `perdure prune` does it;
    "shared" those of its chunks that stay then, because others need them or chunks in the same pack.
    "kept" says why a checkpoint is there, by the rules that the last manager recorded in the run
    directory. `perdure prune --dry-run` shows what other rules would keep.

    \b
    Example:
      perdure ls runs/a
    """
    listing = list_run(run)
    if as_json:
        document(_document(listing, Run(run)))
    else:
        show(listing_table(listing.checkpoints))
        for line in listing.set_aside:
            click.echo(line)
        for step, error in listing.damaged.items():
            click.echo(f"step {step} is damaged: {error}", err=True)
        for error in listing.unread.values():
            click.echo(error, err=True)
    ctx.exit(1 if listing.damaged or listing.unread else 0)


def _document(listing: RunListing, run: Run) -> dict[str, Any]:
    set_aside = run.rolled_back()
    names = {checkpoint.name for checkpoint in set_aside}
    return {
        "run": listing.where,
        "checkpoints": [asdict(row) for row in listing.checkpoints],
        "damaged": [{"step": step, "error": error} for step, error in listing.damaged.items()],
        "unread": [{"step": step, "error": error} for step, error in listing.unread.items()],
        "quarantined": [name for name in run.quarantined() if name not in names],
        "rolled_back": [
            {
                "step": checkpoint.manifest.step,
                "rolled_back_to": checkpoint.why.rolled_back_to,
                "when": checkpoint.why.time,
                "name": checkpoint.name,
            }
            for checkpoint in set_aside
        ],
    }
