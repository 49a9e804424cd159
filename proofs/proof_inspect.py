"""Exports in the programs that they are for, and what the commands cost on a checkpoint of 2 GiB.

Each row prints what was compared: bits in `from_pretrained` and safetensors, the accuracy of a mean of
checkpoints, memory and seconds. Run by `make proof-inspect`, which needs an environment of its own and
about 12 GiB of disk; ARGS='hf mean cost' picks rows.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROWS = ("hf", "mean", "cost")


def main() -> int:
    failed = []
    for row in ROWS:
        if sys.argv[1:] and row not in sys.argv[1:]:
            continue
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(HERE / "export_rows.py"), row, folder]
            print(f"== {row}", flush=True)
            if subprocess.run(command, env=environment, check=False).returncode:
                failed.append(row)
    print(f"FAIL: {', '.join(failed)}" if failed else "PASS")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
