"""`report`: what a person wants to know about one run or several, as one HTML file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any
from uuid import uuid4

from perdure.checkpoint.address import Where, open_run
from perdure.errors import ArgumentError
from perdure.report.run_document import compare_runs, read_run

_Paths = Sequence[str | os.PathLike[str]]
_VERIFICATION = {"run", "good", "bad", "unread", "problems"}
_DRILL = {"command", "pass", "stopped", "restored", "undisturbed", "faults", "not_tested", "runs"}
"""What a report needs of the documents of `perdure verify` and `perdure drill`."""
_HEAD_BYTES = 8


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
    verifications = _verifications(verified, [run.where for run in opened])
    where = [Path(path) for path in logs]
    read = [
        read_run(run, logs=where, leaves=leaves, verified=verifications.get(run.where))
        for run in opened
    ]
    documents = [document for document, _ in read]
    comparison = compare_runs(documents, [each for _, each in read]) if len(read) > 1 else None
    found = [_document(Path(path), _DRILL, "drill") for path in drills]
    return RunReport({"runs": documents, "comparison": comparison, "drills": found})


def _verifications(paths: _Paths, runs: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """The documents of `perdure verify` by the run that they are of."""
    found: dict[str, Mapping[str, Any]] = {}
    files: dict[str, Path] = {}
    for path in map(Path, paths):
        document = _document(path, _VERIFICATION, "verify RUN")
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


def _document(path: Path, fields: set[str], command: str) -> dict[str, Any]:
    """The JSON document of a command, which must have `fields`."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        lacking = fields - dict(document).keys()
        if lacking:
            raise ValueError(f"there is no {min(lacking)!r}")
    except OSError as error:
        raise ArgumentError(f"{path}: cannot be read: {error}.") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(
            f"{path}: expected the document of `perdure {command} --json`, found something else: "
            f"{error}. Write it with: perdure {command} --json > {path.name}"
        ) from error
    return document


def write_output(path: Path, data: bytes) -> None:
    """Write `data` to `path`; an older file of the same kind is replaced in one step.

    A file that begins with other bytes is kept: ArgumentError. A pipe or a device is written to.
    """
    try:
        if os.path.lexists(path) and not path.is_file():
            with path.open("wb") as file:
                file.write(data)
            return
        target = Path(os.path.realpath(path))  # a link stays a link
        if target.is_file():
            with target.open("rb") as file:
                head = file.read(_HEAD_BYTES)
            if head not in (b"", data[:_HEAD_BYTES]):
                raise ArgumentError(
                    f"{path}: expected a new file, or an older file of this kind to replace; found a "
                    "file with other contents. Name another file, or remove that one."
                )
        _replace(target, data)
    except OSError as error:
        raise ArgumentError(
            f"{path}: cannot be written: {error}. Expected the path of a file in a directory that "
            "exists and can be written to."
        ) from error


def _replace(target: Path, data: bytes) -> None:
    temporary = target.with_name(f".{target.name[:40]}-{uuid4().hex[:8]}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            file.write(data)
        if target.exists():
            temporary.chmod(target.stat().st_mode & 0o7777)
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
