"""`report`: what a person wants to know about one run or several, as one HTML file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from perdure.checkpoint.address import Where, open_run
from perdure.errors import ArgumentError
from perdure.report.output_file import write_output
from perdure.report.report_page import render_report
from perdure.report.run_comparison import compare_runs
from perdure.report.run_document import read_run

_Paths = Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class RunReport:
    """A report. A notebook shows its page.

    Attributes:
        document: What it says, in plain values, as `perdure report --json` prints it.
        html: Its page, which needs no other file and makes no request.
    """

    document: dict[str, Any]
    html: str

    @property
    def ok(self) -> bool:
        """Whether every checkpoint of every run is whole, as far as this report has read."""
        rows = [row for run in self.document["runs"] for row in run["checkpoints"]]
        return not any(row["state"] or row["verified"] == "bad" for row in rows)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page; an older page there is replaced.

        Raises `ArgumentError` if `path` cannot be written, or holds something else than a page.
        """
        write_output(Path(path), self.html.encode())

    def _repr_html_(self) -> str:
        # A frame, so that the style sheet does not change the notebook.
        style = "width:100%;height:45rem;border:0"
        return f'<iframe sandbox srcdoc="{escape(self.html)}" style="{style}"></iframe>'


def report(
    *runs: Where,
    logs: _Paths = (),
    drills: _Paths = (),
    verified: _Paths = (),
    leaves: str | Iterable[str] | None = None,
) -> RunReport:
    """What runs are, how they went, and what they hold; several are compared.

    Nothing is changed. Damage is reported and raises nothing.

    Args:
        runs: Run directories.
        logs: Log directories of `perdure run`, or records. A run takes the one in whose attempts its
            checkpoints were saved. If none is given, `perdure-logs` is looked for in the run directory,
            in the two directories above it, and in the working directory.
        drills: Files with documents of `perdure drill --json`.
        verified: Files with documents of `perdure verify RUN --json`, one for each run at most.
        leaves: The leaves whose changes are shown, as for `restore(leaves=...)`; all by default.

    Raises:
        NotARunError: A run directory or a record is not there.
        ArgumentError: No run is named, one of the files is not such a document, two documents of
            `verify` are of one run, or `leaves` selects nothing.
        UnreachableError: A run directory cannot be listed.
    """
    if not runs:
        raise ArgumentError("report: expected a run directory, found none.")
    opened = [open_run(where) for where in runs]
    documents = _verifications(verified, [run.where for run in opened])
    read = [
        read_run(
            run, logs=[Path(p) for p in logs], leaves=leaves, verified=documents.get(run.where)
        )
        for run in opened
    ]
    document = {
        "runs": [run.document for run in read],
        "comparison": compare_runs(read) if len(read) > 1 else None,
        "drills": [_drill(Path(path)) for path in drills],
    }
    return RunReport(document, render_report(document))


def _verifications(paths: _Paths, runs: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """The documents of `perdure verify` by the run that they are of."""
    found: dict[str, Mapping[str, Any]] = {}
    files: dict[str, Path] = {}
    for path in map(Path, paths):
        document = _json(path)
        problems = document.get("problems")
        is_whole = all(
            isinstance(document.get(name), list)
            and all(type(step) is int for step in document[name])
            for name in ("good", "bad", "unread")
        )
        if not is_whole or not isinstance(problems, list) or not all(map(_is_problem, problems)):
            raise _no_document(path, "verify RUN")
        if document.get("where") not in runs:
            raise ArgumentError(
                f"{path}: expected a document of `perdure verify` of one of {', '.join(runs)}, "
                f"found one of {document.get('where')}."
            )
        where = document["where"]
        if where in found:
            raise ArgumentError(
                f"{path}: expected one document of `perdure verify` for each run at most, and "
                f"{files[where]} is also of {where}. Name the newer one alone."
            )
        found[where], files[where] = document, path
    return found


def _is_problem(problem: object) -> bool:
    return isinstance(problem, dict) and problem.keys() >= {"name", "what", "harmful"}


def _drill(path: Path) -> Mapping[str, Any]:
    from perdure.report.drill_page import drill_section  # it imports the drill

    document = _json(path)
    try:
        drill_section(document)
    # Whatever a value of another type leads to.
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        raise _no_document(path, "drill") from None
    return document


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"{path}: cannot be read: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise ArgumentError(
            f"{path}: expected a JSON document, found something else: {error}"
        ) from error
    if not isinstance(document, dict):
        raise ArgumentError(f"{path}: expected a JSON object, found {type(document).__name__}.")
    return document


def _no_document(path: Path, command: str) -> ArgumentError:
    return ArgumentError(
        f"{path}: expected the document of `perdure {command} --json`; a field of it is missing or has "
        f"another type. Write it with: perdure {command} --json > {path.name}."
    )
