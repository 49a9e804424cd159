"""`perdure copy SRC[@STEP,...] DST`: copies checkpoints into another run directory."""

from __future__ import annotations

import os
from dataclasses import asdict

import click

from perdure.cli.output import document, json_option, size_text
from perdure.store import Copied, copy_run
from perdure.text import counted


@click.command("copy", short_help="Copy checkpoints into another run directory or bucket.")
@click.argument("src", metavar="SRC[@STEP,...]", type=click.Path(path_type=str))
@click.argument("dst", metavar="DST", type=click.Path(path_type=str))
@click.option("--dry-run", is_flag=True, help="Print what would be copied and change nothing.")
@json_option
@click.pass_context
def command(ctx: click.Context, src: str, dst: str, dry_run: bool, as_json: bool) -> None:
    """Copy checkpoints of the run directory SRC into the run directory DST, oldest first.

    Both are paths or URLs (s3://...). SRC@100,200 copies only these steps. Every byte is verified, and
    steps that DST holds already are skipped, so a copy can be repeated. A step is not copied if DST
    has other bits at that step or a newer step; the exit status is 1 then.

    \b
    Example:
      perdure copy runs/a s3://bucket/runs/a
    """
    source, steps = split_steps(src)

    def show(copied: Copied) -> None:
        line = f"step {copied.step}  {copied.outcome}"
        if copied.outcome == "copied":
            line += f"  {size_text(copied.nbytes)}"
        click.echo(f"{line}: {copied.reason}" if copied.reason else line)

    outcomes = copy_run(source, dst, steps, dry_run=dry_run, progress=None if as_json else show)
    missing = [copied.step for copied in outcomes if copied.outcome not in ("copied", "present")]
    if as_json:
        document({"executed": not dry_run, "steps": [asdict(copied) for copied in outcomes]})
    elif dry_run:
        click.echo("nothing was changed (--dry-run)")
    else:
        click.echo(
            f"{len(outcomes) - len(missing)} of {counted(len(outcomes), 'checkpoint')} in {dst}"
        )
    ctx.exit(1 if missing else 0)


def split_steps(text: str) -> tuple[str, list[int] | None]:
    """The run directory and the steps after the last `@`; None if no step is named.

    The name of an existing directory is never split.
    """
    run, separator, steps = text.rpartition("@")
    parts = steps.split(",")
    if not (separator and run and all(part.isascii() and part.isdigit() for part in parts)):
        return text, None
    if os.path.isdir(text):
        return text, None
    return run, [int(part) for part in parts]
