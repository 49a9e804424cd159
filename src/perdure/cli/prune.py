"""`perdure prune RUN`: applies a retention policy and gives back the room of what nobody needs.

Executes unless `--dry-run` is given. Without a policy no checkpoint goes: only packs that a crash
left behind are removed, and packs that are mostly dead compacted.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

import click

from perdure.checkpoint.pruning import PrunePlan, execute_prune, plan_prune
from perdure.checkpoint.retention import Retention
from perdure.cli.output import document, json_option, run_argument, size_text, table
from perdure.store import Run
from perdure.store.format import PACKS


@click.command("prune")
@run_argument
@click.option("--max-to-keep", type=int, help="Keep the newest N checkpoints; all by default.")
@click.option("--keep-every-n-hours", type=float, help="Keep also one for every N hours.")
@click.option("--keep-period", type=int, help="Keep also the steps that N divides.")
@click.option("--best-metric", type=str, help="Keep also the best ones by this metric.")
@click.option("--best-mode", type=click.Choice(["max", "min"]), default="max", show_default=True)
@click.option("--best-to-keep", type=int, default=1, show_default=True)
@click.option("--rolled-back", is_flag=True, help="Remove also what rollbacks set aside.")
@click.option("--dry-run", is_flag=True, help="Print the plan and change nothing.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    run: str,
    max_to_keep: int | None,
    keep_every_n_hours: float | None,
    keep_period: int | None,
    best_metric: str | None,
    best_mode: Literal["max", "min"],
    best_to_keep: int,
    rolled_back: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Delete what the policy lets go from the run directory RUN, after printing the plan.

    This deletes at once; --dry-run only shows what would go. Pinned checkpoints stay. Without
    --max-to-keep every checkpoint stays, and only room that nobody needs is given back.
    """
    if max_to_keep is None and (keep_every_n_hours or keep_period or best_metric):
        raise click.UsageError("every checkpoint stays without --max-to-keep; give it, too.")
    retention = Retention(keep_every_n_hours, keep_period, best_metric, best_mode, best_to_keep)
    opened = Run(run)
    with opened:
        if not dry_run:
            opened.begin_writing()
        plan = plan_prune(opened, max_to_keep, retention, rolled_back=rolled_back)
        if not as_json:
            _print(plan)
        left = {} if dry_run else dict(execute_prune(opened, plan).left)
    if as_json:
        document({"executed": not dry_run, **_as_dict(plan), "left": left})
    else:
        for pack, why in left.items():
            click.echo(f"not compacted  {pack}: {why}")
        click.echo("nothing was changed (--dry-run)" if dry_run else "done")
    ctx.exit(1 if left else 0)


def _print(plan: PrunePlan) -> None:
    if plan.verdicts:
        table(
            ("step", "", "why"),
            [(v.step, "keep" if v.keep else "DELETE", v.reason) for v in plan.verdicts],
        )
        click.echo("")
    store = plan.store
    for label, names in (
        ("delete ", store.quarantined),
        ("delete ", [PACKS + name for name in store.packs]),
        ("orphan ", [PACKS + name for name in store.orphans]),
        ("compact", [PACKS + name for name in store.compact]),
    ):
        for name in names:
            click.echo(f"{label}  {name}")
    if store.held_back:
        click.echo(f"packs stay: {store.held_back}")
    going = len(store.steps) + len(store.quarantined)
    click.echo(
        f"{going} checkpoints go; {size_text(store.freed)} given back, "
        f"{size_text(store.copied)} copied, {len(store.rewrite)} manifests replaced"
    )


def _as_dict(plan: PrunePlan) -> dict[str, Any]:
    store = asdict(plan.store)
    del store["request"]
    return {"checkpoints": [asdict(verdict) for verdict in plan.verdicts], **store}
