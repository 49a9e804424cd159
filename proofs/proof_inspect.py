"""Exports in the programs that they are for, and what the commands cost on a checkpoint of 2 GiB.

Each row prints what was compared: bits in `from_pretrained`, safetensors, TensorFlow and onnxruntime;
the accuracy of a mean of checkpoints; memory and seconds. Run by `make proof-inspect`, which needs an
environment of its own and about 12 GiB of disk; ARGS='hf models mean cost' picks rows.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROWS = {
    "hf": ("export_rows.py", "hf", None),
    "keras on tensorflow": ("export_rows.py", "models", "tensorflow"),
    "keras on jax": ("export_rows.py", "models", "jax"),
    "keras on torch": ("export_rows.py", "models", "torch"),
    "mean": ("export_rows.py", "mean", None),
    "cost": ("export_rows.py", "cost", None),
}


def main() -> int:
    failed = []
    for name, (program, row, backend) in ROWS.items():
        if sys.argv[1:] and row not in sys.argv[1:]:
            continue
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        if backend is not None:
            environment["KERAS_BACKEND"] = backend
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(HERE / program), row, folder]
            print(f"== {name}", flush=True)
            if subprocess.run(command, env=environment, check=False).returncode:
                failed.append(name)
    print(f"FAIL: {', '.join(failed)}" if failed else "PASS")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
