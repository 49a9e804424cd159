"""`perdure export RUN@STEP --to FORMAT OUT`: leaves of a checkpoint for another tool."""

from __future__ import annotations

from typing import Any

import click

from perdure.cli.output import (
    EXIT_STATUS,
    Size,
    checkpoint_argument,
    document,
    json_option,
    leaves_option,
    leaves_text,
)
from perdure.convert import NameMap, export
from perdure.convert.exporting import ARRAY_FORMATS, MODEL_FORMATS


@click.command(
    "export", short_help="Write a checkpoint in the format of another library.", epilog=EXIT_STATUS
)
@checkpoint_argument("checkpoint")
@click.argument("out", metavar="OUT")
@click.option(
    "--to", required=True, type=click.Choice(ARRAY_FORMATS + MODEL_FORMATS), help="The format."
)
@leaves_option
@click.option("--names", metavar="FILE", help="New names: old=new in each line, with * and **.")
@click.option(
    "--shard-size",
    "shard_bytes",
    type=Size(),
    help="The most bytes of a file of safetensors; 5GB by default.",
)
@click.option("--model", metavar="FILE.PY:FUNCTION", help="Returns the Keras model.")
@click.option("--verify", is_flag=True, help="Read the result and compare it with the checkpoint.")
@json_option
def command(
    checkpoint: str,
    out: str,
    leaves: tuple[str, ...],
    names: str | None,
    as_json: bool,
    **how: Any,
) -> None:
    """Write leaves of a checkpoint to the new file or folder OUT.

    safetensors (a folder in the layout of Hugging Face, or one file if OUT ends in .safetensors),
    torch (a state dict), npz and orbax need nothing but the checkpoint. keras, saved_model, onnx and
    jax_export need the code of the model: --model. With --leaves model, names begin below `model`.
    OUT appears when it is complete.

    \b
    Example:
      perdure export runs/a@1000 model.safetensors --to safetensors --leaves model
    """
    name_map = None if names is None else NameMap.read(names)
    done = export(checkpoint, out=out, leaves=leaves or None, names=name_map, **how)
    if as_json:
        document(
            {
                "output": done.out,
                "format": how["to"],
                "checkpoint": done.checkpoint.name,
                "fingerprint": done.checkpoint.manifest.fingerprint,
                "nbytes": done.nbytes,
                "files": list(done.files),
                "names": done.names,
                "left_out": list(done.left_out),
                "verified": done.verified,
            }
        )
        return
    files = f"{len(done.files)} files" if len(done.files) > 1 else "1 file"
    click.echo(f"{out}: {leaves_text(len(done.names), done.nbytes)} in {files}")
    for path in done.left_out:
        click.echo(f"left out: {path}, which {how['to']} cannot hold")
    if done.verified:
        click.echo("every array was read back and equals the checkpoint")
