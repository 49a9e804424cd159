"""The recipe's fields `instruction_set` and `settings`: what of the machine can change bits.

Nothing in them depends on the number of devices, processes or hosts.
"""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Mapping
from pathlib import Path

# Libraries choose their kernels by these: lengths of vectors, fused multiply-add, short formats.
_X86 = (
    "avx avx2 avx512_bf16 avx512_fp16 avx512_vnni avx512bw avx512cd avx512dq avx512f avx512vl "
    "avx_vnni amx_bf16 amx_fp16 amx_int8 amx_tile f16c fma fma4 sse4_1 sse4_2"
)
_ARM = "asimd asimddp asimdfhm asimdhp bf16 fphp i8mm sve sve2 svebf16 svei8mm sme sme2"
_KNOWN = frozenset((_X86 + " " + _ARM).split())

# Variables by which libraries are told which kernels to take.
_SETTINGS = {
    "cpu": (
        "ATEN_CPU_CAPABILITY",
        "DNNL_DEFAULT_FPMATH_MODE",
        "DNNL_MAX_CPU_ISA",
        "MKL_CBWR",
        "MKL_ENABLE_INSTRUCTIONS",
        "ONEDNN_DEFAULT_FPMATH_MODE",
        "ONEDNN_MAX_CPU_ISA",
    ),
    "gpu": ("CUBLASLT_WORKSPACE_SIZE", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE"),
}
# Flags of XLA that say how many devices there are, or what is written about the compilation.
_NO_MATTER = ("--xla_force_host_platform_device_count", "--xla_dump", "--xla_hlo_")


def instruction_set(cpuinfo: str | None = None, machine: str | None = None) -> str:
    """`x86_64 AuthenticAMD: avx avx2 f16c fma`: architecture, vendor, and what kernels are chosen by.

    The vendor, because MKL looks at it. `cpuinfo` is the text of Linux' /proc/cpuinfo; where there is
    none, the architecture is all that is told.
    """
    if cpuinfo is None:
        path = Path("/proc/cpuinfo")
        cpuinfo = path.read_text(errors="replace") if path.exists() else ""
    first: dict[str, str] = {}
    for line in cpuinfo.split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        first[name.strip().lower()] = value.strip()
    vendor = first.get("vendor_id") or first.get("cpu implementer") or ""
    flags = (first.get("flags") or first.get("features") or "").split()
    found = " ".join(sorted(_KNOWN.intersection(flags)))
    name = f"{machine or platform.machine()} {vendor}".strip()
    return f"{name}: {found}" if found else name


def settings(kind: str, environ: Mapping[str, str] | None = None) -> str:
    """`MKL_CBWR=AVX2 XLA_FLAGS=--xla_cpu_enable_fast_math=true`; empty where nothing is set.

    `kind` is "cpu" or "gpu": what counts for the other kind alone is left out.
    """
    environ = os.environ if environ is None else environ
    found = [f"{name}={environ[name]}" for name in _SETTINGS[kind] if environ.get(name)]
    flags = xla_flags(environ)
    other = "--xla_gpu_" if kind == "cpu" else "--xla_cpu_"
    kept = sorted(
        f"{flag}={value}" if value else flag
        for flag, value in flags.items()
        if not flag.startswith((*_NO_MATTER, other))
    )
    if kept:
        found.append(f"XLA_FLAGS={' '.join(kept)}")
    return " ".join(found)


def xla_flags(environ: Mapping[str, str]) -> dict[str, str]:
    """The flags in XLA_FLAGS and their values; the last of several counts."""
    flags: dict[str, str] = {}
    for word in shlex.split(environ.get("XLA_FLAGS", "")):
        flag, _, value = word.partition("=")
        flags[flag] = value
    return flags
