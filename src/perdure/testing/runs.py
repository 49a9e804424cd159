"""`check_run`: the last line of a test that wrote to a run directory."""

from __future__ import annotations

import os

from perdure.store import Run, Storage, VerifyReport, verify_run


def check_run(where: str | os.PathLike[str] | Storage) -> VerifyReport:
    """Read and hash every byte of a run directory.

    Args:
        where: The path, URL or storage of the run directory.

    Returns:
        The report; harmless leftovers of a crash appear only there.

    Raises:
        AssertionError: If a manifest or a pack is damaged or missing; it lists all of them.
    """
    report = verify_run(Run(where))
    harmful = [
        f"  {problem.name}: {problem.what}" for problem in report.problems if problem.harmful
    ]
    if harmful:
        lines = "\n".join(harmful)
        raise AssertionError(f"{report.where}: expected a whole run directory, found:\n{lines}")
    return report
