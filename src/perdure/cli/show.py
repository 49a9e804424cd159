"""`perdure show RUN[@STEP]`: one checkpoint, its leaves as a tree, or the figures of its leaves."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.output import (
    VALUE_CHARACTERS,
    checkpoint_argument,
    document,
    json_option,
    leaves_option,
    printable,
    show,
    terminal_width,
)
from perdure.look.tables import Table, size_text

if TYPE_CHECKING:
    from perdure.checkpoint.address import StoredCheckpoint
    from perdure.look.listing import ListedCheckpoint
    from perdure.store.manifest import LeafEntry


@click.command("show", short_help="Show a checkpoint: recipe, metrics, leaves, figures.")
@checkpoint_argument("run")
@click.option("--tree", is_flag=True, help="Show the leaves as a tree with the sizes of branches.")
@click.option("--stats", is_flag=True, help="Show minimum, maximum, mean, norm and more of leaves.")
@leaves_option
@click.option(
    "--depth",
    metavar="N",
    type=click.IntRange(0),
    help="Of --tree or --stats: branches of N parts, nothing below; 0 is the whole state.",
)
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    run: str,
    tree: bool,
    stats: bool,
    leaves: tuple[str, ...],
    depth: int | None,
    as_json: bool,
) -> None:
    """Show the recipe, metrics and leaves of a checkpoint.

    RUN@STEP names one, RUN and RUN@latest the newest, RUN@best:max:METRIC and RUN@best:min:METRIC the
    best by a metric, RUN@best by that of the run's retention. Manifests are read and no packs, but with
    --stats, which verifies every byte that it reads. The exit status is 1 if a leaf of --stats has a
    dtype that is not known here, 2 for a mistake in the arguments.

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
    if tree or stats:
        from perdure import look  # NumPy is loaded only by the one that computes

        result = (look.tree if tree else look.stats)(run, leaves=leaves or None, depth=depth)
        document(result.as_dict()) if as_json else show(result)
        ctx.exit(1 if getattr(result, "unknown", ()) else 0)
    from perdure.look import open_checkpoint, select_leaves

    checkpoint = open_checkpoint(run)
    chosen = select_leaves(checkpoint, leaves or None)
    row = _listed(checkpoint)
    if as_json:
        document(_document(checkpoint, row, chosen))
    else:
        # One text, so that a reader who takes the first lines (`| head`) makes nothing fail.
        click.echo("\n".join(_lines(checkpoint, row, chosen)))


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
    from perdure.look.leaf_tree import value_text
    from perdure.look.listing import age_text
    from perdure.look.origins import origin_lines
    from perdure.text import counted

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
    return [
        f"step         {manifest.step}",
        f"created      {manifest.created} ({age_text(row.age_s)} ago)",
        f"fingerprint  {manifest.fingerprint}",
        f"size         {size_text(manifest.nbytes)}{stored} in {counted(len(manifest.packs), 'pack')}",
        (
            f"in packs     deleting it frees {size_text(row.own_nbytes)}; "
            f"{size_text(row.shared_nbytes)} stay, in packs of other checkpoints"
        ),
        f"kept         {row.kept}",
        *(f"origin       {_short(line)}" for line in origin_lines(manifest)),
        *(f"recipe       {_short(k)} = {_short(v)}" for k, v in sorted(manifest.recipe.items())),
        *(
            f"metric       {_short(name)} = {'not finite' if metric is None else metric}"
            for name, metric in sorted(manifest.metrics.items())
        ),
        "",
        Table(("leaf", "value", "size", "first chunk"), rows, ("first chunk",)).text(
            terminal_width()
        ),
    ]


def _short(value: object) -> str:
    return printable(str(value), VALUE_CHARACTERS)
