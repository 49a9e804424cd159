"""`perdure tree RUN[@STEP]`: the leaves of a checkpoint as a tree. Reads manifests, not packs."""

from __future__ import annotations

import click

from perdure.cli.output import (
    EXIT_STATUS,
    checkpoint_argument,
    document,
    json_option,
    leaves_option,
)


@click.command("tree", short_help="Show the leaves of a checkpoint as a tree.", epilog=EXIT_STATUS)
@checkpoint_argument
@leaves_option
@click.option(
    "--depth", metavar="N", type=click.IntRange(0), help="Show branches of N parts, nothing below."
)
@json_option
def command(run: str, leaves: tuple[str, ...], depth: int | None, as_json: bool) -> None:
    """Show the leaves of a checkpoint as a tree, with their sizes.

    RUN is a path or URL. RUN@STEP is one checkpoint, RUN or RUN@latest the newest, RUN@best:max:METRIC
    or RUN@best:min:METRIC the best by a metric. The last column is the share of the bytes that the
    step before has too.

    \b
    Example:
      perdure tree runs/a@1000 --depth 2
    """
    from perdure.look.leaf_tree import tree

    result = tree(run, leaves=leaves or None, depth=depth)
    if as_json:
        document(result.as_dict())
    else:
        click.echo(str(result))
