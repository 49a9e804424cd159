"""The last line of a test that wrote to a run directory."""

from __future__ import annotations

import os

from perdure.store import Run, Storage, VerifyReport, verify_run


def check_run(where: str | os.PathLike[str] | Storage) -> VerifyReport:
    """Read and hash a whole run directory; returns the report.

    Raises `AssertionError` with every harmful problem: a manifest or a pack that is damaged or
    missing. What a crash leaves and harms nobody is in the report only.
    """
    report = verify_run(Run(where))
    harmful = [f"  {at.name}: {at.what}" for at in report.problems if at.harmful]
    if harmful:
        lines = "\n".join(harmful)
        raise AssertionError(f"{report.where}: expected a whole run directory, found:\n{lines}")
    return report
