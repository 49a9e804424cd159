"""`perdure export RUN@STEP --to FORMAT OUT`: leaves of a checkpoint for another tool."""

from __future__ import annotations

import re

import click

from perdure.cli.output import EXIT_STATUS, document, json_option, size_text
from perdure.convert import NameMap, export
from perdure.convert.exporting import ARRAY_FORMATS, MODEL_FORMATS

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class _Size(click.ParamType):
    name = "SIZE"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d+)\s*([KMG]I?B|B?)", str(value).upper())
        if match is None or not int(match[1]):
            self.fail(f"expected a size such as 5GB or 500MiB, found {value!r}.", param, ctx)
        return int(match[1]) * _UNITS[match[2]]


@click.command(
    "export", short_help="Write a checkpoint in the format of another library.", epilog=EXIT_STATUS
)
@click.argument("checkpoint", metavar="RUN@STEP")
@click.argument("out", metavar="OUT")
@click.option(
    "--to", required=True, type=click.Choice(ARRAY_FORMATS + MODEL_FORMATS), help="The format."
)
@click.option("--leaves", multiple=True, metavar="PATTERN", help="Take only these leaves.")
@click.option("--names", metavar="FILE", help="New names: old=new in each line, with * and **.")
@click.option(
    "--shard-size", type=_Size(), help="The most bytes of a file of safetensors; 5GB by default."
)
@click.option("--model", metavar="FILE.PY:FUNCTION", help="Returns the Keras model.")
@click.option("--verify", is_flag=True, help="Read the result and compare it with the checkpoint.")
@json_option
def command(
    checkpoint: str,
    out: str,
    to: str,
    leaves: tuple[str, ...],
    names: str | None,
    shard_size: int | None,
    model: str | None,
    verify: bool,
    as_json: bool,
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
    done = export(
        checkpoint,
        to,
        out,
        leaves=leaves or None,
        names=None if names is None else NameMap.read(names),
        shard_bytes=shard_size,
        verify=verify,
        model=model,
    )
    if as_json:
        document(
            {
                "out": done.out,
                "format": to,
                "checkpoint": done.checkpoint.name,
                "fingerprint": done.checkpoint.manifest.fingerprint,
                "bytes": done.nbytes,
                "files": list(done.files),
                "names": done.names,
                "left_out": list(done.left_out),
                "verified": done.verified,
            }
        )
        return
    files = f"{len(done.files)} files" if len(done.files) > 1 else "1 file"
    leaves_text = f"{len(done.names)} {'leaf' if len(done.names) == 1 else 'leaves'}"
    click.echo(f"{out}: {leaves_text}, {size_text(done.nbytes)} in {files}")
    for path in done.left_out:
        click.echo(f"left out: {path}, which {to} cannot hold")
    if done.verified:
        click.echo("every array was read back and equals the checkpoint")
