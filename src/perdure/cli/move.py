"""`perdure copy`, `fork`, `average`, `export` and `import`: checkpoints for other runs and tools."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from perdure.cli import options as cli
from perdure.cli.output import document, print_result, say
from perdure.convert.formats import FORMATS, WRITTEN
from perdure.errors import StepExistsError, StoreError
from perdure.look.tables import leaves_text, size_text
from perdure.text import counted

if TYPE_CHECKING:
    from perdure.convert import NameMap
    from perdure.store import Copied


@cli.command("copy")
@cli.checkpoint_argument("run", "RUN[@STEP,...]")
@cli.new_run_argument("target", "TARGET")
@cli.dry_run_option
def copy(run: str, target: str, dry_run: bool, as_json: bool) -> bool:
    """Copy checkpoints of the run directory RUN into the run directory TARGET, oldest first.

    Both are paths or URLs (s3://...). RUN@100,200 copies only these steps. Every byte is verified.
    Steps that TARGET holds already are skipped, as are those that RUN deletes meanwhile. Exits with 1
    if TARGET has other bits or a newer step, if a checkpoint is damaged, or if a step that you named
    is gone.

    \b
    Example:
      perdure copy runs/a s3://bucket/runs/a
    """
    from perdure.checkpoint.address import find_run, open_checkpoints
    from perdure.store import copy_run

    source = find_run(run)
    steps = None if source.which is None else [each.step for each in open_checkpoints(run)]

    def is_skipped(copied: Copied) -> bool:
        return copied.outcome == "gone" and steps is None

    def progress(copied: Copied) -> None:
        line = f"step {copied.step}  {'skipped' if is_skipped(copied) else copied.outcome}"
        if copied.outcome == "copied":
            line += f"  {size_text(copied.nbytes)}"
        say(f"{line}: {copied.reason}" if copied.reason else line)

    with cli.wrong_usage(StoreError):
        outcomes = copy_run(
            source.given, target, steps, dry_run=dry_run, progress=None if as_json else progress
        )
    wanted = [copied for copied in outcomes if not is_skipped(copied)]
    done = [copied for copied in wanted if copied.outcome in ("copied", "present")]
    if as_json:
        rows = [asdict(copied) for copied in outcomes]
        document({"executed": not dry_run, "run": target, "checkpoints": rows})
    elif dry_run:
        say("nothing was changed (--dry-run)")
    else:
        say(f"{len(done)} of {counted(len(wanted), 'checkpoint')} in {target}")
    return len(done) < len(wanted)


@cli.command("fork", epilog=cli.EXIT_STATUS)
@cli.checkpoint_argument("run", "RUN@STEP")
@cli.new_run_argument("new", "NEW")
def fork(run: str, new: str, as_json: bool) -> None:
    """Start the run directory NEW from one checkpoint of RUN, and leave RUN as it is.

    NEW must be empty or missing. On one local file system packs become hard links; pruning or deleting
    one run does not affect the other.

    \b
    Example:
      perdure fork runs/a@1000 runs/b
    """
    from perdure.checkpoint.address import find_run, open_checkpoint
    from perdure.store import fork_run

    source = find_run(run)
    if source.which is None:
        raise click.UsageError(f"expected RUN@STEP, such as runs/a@100, found {run!r}.")
    step = open_checkpoint(run).step
    with cli.wrong_usage(StoreError):
        manifest = fork_run(source.given, step, new)
    if as_json:
        document({"run": new, "step": manifest.step, "fingerprint": manifest.fingerprint})
    else:
        say(f"{new} starts at step {manifest.step} of {source.given}")


@cli.command("average", epilog=cli.EXIT_STATUS)
@cli.checkpoint_argument("checkpoints", "RUN@STEP...", nargs=-1, required=True)
@cli.output_option("The new run directory.", required=True, type=cli.NewRun())
@click.option("--weights", metavar="W,W,...", help="A weight for each; else equal ones.")
@cli.leaves_option
@click.option("--like", metavar="RUN@STEP", help="Where all other leaves come from.")
def average(
    checkpoints: tuple[str, ...],
    output: str,
    weights: str | None,
    leaves: tuple[str, ...],
    like: str | None,
    as_json: bool,
) -> None:
    """Average checkpoints into the new run directory of -o: RUN@100,200,300 or several RUN@STEP.

    Arrays of floating-point numbers are averaged in float64, in the order of the steps, and rounded
    once. The step and all other leaves are those of the newest of the checkpoints, or of --like.

    \b
    Example:
      perdure average runs/a@800,900,1000 -o runs/mean
    """
    from perdure.convert import average

    given: Any = weights.split(",") if weights is not None else None  # `average` makes them numbers
    with cli.wrong_usage(StoreError, StepExistsError):
        made = average(checkpoints, output, weights=given, leaves=leaves or None, like=like)
    print_result(made, as_json)


def _names(file: str | None) -> NameMap | None:
    from perdure.convert import NameMap

    return None if file is None else NameMap.read(file)


@cli.command("export", epilog=cli.EXIT_STATUS)
@cli.checkpoint_argument("checkpoint")
@click.argument("out", metavar="OUT")
@click.option("--to", required=True, type=click.Choice(WRITTEN), help="The format.")
@cli.leaves_option
@click.option("--names", metavar="FILE", help="New names: old=new in each line, with * and **.")
@click.option(
    "--shard-size", "shard_bytes", type=cli.Size(), help="Of safetensors; 5GB by default."
)
@click.option("--verify", is_flag=True, help="Read the result and compare it with the checkpoint.")
def export(
    checkpoint: str, out: str, leaves: tuple[str, ...], names: str | None, as_json: bool, **how: Any
) -> None:
    """Write leaves of a checkpoint to the new file or folder OUT.

    safetensors is a folder for the Hugging Face Hub, or one file if OUT ends in .safetensors.
    With --leaves model, names begin below `model`. OUT appears when it is complete.

    \b
    Example:
      perdure export runs/a@1000 model.safetensors --to safetensors --leaves model
    """
    from perdure.convert import export

    done = export(checkpoint, out=out, leaves=leaves or None, names=_names(names), **how)
    print_result(done, as_json)


@cli.command("import", epilog=cli.EXIT_STATUS)
@click.argument("source", metavar="SRC")
@cli.new_run_argument("run", "RUN")
@click.option("--from", "kind", type=click.Choice(FORMATS), help="The format of SRC.")
@click.option("--branch", metavar="PATH", help="Put the leaves below this path.")
@click.option("--names", metavar="FILE", help="Paths: old=new in each line, with * and **.")
def import_(
    source: str, run: str, kind: str | None, branch: str | None, names: str | None, as_json: bool
) -> None:
    """Save the arrays of SRC as step 0 of the new run directory RUN.

    SRC is a .safetensors file, a folder of them, hf://OWNER/REPO[@REVISION] on the Hugging Face Hub, a
    state dict of PyTorch, a .npz archive or a folder of Orbax; no code in it runs. If it notes a
    fingerprint, as an export to safetensors does, the bytes must have it. The dots of a name become the
    parts of a path: encoder.0.weight is the leaf encoder/0/weight. A SRC that is one array becomes the
    leaf PATH of --branch.

    \b
    Example:
      perdure import model.safetensors runs/a --branch model
    """
    from perdure.convert import import_run
    from perdure.convert.hub import PREFIX
    from perdure.errors import ArgumentError

    if not source.startswith(PREFIX) and not os.path.lexists(source):
        raise ArgumentError(f"{source}: expected a file or folder, found nothing.")
    with cli.wrong_usage(StoreError, StepExistsError):
        manifest = import_run(source, run, kind=kind, branch=branch or "", names=_names(names))
    if as_json:
        leaves = [{"path": leaf.path} for leaf in manifest.leaves]
        document({"run": run, "step": 0, "fingerprint": manifest.fingerprint, "leaves": leaves})
    else:
        say(f"{run} starts at step 0 with {leaves_text(len(manifest.leaves), manifest.nbytes)}")
        say(f"fingerprint {manifest.fingerprint}")
