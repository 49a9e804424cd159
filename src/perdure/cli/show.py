"""`perdure show RUN [STEP]`: the content of one checkpoint. Reads its manifest, not its packs."""

from __future__ import annotations

import click
import msgspec

from perdure.cli.output import (
    VALUE_CHARACTERS,
    document,
    json_option,
    printable,
    run_argument,
    size_text,
    table,
)
from perdure.errors import StepNotFoundError
from perdure.store import Leaf, Run
from perdure.store.format import FORMAT


@click.command("show")
@run_argument
@click.argument("step", type=int, required=False)
@json_option
def command(run: str, step: int | None, as_json: bool) -> None:
    """Show the recipe, metrics and leaves of STEP (by default the newest) in the run directory RUN."""
    opened = Run(run)
    if step is None:
        steps = opened.steps()
        if not steps:
            raise StepNotFoundError(f"{opened.where}: expected a checkpoint, found none yet.")
        step = steps[-1]
    manifest = opened.manifest(step)
    if as_json:
        document(msgspec.to_builtins(manifest))
        return
    click.echo(f"step         {manifest.step}")
    click.echo(f"created      {manifest.created}")
    click.echo(f"fingerprint  {manifest.fingerprint}")
    stored = f", stored as {size_text(manifest.stored_nbytes)}" if manifest.format > FORMAT else ""
    click.echo(f"size         {size_text(manifest.nbytes)}{stored} in {len(manifest.packs)} packs")
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
