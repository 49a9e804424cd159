"""`perdure show RUN[@STEP] [STEP]`: the content of one checkpoint. Reads manifests, not packs."""

from __future__ import annotations

import click
import msgspec

from perdure.cli.output import (
    VALUE_CHARACTERS,
    checkpoint_argument,
    document,
    json_option,
    printable,
    size_text,
    table,
)
from perdure.errors import ArgumentError
from perdure.inspect.address import checkpoint_at, find_run, open_checkpoint, read_manifests
from perdure.inspect.listing import age_text, checkpoint_json, listed
from perdure.store import Leaf
from perdure.store.format import FORMAT


@click.command("show")
@checkpoint_argument
@click.argument("step", type=int, required=False)
@json_option
def command(run: str, step: int | None, as_json: bool) -> None:
    """Show the recipe, metrics and leaves of a checkpoint.

    RUN STEP and RUN@STEP name one, RUN and RUN@latest the newest, RUN@best:max:METRIC and
    RUN@best:min:METRIC the best by a metric.
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
        document({**checkpoint_json(row), **msgspec.to_builtins(manifest)})
        return
    click.echo(f"step         {manifest.step}")
    click.echo(f"created      {manifest.created} ({age_text(row.age_s)} ago)")
    click.echo(f"fingerprint  {manifest.fingerprint}")
    stored = f", stored as {size_text(manifest.stored_nbytes)}" if manifest.format > FORMAT else ""
    click.echo(f"size         {size_text(manifest.nbytes)}{stored} in {len(manifest.packs)} packs")
    own, shared = size_text(row.own_nbytes), size_text(row.shared_nbytes)
    click.echo(f"in packs     deleting it frees {own}; {shared} stay, in packs of other checkpoints")
    click.echo(f"kept         {row.kept}")
    for field, value in sorted(manifest.recipe.items()):
        click.echo(f"recipe       {_short(field)} = {_short(value)}")
    for name, metric in sorted(manifest.metrics.items()):
        click.echo(f"metric       {_short(name)} = {'not finite' if metric is None else metric}")
    click.echo("")
    rows = [
        (
            _short(leaf.path),
            _short(Leaf(leaf.dtype, leaf.shape, memoryview((leaf.text or "").encode())).describe()),
            size_text(leaf.nbytes),
            leaf.hashes()[0][:16] if leaf.hashes() else "",
        )
        for leaf in manifest.leaves
    ]
    table(("leaf", "value", "size", "first chunk"), rows)


def _short(value: object) -> str:
    return printable(str(value), VALUE_CHARACTERS)
