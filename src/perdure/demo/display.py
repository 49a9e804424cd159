"""The terminal output of the demo: a progress bar for each phase, a table, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

COLUMNS = ("phase", "topology", "steps", "ended", "resumed", "repeated", "fingerprint")


class DemoReporter:
    """Prints to `console`; a quiet console prints nothing."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total

    @contextmanager
    def phase(self, title: str) -> Iterator[Any]:
        """Show a progress bar for one phase; yields the function that moves it to a step."""
        columns = (
            TextColumn("{task.description:<28}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task(title, total=self._total, note="starting")
            yield lambda step, note="": progress.update(task, completed=step, note=note)

    def table(self, document: Mapping[str, Any]) -> None:
        """Print the phases as a table, then the verdict."""
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for column in COLUMNS:
            numeric = column in ("resumed", "repeated")
            table.add_column(column, justify="right" if numeric else "left", no_wrap=True)
        for phase in document["phases"]:
            table.add_row(
                phase["phase"],
                phase["topology"],
                f"{phase['from']}-{phase['to']}",
                phase["ended"],
                "-" if phase["resumed_from"] is None else str(phase["resumed_from"]),
                str(phase["repeated"]),
                (phase["fingerprint"] or "-")[:12],
            )
        self._console.print(table)
        first, last = document["accuracy"]
        self._console.print(
            f"test accuracy {first:.2%} uninterrupted, {last:.2%} with faults, on "
            f"{document['test_examples']} digits; seed {document['seed']}"
        )
        if document["without"]:
            self._console.print(f"guard removed: {document['without']}")
        self._console.print(
            f"[bold]{'PASS' if document['pass'] else 'FAIL'}[/bold]: the final fingerprints are "
            f"{'equal' if document['pass'] else 'different'}"
        )
