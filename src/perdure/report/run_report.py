"""`report`: what a person wants to know about one run or several, as one HTML file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from perdure.checkpoint.address import Where, open_run
from perdure.errors import ArgumentError
from perdure.report.output_file import write_output
from perdure.report.run_document import compare_runs, read_run

_Paths = Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class RunReport:
    """A report. A notebook shows its page.

    Attributes:
        document: What it says, in plain values, as `perdure report --json` prints it.
    """

    document: dict[str, Any]

    @cached_property
    def html(self) -> str:
        """The page, which needs no other file and makes no request.

        Raises `MissingExtraError` if Jinja2 or matplotlib is not installed.
        """
        from perdure.report.page import render_report

        return render_report(self.document)

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
        "drills": [_document(Path(path), _Drill, "drill") for path in drills],
    }
    return RunReport(document)


class _Problem(Struct):
    name: str
    what: str
    harmful: bool


class _Verification(Struct):
    """What a report needs of `perdure verify RUN --json`."""

    run: str
    good: list[int]
    bad: list[int]
    unread: list[int]
    problems: list[_Problem]


class _Drill(Struct):
    """What a report needs of `perdure drill --json`."""

    command: list[str]
    passed: bool = field(name="pass")
    stopped: bool
    restored: dict[str, Any]
    undisturbed: dict[str, Any]
    faults: dict[str, dict[str, int]]
    not_tested: dict[str, str]
    limits: list[str]
    runs: list[dict[str, Any]]


def _verifications(paths: _Paths, runs: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """The documents of `perdure verify` by the run that they are of."""
    found: dict[str, Mapping[str, Any]] = {}
    files: dict[str, Path] = {}
    for path in map(Path, paths):
        document = _document(path, _Verification, "verify RUN")
        run = document["run"]
        if run not in runs:
            raise ArgumentError(
                f"{path}: expected a document of `perdure verify` of one of {', '.join(runs)}, "
                f"found one of {run}."
            )
        if run in found:
            raise ArgumentError(
                f"{path}: expected one document of `perdure verify` for each run at most, and "
                f"{files[run]} is also of {run}. Name the newer one alone."
            )
        found[run], files[run] = document, path
    return found


def _document(path: Path, fields: type[Struct], command: str) -> dict[str, Any]:
    """The JSON document of a command, which must have `fields`."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        msgspec.convert(document, fields)
    except OSError as error:
        raise ArgumentError(f"{path}: cannot be read: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise ArgumentError(
            f"{path}: expected the document of `perdure {command} --json`, found something else: "
            f"{error}. Write it with: perdure {command} --json > {path.name}"
        ) from error
    return document
