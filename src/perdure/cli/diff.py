"""`perdure diff A B`: what differs between two checkpoints, or between two runs."""

from __future__ import annotations

import os

import click

from perdure.cli.output import checkpoint_argument, document, json_option, leaves_option, show


@click.command("diff", short_help="Compare two checkpoints or two runs, leaf by leaf.")
@checkpoint_argument("first", "A")
@checkpoint_argument("second", "B")
@leaves_option
@json_option
@click.pass_context
def command(
    ctx: click.Context, first: str, second: str, leaves: tuple[str, ...], as_json: bool
) -> None:
    """Compare the checkpoints A and B: leaves, recipe, environment and metrics.

    A and B are RUN@STEP, as for `perdure show`; two runs without a step are compared at the first
    common step that differs. Equal leaves are known by their hashes; only chunks that differ are read.
    Exits with 0 if the states are equal, with 1 if they differ or something is damaged. For git:
    git difftool -x "perdure diff", which compares manifests that git has.

    \b
    Example:
      perdure diff runs/a@100 runs/b@100 --leaves 'model/**'
    """
    from perdure.look.checkpoint_diff import diff

    # The path in the work tree, as `git difftool` has it for a configured tool, and for `-x`.
    paths = [path for name in ("MERGED", "BASE") if (path := os.environ.get(name))]
    result = diff(first, second, leaves=leaves or None, also_look_in=paths)
    if as_json:
        document(result.as_dict())
    else:
        show(result)
    ctx.exit(0 if result.equal else 1)
