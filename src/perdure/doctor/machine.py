"""What the machine gives to a process, and what its file system does with the operations of a save.

Invariant: everything happens in a directory of its own, which is removed; the run directory is not
changed.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from perdure.doctor import Check
from perdure.runtime.environment import VARIABLES, cores, instruction_set
from perdure.runtime.memory_limit import MemoryLimit
from perdure.store.file_lock import acquire
from perdure.store.local import absolute_path

CGROUPS = Path("/sys/fs/cgroup")
MOUNTS = Path("/proc/self/mounts")

_ALWAYS = (
    "XLA_FLAGS",
    "PJRT_NPROC",
    "OMP_NUM_THREADS",
    "CUBLAS_WORKSPACE_CONFIG",
    "TORCHINDUCTOR_DETERMINISTIC",
)
_IF_SET = (
    *VARIABLES["cpu"],
    *VARIABLES["gpu"],
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_ENABLE_X64",
    "JAX_NUM_CPU_DEVICES",
    "JAX_PLATFORMS",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "OPENBLAS_NUM_THREADS",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
_PACKAGES = ("perdure", "numpy", "jax", "jaxlib", "torch", "keras", "optax", "flax")


def describe_machine() -> dict[str, str]:
    """Processor, cores, memory, versions and variables, by name."""
    usable = f"{cores()} of {os.cpu_count()}"
    if (limit := cpu_limit()) is not None:
        usable += f", the cgroup allows the time of {limit:g}"
    found = {
        "processor": instruction_set(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": usable,
        "memory": _memory(),
        "versions": ", ".join([f"python {platform.python_version()}", *_versions()]),
    }
    found |= {name: os.environ.get(name, "not set") for name in _ALWAYS}
    return found | {name: os.environ[name] for name in _IF_SET if name in os.environ}


def cpu_limit(root: Path = CGROUPS) -> float | None:
    """How many cores' time the cgroup of this process gets; None for no limit, or an unknown one."""
    with suppress(OSError, ValueError):
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (
            int((root / "cpu" / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period")
        )
        return None if quota < 0 else quota / period
    return None


def _memory() -> str:
    if not hasattr(os, "sysconf"):  # Windows
        return "unknown"
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = MemoryLimit(os.getpid()).limit()
    text = f"{total / 2**30:.1f} GiB"
    return text if limit is None else f"{text}, the cgroup allows {limit / 2**30:.1f} GiB"


def _versions() -> list[str]:
    versions = []
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    return versions


# ---------------------------------------------------------------- the file system of a run directory


def check_file_system(run: str) -> list[Check]:
    """Try the operations of a save where `run` is, or would be made."""
    if "://" in run:
        text = "an object store: `perdure verify` reads what is there; nothing is tried"
        return [Check("place", True, text)]
    place = Path(absolute_path(run))
    while not os.path.isdir(place) and place != place.parent:
        if os.path.lexists(place):
            return [Check("place", False, f"{place} is no directory")]
        place = place.parent
    free = shutil.disk_usage(place).free
    found = [
        Check("place", True, f"{place} ({_type_of(place)})"),
        Check("free space", free > 0, f"{free / 2**30:.1f} GiB"),
    ]
    try:
        directory = tempfile.mkdtemp(prefix=".perdure-doctor-", dir=place)
    except OSError as error:
        return [*found, Check("new files", False, f"{error}")]
    try:
        return found + [_tried(name, try_it, Path(directory)) for name, try_it in _TRIALS.items()]
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _tried(name: str, trial: Callable[[Path], tuple[bool, str]], place: Path) -> Check:
    try:
        return Check(name, *trial(place))
    except OSError as error:
        return Check(name, False, f"{error}")


def _fsync(place: Path) -> tuple[bool, str]:
    for path, flags in ((place / "file", os.O_WRONLY | os.O_CREAT), (place, os.O_RDONLY)):
        fd = os.open(path, flags, 0o600)
        try:
            if path != place:
                os.write(fd, b"perdure")
            os.fsync(fd)
        finally:
            os.close(fd)
    return True, "of a file and of its directory"


def _link(place: Path) -> tuple[bool, str]:
    one, other = place / "one", place / "other"
    one.write_bytes(b"1")
    try:
        os.link(one, other)
    except OSError as error:
        # The store renames instead; two writers are then kept apart by the lock alone.
        return True, f"not there ({error.strerror}); files are renamed, and a fork copies its packs"
    try:
        os.link(one, other)
    except FileExistsError:
        return True, "a name that is taken stays"
    return False, "expected a refusal to give a name twice, found none: a commit could be replaced"


def _lock(place: Path) -> tuple[bool, str]:
    path = str(place / "lock")
    held = acquire(path, b"perdure doctor")
    try:
        acquire(path, b"another").release()
    except BlockingIOError:
        return True, "a second writer is refused"
    finally:
        held.release()
    return False, "expected a second writer to be refused, found none: two may write at once"


_TRIALS: dict[str, Callable[[Path], tuple[bool, str]]] = {
    "fsync": _fsync,
    "hard links": _link,
    "lock": _lock,
}


def _type_of(place: Path) -> str:
    """The type of the file system, as the kernel's table of mounts has it."""
    best, kind = "", "unknown type"
    try:
        lines = MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return kind
    text = os.path.realpath(place).rstrip("/") + "/"
    for line in lines:
        _, mount, found, *_ = line.split(" ")
        mount = mount.replace("\\040", " ").rstrip("/") + "/"
        if text.startswith(mount) and len(mount) >= len(best):
            best, kind = mount, found
    return kind
