"""`perdure ls`, `show` and `diff`: what a run directory and its checkpoints hold."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from perdure.cli import options as cli
from perdure.cli.output import document, print_result, say, terminal_width
from perdure.look.tables import Table, size_text
from perdure.text import counted, printable

if TYPE_CHECKING:
    from perdure.checkpoint.address import StoredCheckpoint
    from perdure.look.listing import ListedCheckpoint
    from perdure.store.manifest import LeafEntry

VALUE_CHARACTERS = 200  # a longer value is cut in output for people; --json has all of it


@cli.command("ls", epilog=cli.EXIT_STATUS)
@cli.run_argument
def ls(run: str, as_json: bool) -> bool:
    """List the checkpoints of the run directory RUN, oldest first.

    "kept" says why a checkpoint is there, by the rules that the last manager recorded in the run
    directory. `perdure prune --dry-run` shows what other rules would keep, and what that frees.

    \b
    Example:
      perdure ls runs/a
    """
    from perdure.look.listing import list_run

    listing = list_run(run)
    print_result(listing, as_json)
    return bool(listing.damaged or listing.unread)


@cli.command("diff")
@cli.checkpoint_argument("first", "A")
@cli.checkpoint_argument("second", "B")
@cli.leaves_option
def diff(first: str, second: str, leaves: tuple[str, ...], as_json: bool) -> bool:
    """Compare the checkpoints A and B: leaves, recipe, environment and metrics.

    A and B are RUN@STEP, as for `perdure show`; two runs without a step are compared at the first
    common step that differs. Only chunks that differ are read. Exits with 1 if the states differ.

    \b
    Example:
      perdure diff runs/a@100 runs/b@100 --leaves 'model/**'
    """
    from perdure.look.checkpoint_diff import diff

    result = diff(first, second, leaves=leaves or None)
    print_result(result, as_json)
    return not result.equal


@cli.command("show")
@cli.checkpoint_argument("run")
@click.option("--tree", is_flag=True, help="Show the leaves as a tree with the sizes of branches.")
@click.option("--stats", is_flag=True, help="Show minimum, maximum, mean, norm and more of leaves.")
@cli.leaves_option
@click.option(
    "--depth",
    metavar="N",
    type=click.IntRange(0),
    help="Of --tree or --stats: branches of N parts.",
)
def show(
    run: str, tree: bool, stats: bool, leaves: tuple[str, ...], depth: int | None, as_json: bool
) -> bool:
    """Show the recipe, metrics and leaves of a checkpoint.

    RUN@STEP names one, RUN and RUN@latest the newest, RUN@best:max:METRIC and RUN@best:min:METRIC the
    best by a metric, RUN@best by that of the run's retention. Manifests are read and no packs, but with
    --stats. The exit status is 1 if a leaf of --stats has an unknown dtype.

    \b
    Example:
      perdure show runs/a@best:min:loss
      perdure show runs/a@1000 --tree --depth 2
      perdure show runs/a@1000 --stats --leaves 'model/**/kernel'
    """
    if tree and stats:
        raise click.UsageError("give --tree or --stats, and not both.")
    if depth is not None and not (tree or stats):
        raise click.UsageError("--depth: has a meaning only with --tree or --stats.")
    from perdure import look  # loads NumPy only for what computes

    if tree or stats:
        result = (look.tree if tree else look.stats)(run, leaves=leaves or None, depth=depth)
        print_result(result, as_json)
        return bool(getattr(result, "unknown", ()))
    checkpoint = look.open_checkpoint(run)
    chosen = look.select_leaves(checkpoint, leaves or None)
    row = _listed(checkpoint)
    if as_json:
        document(_document(checkpoint, row, chosen))
    else:
        say("\n".join(_lines(checkpoint, row, chosen)))
    return False


def _listed(checkpoint: StoredCheckpoint) -> ListedCheckpoint:
    """What `perdure ls` says of the checkpoint."""
    from perdure.checkpoint.address import read_manifests
    from perdure.look.listing import listed

    manifests = {**read_manifests(checkpoint.run)[0], checkpoint.step: checkpoint.manifest}
    return next(row for row in listed(checkpoint.run, manifests) if row.step == checkpoint.step)


def _document(
    checkpoint: StoredCheckpoint, row: ListedCheckpoint, chosen: list[LeafEntry]
) -> dict[str, Any]:
    import msgspec

    manifest = {**msgspec.to_builtins(checkpoint.manifest), "leaves": msgspec.to_builtins(chosen)}
    names = {"run": checkpoint.run.where, "checkpoint": checkpoint.name}
    return {**names, **asdict(row), **manifest}


def _lines(
    checkpoint: StoredCheckpoint, row: ListedCheckpoint, chosen: list[LeafEntry]
) -> list[str]:
    from perdure.look.leaf_reader import origin_lines, value_text
    from perdure.look.listing import age_text

    manifest = checkpoint.manifest
    stored = f", stored as {size_text(manifest.stored_nbytes)}" if manifest.is_encoded else ""
    rows = [
        (
            _short(leaf.path),
            value_text(leaf.dtype, leaf.shape, leaf.text, VALUE_CHARACTERS),
            size_text(leaf.nbytes),
            leaf.hashes()[0][:16] if leaf.hashes() else "",
        )
        for leaf in chosen
    ]
    leaves = Table(("leaf", "value", "size", "first chunk"), rows, ("first chunk",))
    return [
        f"step         {manifest.step}",
        f"created      {manifest.created} ({age_text(row.age_s)} ago)",
        f"fingerprint  {manifest.fingerprint}",
        f"size         {size_text(manifest.nbytes)}{stored} in {counted(len(manifest.packs), 'pack')}",
        f"kept         {row.kept}",
        *(f"origin       {_short(line)}" for line in origin_lines(manifest)),
        *(f"recipe       {_short(k)} = {_short(v)}" for k, v in sorted(manifest.recipe.items())),
        *(
            f"metric       {_short(name)} = {metric}"
            for name, metric in sorted(manifest.metrics.items())
        ),
        "",
        leaves.text(terminal_width()),
    ]


def _short(value: object) -> str:
    return printable(str(value), VALUE_CHARACTERS)
