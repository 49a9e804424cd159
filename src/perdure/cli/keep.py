"""`perdure verify`, `prune` and `rollback`: what a run directory keeps, and whether it is whole."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from perdure.cli import options as cli
from perdure.cli.output import document, say, table
from perdure.errors import ArgumentError
from perdure.look.tables import size_text
from perdure.text import counted, few

if TYPE_CHECKING:
    from perdure.checkpoint import retention as policies
    from perdure.store import Run
    from perdure.store.journal_lines import StepRange
    from perdure.store.verify import VerifyReport


@cli.command("verify")
@cli.run_argument
@click.option("--repair", is_flag=True, help="Set aside what is damaged, then check again.")
def verify(run: str, repair: bool, as_json: bool) -> bool:
    """Read and hash everything in the run directory RUN, and report damage.

    Nothing changes without --repair. With it, damaged checkpoints and packs move to quarantine, those
    that are whole again return, leftovers of crashes are removed, and a missing or damaged perdure.json
    is written again. What cannot be read is reported as UNREAD and stays. Exits with 1 if anything is
    damaged or unread, or no checkpoint is left.

    \b
    Example:
      perdure verify runs/a
    """
    from perdure.store import verify_run
    from perdure.store.repair import repair as repair_run

    opened = _open(run, repair)
    actions: tuple[str, ...] = ()
    if repair:
        with opened:
            done = repair_run(opened)
        actions, report = done.actions, done.report
    else:
        report = verify_run(opened)
    if as_json:
        found = asdict(report)
        document({"ok": report.ok, "run": found.pop("where"), "actions": actions, **found})
    else:
        say(*(f"repair  {action}" for action in actions))
        _print_report(report, repair)
    return not report.ok


def _open(where: str, repair: bool) -> Run:
    from perdure.checkpoint.address import open_run
    from perdure.errors import NotARunError
    from perdure.store import Run

    try:
        return Run(where, repair=repair)
    except NotARunError:
        with suppress(NotARunError):
            open_run(where)  # raises another error for the name of a checkpoint
        raise


def _print_report(report: VerifyReport, repaired: bool) -> None:
    from perdure.store.format import MANIFESTS

    for problem in report.problems:
        kind = "UNREAD" if problem.unread else "DAMAGED" if problem.harmful else "note"
        say(f"{kind}  {problem.name}: {problem.what}")
    is_encoded = report.decoded_nbytes > report.nbytes
    decoded = f", {size_text(report.decoded_nbytes)} decoded" if is_encoded else ""
    unread = f", {len(report.unread)} could not be read" if report.unread else ""
    good = counted(len(report.good), "checkpoint")
    say(
        f"{good} good, {len(report.bad)} damaged{unread}; "
        f"{counted(report.chunks, 'chunk')}, {size_text(report.nbytes)} read{decoded}"
    )
    # Only whoever has the folder of the checkpoints can bring it back.
    faults = {each.name for each in report.problems if each.harmful and not each.unread}
    if report.foreign:
        say("nothing is repaired or pruned here before the file of the other run is gone")
        return
    if report.good and max(report.unread, default=-1) > max(report.good):
        say(f"a restore takes nothing before step {max(report.unread)} can be read")
    elif report.good and MANIFESTS not in faults and (repaired or not report.ok):
        say(f"a restore takes step {max(report.good)}, the newest good one")
    elif not report.good and (repaired or not report.ok):
        say("no checkpoint can be restored")
    if any(problem.unread for problem in report.problems):
        say("the state of unread files is unknown; remove the cause and verify again")
    if faults - {MANIFESTS} and not repaired:
        say("`perdure verify --repair` sets aside what is damaged")


@cli.command("prune", epilog=cli.EXIT_STATUS)
@cli.run_argument
@click.option(
    "--max-to-keep", type=cli.COUNT, help="Keep the newest N checkpoints; by default all."
)
@click.option(
    "--keep-every-n-hours",
    type=click.FloatRange(0, min_open=True),
    help="Also one for every N hours.",
)
@click.option("--keep-period", type=cli.COUNT, help="Also keep the steps that are multiples of N.")
@click.option("--best-metric", type=str, help="Also keep the best checkpoints by this metric.")
@click.option("--best-mode", type=click.Choice(["max", "min"]), help="max is the default.")
@click.option("--best-to-keep", type=cli.COUNT, help="How many of the best to keep (1 by default).")
@click.option("--rolled-back", is_flag=True, help="Also remove what rollbacks set aside.")
@cli.dry_run_option
def prune(
    run: str, max_to_keep: int | None, rolled_back: bool, dry_run: bool, as_json: bool, **rules: Any
) -> bool:
    """Delete the checkpoints of the run directory RUN that the policy does not keep.

    The plan is printed and carried out at once; --dry-run only prints it. Pinned checkpoints stay.
    Without --max-to-keep only unneeded space is freed; without another rule, recorded ones count.

    \b
    Example:
      perdure prune runs/a --max-to-keep 3 --keep-period 1000 --dry-run
    """
    from perdure.checkpoint import retention as policies
    from perdure.checkpoint.address import open_run
    from perdure.store.garbage_collection import stopped
    from perdure.store.run_events import Dropped

    given = {name: value for name, value in rules.items() if value is not None}
    if max_to_keep is None and given:
        raise click.UsageError("without --max-to-keep every checkpoint stays; give it as well.")
    if "best_metric" not in given and given.keys() & {"best_mode", "best_to_keep"}:
        raise click.UsageError("--best-mode and --best-to-keep need --best-metric.")
    with open_run(run) as opened:
        if not dry_run:
            opened.begin_writing()
        recorded = None if given else policies.recorded_retention(opened)
        retention = policies.Retention(**given) if recorded is None else recorded.retention
        known = {name for row in opened.contents().readable.values() for name in row.metrics}
        if "best_metric" in given and given["best_metric"] not in known:
            raise ArgumentError(
                f"{run}: expected --best-metric to name a metric of a checkpoint, found "
                f"{given['best_metric']!r}; they have {few(sorted(known)) or 'none'}."
            )
        plan = policies.plan_prune(opened, max_to_keep, retention, rolled_back=rolled_back)
        lines = opened.log.view.journal.steps_aside() if rolled_back else []
        if not as_json:
            _print_plan(plan, lines)
        left = {} if dry_run else dict(opened.execute(plan.store, plan.view).left)
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
        say(*(f"not compacted  {pack}: {why}" for pack, why in left.items()))
        say("nothing was changed (--dry-run)" if dry_run else "done")
    return bool(left) or plan.store.is_frozen


def _print_plan(plan: policies.PrunePlan, lines: list[StepRange]) -> None:
    from perdure.store.format import PACKS, span_text

    if plan.verdicts:
        done = dict.fromkeys(plan.store.steps, "DELETE")
        rows = [
            (v.step, "keep" if v.keep else done.get(v.step, "held back"), v.reason)
            for v in plan.verdicts
        ]
        table(("step", "", "why"), rows)
        say("")
    store = plan.store
    say(
        *(f"delete   {name}" for name in store.quarantined),
        *(f"delete   lines of the journal, of {span_text(*span)}" for span in lines),
        *(f"delete   {PACKS}{name}" for name in store.packs),
        *(f"orphan   {PACKS}{name}" for name in store.orphans),
        *(f"compact  {PACKS}{name}" for name in store.compact),
    )
    if store.held_back:
        say(store.held_back if store.is_frozen else f"packs stay: {store.held_back}")
    going = len(store.steps) + len(store.quarantined)
    say(
        f"{counted(going, 'checkpoint')} to delete; {size_text(store.freed)} freed, "
        f"{size_text(store.copied)} copied, {counted(len(store.rewrite), 'manifest')} replaced"
    )


@cli.command("rollback", epilog=cli.EXIT_STATUS)
@cli.checkpoint_argument("run")
@click.option("--undo", is_flag=True, help="Bring back what rollbacks of RUN set aside.")
@cli.dry_run_option
def rollback(run: str, undo: bool, dry_run: bool, as_json: bool) -> None:
    """Make RUN@STEP the newest checkpoint of its run; newer ones are set aside.

    They move to quarantine, and later lines of the journal do not count any more. --undo brings both
    back as long as nothing else was saved since; `perdure prune RUN --rolled-back` removes them.

    \b
    Example:
      perdure rollback runs/a@1000
    """
    from perdure.checkpoint.address import find_run, open_checkpoint
    from perdure.store import Run
    from perdure.store.rollback import plan_undo

    address = find_run(run)
    if undo == (address.which is not None):
        raise click.UsageError("expected either RUN@STEP or RUN --undo.")
    step = None if undo else open_checkpoint(run).step
    with Run(address.given) as opened:
        replaced, gone = None, ()
        if step is None:
            if not dry_run:
                opened.begin_writing()  # it finishes what a crash has left
            plan = plan_undo(opened.storage, opened.log)
            returning, gone = plan.lines, plan.gone
            lines = None if returning is None else returning.steps
            replaced = None if returning is None else returning.replaced
            steps = opened.undo_rollback(dry_run=dry_run)
        else:
            lines = opened.log.view.journal.steps_after(step)
            steps = opened.rollback(step, dry_run=dry_run)
        newest = max(opened.steps(), default=None)
    if as_json:
        moved = "brought_back" if undo else "set_aside"
        result = {moved: steps, f"lines_{moved}": lines, "newest": newest}
        if undo:
            result |= {"lines_set_aside": replaced, "gone": gone}
        document({"executed": not dry_run, "run": opened.where, **result})
        return
    verb = "bring back" if undo else "set aside"
    from perdure.store.format import span_text

    say(*(f"{verb}  step {moved}" for moved in steps))
    say(*(f"not there   {name}, which does not return" for name in gone))
    for done, span in ((verb, lines), ("set aside", replaced)):
        if span is not None:
            say(f"{done}  lines of the journal, of {span_text(*span)}")
    if not steps and not lines:
        say("no rollback has set anything aside" if undo else f"step {step} is the newest already")
    if dry_run:
        say("nothing was changed (--dry-run)")
    elif steps or lines:
        say(f"the newest checkpoint is step {newest}")
        if not undo:
            say("`perdure rollback RUN --undo` brings them back")
