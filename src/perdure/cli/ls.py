"""`perdure ls RUN`: the checkpoints of a run directory. Reads manifests, not packs."""

from __future__ import annotations

import click

from perdure.cli.output import document, json_option, run_argument, size_text, table
from perdure.errors import CorruptionError, UnreachableError
from perdure.store import Run


@click.command("ls")
@run_argument
@json_option
@click.pass_context
def command(ctx: click.Context, run: str, as_json: bool) -> None:
    """List the checkpoints of the run directory RUN, oldest first."""
    opened = Run(run)
    rows, damaged, unread = [], [], []
    for step in opened.steps():
        try:
            manifest = opened.manifest(step)
        except CorruptionError as error:
            damaged.append({"step": step, "error": str(error)})
            continue
        except UnreachableError as error:
            unread.append({"step": step, "error": str(error)})
            continue
        rows.append(
            {
                "step": step,
                "created": manifest.created,
                "leaves": len(manifest.leaves),
                "bytes": manifest.nbytes,
                "fingerprint": manifest.fingerprint,
            }
        )
    aside = opened.rolled_back()
    if as_json:
        names = {each.name for each in aside}
        quarantined = [name for name in opened.quarantined() if name not in names]
        document(
            {
                "run": opened.where,
                "checkpoints": rows,
                "damaged": damaged,
                "unread": unread,
                "quarantined": quarantined,
                "rolled_back": [
                    {
                        "step": each.manifest.step,
                        "rolled_back_to": each.note.rolled_back_to,
                        "when": each.note.found,
                        "name": each.name,
                    }
                    for each in aside
                ],
            }
        )
    else:
        table(
            ("step", "created", "leaves", "size", "fingerprint"),
            [
                (r["step"], r["created"], r["leaves"], size_text(r["bytes"]), r["fingerprint"][:16])
                for r in rows
            ],
        )
        for each in aside:
            click.echo(f"step {each.manifest.step} is set aside: {each.note.reason}")
        for bad in damaged:
            click.echo(f"step {bad['step']} is damaged: {bad['error']}", err=True)
        for each in unread:
            click.echo(each["error"], err=True)
    ctx.exit(1 if damaged or unread else 0)
