"""What the machine gives to a process, and the variables that decide which bits libraries compute."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from perdure.runtime.environment import instruction_set
from perdure.runtime.memory_limit import MemoryLimit

CGROUPS = Path("/sys/fs/cgroup")

_ALWAYS = (
    "XLA_FLAGS",
    "PJRT_NPROC",
    "OMP_NUM_THREADS",
    "CUBLAS_WORKSPACE_CONFIG",
    "TORCHINDUCTOR_DETERMINISTIC",
)
_IF_SET = (
    "ATEN_CPU_CAPABILITY",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_ENABLE_X64",
    "JAX_NUM_CPU_DEVICES",
    "JAX_PLATFORMS",
    "MKL_CBWR",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_NUM_THREADS",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
_PACKAGES = ("perdure", "numpy", "jax", "jaxlib", "torch", "keras", "optax", "flax")


def describe_machine() -> dict[str, str]:
    """Processor, cores, memory, versions and variables, by name."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores, limit = f"{usable} of {os.cpu_count()}", cpu_limit()
    if limit is not None:
        cores += f", the cgroup allows the time of {limit:g}"
    found = {
        "processor": instruction_set(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": cores,
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
