"""`perdure fork RUN@STEP NEW`: starts a new run directory from one checkpoint."""

from __future__ import annotations

import click

from perdure.checkpoint.address import find_run, open_checkpoint
from perdure.cli.output import EXIT_STATUS, NewRun, checkpoint_argument, document, json_option
from perdure.store import fork_run


@click.command(
    "fork", short_help="Start a new run directory from a checkpoint.", epilog=EXIT_STATUS
)
@checkpoint_argument("run", "RUN@STEP")
@click.argument("new", metavar="NEW", type=NewRun())
@json_option
def command(run: str, new: str, as_json: bool) -> None:
    """Start the run directory NEW from one checkpoint of RUN, and leave RUN as it is.

    NEW must be empty or missing. On one local file system the new run needs little space: packs that
    the checkpoint mostly needs become hard links. Pruning or deleting one run does not affect the
    other.

    \b
    Example:
      perdure fork runs/a@1000 runs/b
    """
    source = find_run(run)
    if source.which is None:
        raise click.UsageError(f"expected RUN@STEP, such as runs/a@100, found {run!r}.")
    manifest = fork_run(source.given, open_checkpoint(run).step, new)
    if as_json:
        document({"run": new, "step": manifest.step, "fingerprint": manifest.fingerprint})
    else:
        click.echo(f"{new} starts at step {manifest.step} of {source.given}")
