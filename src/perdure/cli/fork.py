"""`perdure fork RUN@STEP NEW`: starts a new run directory from one checkpoint."""

from __future__ import annotations

import click

from perdure.cli.copy import split_steps
from perdure.cli.output import EXIT_STATUS, document, json_option
from perdure.store import fork_run


@click.command(
    "fork", short_help="Start a new run directory from one checkpoint.", epilog=EXIT_STATUS
)
@click.argument("run", metavar="RUN@STEP", type=click.Path(path_type=str))
@click.argument("new", metavar="NEW", type=click.Path(path_type=str))
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
    source, steps = split_steps(run)
    if steps is None or len(steps) != 1:
        raise click.UsageError(
            f"expected RUN@STEP with one step, such as runs/a@100, found {run!r}."
        )
    manifest = fork_run(source, steps[0], new)
    if as_json:
        document({"run": new, "step": manifest.step, "fingerprint": manifest.fingerprint})
    else:
        click.echo(f"{new} starts at step {manifest.step} of {source}")
