"""`perdure import SRC RUN`: arrays of other tools as step 0 of a new run directory."""

from __future__ import annotations

import os

import click

from perdure.cli.output import (
    EXIT_STATUS,
    NewRun,
    document,
    json_option,
    leaves_text,
    new_run_argument,
)
from perdure.convert import NameMap, import_run
from perdure.convert.foreign_files import READ_FORMATS
from perdure.errors import ArgumentError


@click.command(
    "import", short_help="Begin a run directory with the arrays of other files.", epilog=EXIT_STATUS
)
@click.argument("source", metavar="SRC")
@click.argument("run", metavar="RUN", type=NewRun())
@click.option("--from", "kind", type=click.Choice(READ_FORMATS), help="The format of SRC.")
@click.option("--branch", default="", metavar="PATH", help="Put the leaves below this path.")
@click.option("--names", metavar="FILE", help="Paths: old=new in each line, with * and **.")
@json_option
def command(
    source: str, run: str, kind: str | None, branch: str, names: str | None, as_json: bool
) -> None:
    """Save the arrays of SRC as step 0 of the new run directory RUN.

    SRC is a .safetensors file, a folder of them, a state dict of PyTorch, a .npz archive or a folder
    of Orbax. The dots of a name become the parts of a path: encoder.0.weight is the leaf
    encoder/0/weight. A SRC that is one array becomes the leaf PATH of --branch. Torch files are read
    with weights_only=True only, so that no code in them runs.

    \b
    Example:
      perdure import model.safetensors runs/a --branch model
    """
    name_map = None if names is None else NameMap.read(names)
    if not os.path.lexists(source):
        raise ArgumentError(f"{source}: expected a file or folder, found nothing.")
    with new_run_argument():
        manifest = import_run(source, run, kind=kind, branch=branch, names=name_map)
    if as_json:
        leaves = [{"path": leaf.path} for leaf in manifest.leaves]
        document({"run": run, "step": 0, "fingerprint": manifest.fingerprint, "leaves": leaves})
        return
    click.echo(f"{run} starts at step 0 with {leaves_text(len(manifest.leaves), manifest.nbytes)}")
