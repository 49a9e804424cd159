"""`perdure ls RUN`: the checkpoints of a run directory. Reads manifests, not packs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from perdure.cli.output import document, json_option, run_argument, size_text, table
from perdure.errors import CorruptionError, UnreachableError
from perdure.store import Run

_MOST_METRICS = 4
_Rows = list[dict[str, Any]]


@click.command("ls")
@run_argument
@json_option
@click.pass_context
def command(ctx: click.Context, run: str, as_json: bool) -> None:
    """List the checkpoints of the run directory RUN, oldest first."""
    opened = Run(run)
    rows, damaged, unread = _read_manifests(opened)
    if as_json:
        document(_document(opened, rows, damaged, unread))
    else:
        _print(opened, rows, damaged, unread)
    ctx.exit(1 if damaged or unread else 0)


def _read_manifests(run: Run) -> tuple[_Rows, _Rows, _Rows]:
    """A row for each checkpoint, and the errors of damaged and of unreadable manifests."""
    rows: _Rows = []
    damaged: _Rows = []
    unread: _Rows = []
    for step in run.steps():
        try:
            manifest = run.manifest(step)
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
    return rows, damaged, unread


def _document(run: Run, rows: _Rows, damaged: _Rows, unread: _Rows) -> dict[str, Any]:
    set_aside = run.rolled_back()
    names = {checkpoint.name for checkpoint in set_aside}
    return {
        "run": run.where,
        "checkpoints": rows,
        "damaged": damaged,
        "unread": unread,
        "quarantined": [name for name in run.quarantined() if name not in names],
        "rolled_back": [
            {
                "step": checkpoint.manifest.step,
                "rolled_back_to": checkpoint.note.rolled_back_to,
                "when": checkpoint.note.found,
                "name": checkpoint.name,
            }
            for checkpoint in set_aside
        ],
    }


def _print(run: Run, rows: _Rows, damaged: _Rows, unread: _Rows) -> None:
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
    for checkpoint in run.rolled_back():
        click.echo(f"step {checkpoint.manifest.step} is set aside: {checkpoint.note.reason}")
    for row in damaged:
        click.echo(f"step {row['step']} is damaged: {row['error']}", err=True)
    for row in unread:
        click.echo(row["error"], err=True)


def _metrics_text(metrics: Mapping[str, float | None]) -> str:
    """Text such as `accuracy=0.91 loss=0.25`: the first few metrics by name."""
    texts = [
        f"{name}={'not-finite' if value is None else format(value, 'g')}"
        for name, value in sorted(metrics.items())
    ]
    more = [f"(and {len(texts) - _MOST_METRICS} more)"] if len(texts) > _MOST_METRICS else []
    return " ".join([*texts[:_MOST_METRICS], *more])
