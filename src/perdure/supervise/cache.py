"""Where JAX keeps compiled programs between the attempts of a run.

Invariant: the default is used only on CPUs, where it was shown not to change bits
(proofs/supervise_rows.py). Each kind of CPU has a directory of its own, because the key of JAX does not
distinguish all instruction sets.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


def default_cache(environ: Mapping[str, str] | None = None) -> Path | None:
    """A directory of this user for this kind of CPU.

    Returns None if the environment names a directory already, if accelerators could be used, or if the
    directory could not be written.
    """
    environ = os.environ if environ is None else environ
    if "JAX_COMPILATION_CACHE_DIR" in environ:
        return None
    platforms = environ.get("JAX_PLATFORMS")
    if platforms != "cpu" and (platforms or _accelerated()):
        return None
    home = environ.get("XDG_CACHE_HOME")
    base = Path(home) if home else Path(environ.get("HOME", "/nonexistent")) / ".cache"
    if not os.access(_existing(base), os.W_OK):
        return None
    return base / "perdure" / f"xla-{_cpu()}"


def cache_variables(directory: Path) -> dict[str, str]:
    """Variables that make every process of a group keep every compiled program in `directory`."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(directory),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PERDURE_SHARED_CACHE": "1",
    }


def drop_recent(directory: Path, seconds: float = 0.5) -> None:
    """Remove the entries of the last `seconds`, after a worker was killed.

    JAX writes entries in place and never replaces one, so an entry that was cut off would stay, fail
    its checksum at every start, and be compiled again each time. Only files named as JAX names them are
    removed; a file that cannot be removed stays.
    """
    since = time.time() - seconds
    with suppress(OSError):
        for entry in os.scandir(directory):
            with suppress(OSError):
                is_cache = entry.name.endswith(("-cache", "-atime")) and entry.is_file()
                if is_cache and entry.stat().st_mtime >= since:
                    os.unlink(entry.path)


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
