"""`perdure stats RUN[@STEP]`: minimum, maximum, mean and so on of the leaves of a checkpoint."""

from __future__ import annotations

import click

from perdure.cli.output import checkpoint_argument, document, json_option, leaves_option


@click.command("stats", short_help="Show minimum, maximum, mean and norm of leaves.")
@checkpoint_argument
@leaves_option
@click.option(
    "--depth",
    metavar="N",
    type=click.IntRange(0),
    help="One row for each branch of N parts; 0: one row for all.",
)
@json_option
@click.pass_context
def command(
    ctx: click.Context, run: str, leaves: tuple[str, ...], depth: int | None, as_json: bool
) -> None:
    """Show minimum, maximum, mean, standard deviation, norm, zeros, NaN and infinities of leaves.

    RUN@STEP is one checkpoint, as for `perdure tree`. Every byte is verified. min, max, mean, std and
    norm are those of the finite numbers; a complex number counts as two. Exits with 1 if a leaf has a
    dtype that is not known here.

    \b
    Example:
      perdure stats runs/a@1000 --leaves 'model/**/kernel'
    """
    from perdure.look.leaf_stats import stats

    result = stats(run, leaves=leaves or None, depth=depth)
    if as_json:
        document(result.as_dict())
    else:
        click.echo(str(result))
    ctx.exit(1 if result.unknown else 0)
