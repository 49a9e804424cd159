"""`perdure prune RUN`: applies a retention policy and frees the space of data that nothing needs.

Executes unless `--dry-run` is given. Without a policy every checkpoint stays; only the leftovers of
crashes are removed, and packs that are mostly unneeded are compacted.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from perdure.checkpoint.address import open_run
from perdure.checkpoint.retention import PrunePlan, Retention, execute_prune, plan_prune
from perdure.cli.output import (
    EXIT_STATUS,
    document,
    dry_run_option,
    json_option,
    run_argument,
    size_text,
    table,
)
from perdure.store.format import PACKS, span_text
from perdure.store.garbage_collection import stopped
from perdure.store.log_view import StepRange
from perdure.store.run_events import Dropped
from perdure.text import counted


@click.command(
    "prune", short_help="Delete the checkpoints that a policy does not keep.", epilog=EXIT_STATUS
)
@run_argument
@click.option(
    "--max-to-keep", type=click.IntRange(1), help="Keep the newest N checkpoints; by default all."
)
@click.option(
    "--keep-every-n-hours",
    type=click.FloatRange(0, min_open=True),
    help="Also keep one checkpoint for every N hours.",
)
@click.option(
    "--keep-period", type=click.IntRange(1), help="Also keep the steps that are multiples of N."
)
@click.option("--best-metric", type=str, help="Also keep the best checkpoints by this metric.")
@click.option(
    "--best-mode",
    type=click.Choice(["max", "min"]),
    default="max",
    show_default=True,
    help="Whether the largest or the smallest value is best.",
)
@click.option(
    "--best-to-keep",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="How many of the best to keep.",
)
@click.option("--rolled-back", is_flag=True, help="Also remove what rollbacks set aside.")
@dry_run_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    run: str,
    max_to_keep: int | None,
    rolled_back: bool,
    dry_run: bool,
    as_json: bool,
    **rules: Any,
) -> None:
    """Delete the checkpoints of the run directory RUN that the policy does not keep.

    The plan is printed and carried out at once; --dry-run only prints it. Pinned checkpoints stay.
    Without --max-to-keep every checkpoint stays, and only unneeded space is freed.

    \b
    Example:
      perdure prune runs/a --max-to-keep 3 --keep-period 1000 --dry-run
    """
    kept = rules["keep_every_n_hours"] or rules["keep_period"] or rules["best_metric"]
    if max_to_keep is None and kept:
        raise click.UsageError("without --max-to-keep every checkpoint stays; give it as well.")
    retention = Retention(**rules)
    with open_run(run) as opened:
        if not dry_run:
            opened.begin_writing()
        plan = plan_prune(opened, max_to_keep, retention, rolled_back=rolled_back)
        lines = opened.log.view.steps_aside() if rolled_back else []
        if not as_json:
            _print(plan, lines)
        left = {} if dry_run else dict(execute_prune(opened, plan).left)
        if lines and not dry_run and not plan.store.is_frozen:
            try:
                opened.log.append(Dropped())
            except OSError as error:
                raise stopped(opened.where, error) from error
    if as_json:
        store = asdict(plan.store)
        del store["request"]
        sizes = {"freed_nbytes": store.pop("freed"), "copied_nbytes": store.pop("copied")}
        rows = [asdict(verdict) for verdict in plan.verdicts]
        found = {"run": run, "checkpoints": rows, **store, **sizes, "lines": lines, "left": left}
        document({"executed": not dry_run, **found})
    else:
        for pack, why in left.items():
            click.echo(f"not compacted  {pack}: {why}")
        click.echo("nothing was changed (--dry-run)" if dry_run else "done")
    ctx.exit(1 if left or plan.store.is_frozen else 0)


def _print(plan: PrunePlan, lines: list[StepRange]) -> None:
    if plan.verdicts:
        table(
            ("step", "", "why"),
            [(v.step, "keep" if v.keep else "DELETE", v.reason) for v in plan.verdicts],
        )
        click.echo("")
    store = plan.store
    for label, names in (
        ("delete ", store.quarantined),
        ("delete ", [f"lines of the journal, of {span_text(*span)}" for span in lines]),
        ("delete ", [PACKS + name for name in store.packs]),
        ("orphan ", [PACKS + name for name in store.orphans]),
        ("compact", [PACKS + name for name in store.compact]),
    ):
        for name in names:
            click.echo(f"{label}  {name}")
    if store.held_back:
        click.echo(store.held_back if store.is_frozen else f"packs stay: {store.held_back}")
    going = len(store.steps) + len(store.quarantined)
    click.echo(
        f"{counted(going, 'checkpoint')} to delete; {size_text(store.freed)} freed, "
        f"{size_text(store.copied)} copied, {counted(len(store.rewrite), 'manifest')} replaced"
    )
