"""`perdure ls RUN`: the checkpoints of a run directory. Reads manifests, not packs."""

from __future__ import annotations

from collections.abc import Mapping

import click

from perdure.cli.output import document, json_option, run_argument, size_text, table
from perdure.errors import CorruptionError, UnreachableError
from perdure.store import Run

_MOST_METRICS = 4


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
                "metrics": manifest.metrics,
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
        header = ["step", "created", "leaves", "size", "fingerprint"]
        cells = [
            [r["step"], r["created"], r["leaves"], size_text(r["bytes"]), r["fingerprint"][:16]]
            for r in rows
        ]
        if any(row["metrics"] for row in rows):
            header.append("metrics")
            for line, row in zip(cells, rows, strict=True):
                line.append(_metrics_text(row["metrics"]))
        table(header, cells)
        for each in aside:
            click.echo(f"step {each.manifest.step} is set aside: {each.note.reason}")
        for bad in damaged:
            click.echo(f"step {bad['step']} is damaged: {bad['error']}", err=True)
        for each in unread:
            click.echo(each["error"], err=True)
    ctx.exit(1 if damaged or unread else 0)


def _metrics_text(metrics: Mapping[str, float | None]) -> str:
    """`accuracy=0.91 loss=0.25`, the first few by name."""
    texts = [
        f"{name}={'not-finite' if value is None else format(value, 'g')}"
        for name, value in sorted(metrics.items())
    ]
    more = [f"(and {len(texts) - _MOST_METRICS} more)"] if len(texts) > _MOST_METRICS else []
    return " ".join([*texts[:_MOST_METRICS], *more])
