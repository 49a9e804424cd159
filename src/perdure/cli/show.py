"""`perdure show RUN[@STEP] [STEP]`: the content of one checkpoint. Reads manifests, not packs."""

from __future__ import annotations

from dataclasses import asdict

import click
import msgspec

from perdure.checkpoint.address import checkpoint_at, find_run, open_checkpoint, read_manifests
from perdure.cli.output import (
    EXIT_STATUS,
    VALUE_CHARACTERS,
    checkpoint_argument,
    document,
    json_option,
    printable,
    size_text,
)
from perdure.errors import ArgumentError
from perdure.look.leaf_tree import value_text
from perdure.look.listing import age_text, listed
from perdure.look.origins import origin_lines
from perdure.look.tables import Table
from perdure.store.format import FORMAT
from perdure.store.manifest import LeafEntry, Manifest
from perdure.text import counted


@click.command(
    "show", short_help="Show the recipe, metrics and leaves of a checkpoint.", epilog=EXIT_STATUS
)
@checkpoint_argument
@click.argument("step", type=int, required=False)
@json_option
def command(run: str, step: int | None, as_json: bool) -> None:
    """Show the recipe, metrics and leaves of a checkpoint.

    RUN STEP and RUN@STEP name one, RUN and RUN@latest the newest, RUN@best:max:METRIC and
    RUN@best:min:METRIC the best by a metric, RUN@best by that of the run's retention.

    \b
    Example:
      perdure show runs/a@best:min:loss
    """
    address = find_run(run)
    if step is not None and address.which is not None:
        raise ArgumentError(f"expected one step, found {run} and {step}. Leave one of them out.")
    checkpoint = (
        open_checkpoint(run) if step is None else checkpoint_at(address.run, step, address.given)
    )
    manifest = checkpoint.manifest
    manifests = {**read_manifests(checkpoint.run)[0], manifest.step: manifest}
    [row] = [r for r in listed(checkpoint.run, manifests) if r.step == manifest.step]
    if as_json:
        document({**asdict(row), **msgspec.to_builtins(manifest)})
        return
    # One text, so that a reader who takes the first lines (`| head`) makes nothing fail.
    lines = [
        f"step         {manifest.step}",
        f"created      {manifest.created} ({age_text(row.age_s)} ago)",
        f"fingerprint  {manifest.fingerprint}",
        f"size         {_size(manifest)}",
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
        str(
            Table(
                ("leaf", "value", "size", "first chunk"), [_row(leaf) for leaf in manifest.leaves]
            )
        ),
    ]
    click.echo("\n".join(lines))


def _size(manifest: Manifest) -> str:
    stored = f", stored as {size_text(manifest.stored_nbytes)}" if manifest.format > FORMAT else ""
    return (
        f"{size_text(manifest.nbytes)}{stored} in {counted(len(manifest.packs), 'pack', 'packs')}"
    )


def _row(leaf: LeafEntry) -> tuple[str, ...]:
    return (
        _short(leaf.path),
        value_text(leaf.dtype, leaf.shape, leaf.text, VALUE_CHARACTERS),
        size_text(leaf.nbytes),
        leaf.hashes()[0][:16] if leaf.hashes() else "",
    )


def _short(value: object) -> str:
    return printable(str(value), VALUE_CHARACTERS)
