"""The report of a drill in a terminal: one line for each run, then the table and the causes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from perdure.drill.drill_report import DrillRow
from perdure.text import counted, few

_STYLE = {"pass": "green", "differs": "bold red", "failed": "bold red", "not fired": "yellow"}
_MOST_LEAVES = 8
_MOST_STEPS = 12


class TextReporter:
    """Prints to `console`; a quiet console prints nothing."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._done = 0

    def progress(self, what: str, row: DrillRow | None) -> None:
        """Print what begins now, or a faulted run that is over.

        The first number of a line counts the runs that are over, with the restores that every drill
        tries.
        """
        if row is None:
            self._console.print(f"[dim]{escape(what)} ...[/dim]")
            return
        self._done += 1
        fired = describe_fired(row.outcome.fired, row.scenario.faults)
        style = _STYLE[row.verdict]
        self._console.print(
            f"{self._done:>4} [{style}]{row.verdict:<9}[/{style}] {what:<20} "
            f"{escape(fired)}{escape(_restored(row))}"
        )

    def summary(self, document: Mapping[str, Any]) -> None:
        """Print the table of faults, the differences with their causes, and the verdict."""
        console = self._console
        if document["runs"]:
            console.print(_table(document))
        for kind, why in sorted(document["not_tested"].items()):
            console.print(f"[dim]not tested: {kind}: {escape(why.splitlines()[0])}[/dim]")
        for limit in document["limits"]:
            console.print(f"[dim]limit: {escape(limit)}[/dim]")
        plain = document["undisturbed"]
        if plain["difference"]:
            console.print("[bold red]two undisturbed runs differ[/bold red]")
            _explain(console, plain)
        explained: set[str] = set()
        for run in document["runs"]:
            diagnosis = run["diagnosis"]
            if run["verdict"] in ("differs", "failed") and (
                diagnosis is None or str(diagnosis) not in explained
            ):
                explained.add(str(diagnosis))
                fired = escape(describe_fired(run["fired"], run["faults"]))
                console.print(f"[bold red]run {run['number']}[/bold red] ({fired})")
                if (run["diagnosis"] or {}).get("cause") == "not looked for":
                    console.print(f"  {escape(run['diagnosis']['what'])}")
                else:
                    _explain(console, run)
        console.print(verdict(document))


def _restored(row: DrillRow) -> str:
    steps = row.outcome.restored_steps
    return f"; restored step {', '.join(map(str, steps))}" if steps else ""


def describe_fired(fired: Sequence[str], faults: int) -> str:
    """The faults that fired in a run, and how many were planned if some did not."""
    text = "; ".join(fired) or "nothing fired"
    return text if len(fired) >= faults else f"{text} ({len(fired)} of {faults} planned)"


def verdict(document: Mapping[str, Any]) -> str:
    """The verdict of a report in one line."""
    runs = document["runs"]
    good = sum(run["verdict"] == "pass" for run in runs)
    if document["stopped"]:
        so_far = f"{good} of {counted(len(runs), 'faulted run')} so far end with the same bits"
        return f"STOPPED: the drill is not over; {so_far}"
    if document["pass"]:
        fired = sum(len(run["fired"]) for run in runs)
        end = (document["undisturbed"]["fingerprint"] or "")[:16]
        exports = document["exports"]
        also = f", and {few(exports)} the same bytes" if exports else ""
        kinds = "{} of {} kinds".format(*document["tried"]["kinds"])
        return (
            f"PASS: {counted(good, 'faulted run')}, {counted(fired, 'fault')} of {kinds} fired, "
            f"{restored_text(document)}; every checkpoint and every end has the "
            f"fingerprint of the undisturbed run ({end}){also}. Not looked at: "
            f"{'; '.join(document['not_looked_at'])}"
        )
    if document["undisturbed"]["difference"]:
        return "FAIL: two runs without any fault end with different bits"
    if not document["restored"]["runs"] and good == len(runs):
        return (
            f"FAIL: {restored_text(document)}: in no run did the program continue from a checkpoint "
            f"above step 0 and do another step, so nothing is proved. Save before the last step "
            f"(save_interval_steps)."
        )
    silent = sum(not run["all_fired"] for run in runs)
    unfired = f", {silent} whose faults did not all fire" if silent else ""
    return (
        f"FAIL: {good} of {counted(len(runs), 'faulted run')} end with the same bits{unfired}; "
        f"{restored_text(document)}"
    )


def restored_text(document: Mapping[str, Any]) -> str:
    """In how many runs a checkpoint was restored, from which of them, and in which phases."""
    restored, tried = document["restored"], document["tried"]
    runs = f"restored in {restored['runs']} of {counted(restored['of'], 'run')}"
    if not restored["steps"]:
        return runs
    phases = " in {} of {} phases".format(*tried["phases"]) if tried["phases"][1] > 1 else ""
    steps = few(restored["steps"], _MOST_STEPS)
    return f"{runs}, from {{}} of {{}} checkpoints{phases}: steps {steps}".format(
        *tried["checkpoints"]
    )


def _table(document: Mapping[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("fault", no_wrap=True)
    for column in ("runs", "fired", "restored", "same bits", "attempts", "repeated", "lost s"):
        table.add_column(column, justify="right", no_wrap=True)
    for kind, counts in sorted(document["faults"].items()):
        runs = [run for run in document["runs"] if run["kind"] == kind]
        table.add_row(
            kind,
            str(counts["runs"]),
            str(counts["fired"]),
            str(counts["restored"]),
            str(counts["pass"]),
            str(sum(len(run["attempts"]) for run in runs)),
            str(sum(run["repeated_steps"] for run in runs)),
            f"{sum(run['lost_seconds'] for run in runs):.1f}",
        )
    return table


def _explain(console: Console, result: Mapping[str, Any]) -> None:
    """Print the first difference, its cause and the evidence."""
    if difference := result["difference"]:
        console.print(f"  first difference: {escape(difference['what'])}")
        for leaf in difference["leaves"][:_MOST_LEAVES]:
            console.print(
                f"    {escape(leaf['path'])}: expected {escape(leaf['expected'] or 'no such leaf')}, "
                f"found {escape(leaf['found'] or 'no such leaf')}"
            )
        if (more := len(difference["leaves"]) - _MOST_LEAVES) > 0:
            console.print(f"    and {more} more")
    if result.get("problem"):
        console.print(f"  {escape(result['problem'])}")
        for line in result["log"].splitlines():
            console.print(f"    [dim]{escape(line)}[/dim]")
    if diagnosis := result["diagnosis"]:
        console.print(f"  [bold]cause: {escape(diagnosis['what'])}[/bold] ({diagnosis['cause']})")
        for line in diagnosis["evidence"]:
            console.print(f"    - {escape(line)}")
        console.print(f"  to repair it: {escape(diagnosis['advice'])}")
