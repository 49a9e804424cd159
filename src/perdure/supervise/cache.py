"""Where JAX keeps compiled programs between the lives of a run.

Invariant: used by itself only where it is shown not to change bits (proofs/supervise_rows.py), which is
on CPUs. What was compiled for other instructions lies in another directory: JAX's own key does not tell
all of them apart.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from pathlib import Path


def default_cache(environ: Mapping[str, str] | None = None) -> Path | None:
    """A directory of this user for this kind of CPU; None where the environment names one already, or
    where accelerators could be used."""
    environ = os.environ if environ is None else environ
    if "JAX_COMPILATION_CACHE_DIR" in environ:
        return None
    on_cpu = environ.get("JAX_PLATFORMS") == "cpu" or not _accelerated()
    if not on_cpu:
        return None
    home = environ.get("XDG_CACHE_HOME")
    base = Path(home) if home else Path(environ.get("HOME", "/nonexistent")) / ".cache"
    if not os.access(_existing(base), os.W_OK):
        return None
    return base / "perdure" / f"xla-{_cpu()}"


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _accelerated() -> bool:
    return any(name.startswith(("nvidia", "kfd", "accel")) for name in os.listdir("/dev"))


def _cpu() -> str:
    text = platform.machine()
    path = Path("/proc/cpuinfo")
    if path.exists():
        lines = path.read_text(errors="replace").split("\n\n")[0].splitlines()
        wanted = ("vendor_id", "model name", "flags", "features", "cpu implementer", "cpu part")
        text += "".join(line for line in lines if line.lower().startswith(wanted))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
