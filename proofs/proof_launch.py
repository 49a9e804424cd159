"""`make proof-launch`: Ray Train and submitit bring a job back with the same bits (launch_rows.py)."""

from __future__ import annotations

import tempfile
from pathlib import Path

from launch_rows import rows
from report import finish

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        finish("launch", rows(Path(work)))
