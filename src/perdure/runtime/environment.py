"""The versions and settings that can change bits, for recipes. Changes nothing, imports no
framework.

Nothing in it depends on the number of devices, processes or hosts. PyTorch has two families of
settings for the precision of float32 (`set_float32_matmul_precision`, `allow_tf32`, and
`fp32_precision` of each backend). Both are read: the older names raise once the newer ones were
used.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

Settings = dict[str, str | int | float | bool]

JAX_THREADS = "PJRT_NPROC"
"""Variable with the size of XLA's thread pool on CPU."""

XLA_DETERMINISTIC = "--xla_gpu_deterministic_ops"
"""Without this flag XLA uses atomic additions on a GPU, and kernels that it chooses by their speed."""

# Libraries choose their kernels by these: lengths of vectors, fused multiply-add, short formats.
_X86 = (
    "avx avx2 avx512_bf16 avx512_fp16 avx512_vnni avx512bw avx512cd avx512dq avx512f avx512vl "
    "avx_vnni amx_bf16 amx_fp16 amx_int8 amx_tile f16c fma fma4 sse4_1 sse4_2"
)
_ARM = "asimd asimddp asimdfhm asimdhp bf16 fphp i8mm sve sve2 svebf16 svei8mm sme sme2"
_KNOWN = frozenset((_X86 + " " + _ARM).split())

# Variables by which libraries are told which kernels to take.
VARIABLES = {
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

# Settings of JAX that can change bits, and that hardly a program changes, with their defaults.
_JAX_DEFAULTS = {
    "jax_default_prng_impl": "threefry2x32",
    "jax_random_seed_offset": 0,
    "jax_disable_jit": False,
    "jax_disable_most_optimizations": False,
    "jax_softmax_custom_jvp": True,
    "jax_numpy_dtype_promotion": "standard",
    "jax_enable_custom_prng": False,
}
# Operations of PyTorch whose precision can be set, by type of device.
_TORCH_OPERATIONS = {
    "cpu": ("mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn"),
    "cuda": ("cuda.matmul", "cudnn.conv", "cudnn.rnn"),
}
# The names of PyTorch's older interface.
_TORCH_OLDER = {"none": "highest", "ieee": "highest", "tf32": "high", "bf16": "medium"}


def jax_settings(device: Any, threads: int | str, deterministic: bool) -> Settings:
    """The fields of a recipe for computing with JAX on `device`.

    `threads` and `deterministic` say what is known of the CPU's thread pool and
    `XLA_DETERMINISTIC`.
    """
    jax = sys.modules["jax"]
    config: Any = jax.config
    on_cpu = device.platform == "cpu"
    found = {name: getattr(config, name, usual) for name, usual in _JAX_DEFAULTS.items()}
    changed = [f"{name}={value}" for name, value in found.items() if value != _JAX_DEFAULTS[name]]
    backend = "" if on_cpu else f", {' '.join(device.client.platform_version.split())}"
    return {
        "engine": "jax",
        "engine_version": f"jax {jax.__version__}, jaxlib {metadata.version('jaxlib')}{backend}",
        "platform": device.platform,
        "instruction_set": instruction_set() if on_cpu else device.device_kind,
        "settings": " ".join(filter(None, [variables("cpu" if on_cpu else "gpu"), *changed])),
        "deterministic": deterministic,
        "threads": threads,
        "x64": bool(config.jax_enable_x64),
        "matmul_precision": str(config.jax_default_matmul_precision),
        "threefry_partitionable": bool(config.jax_threefry_partitionable),
    }


def torch_settings(device: Any) -> Settings:
    """The fields of a recipe for computing with PyTorch on `device` (a `torch.device`)."""
    torch = sys.modules["torch"]
    on_gpu = device.type == "cuda"
    gpu: Settings = {"cudnn_tf32": torch_cudnn_tf32()} if on_gpu else {}
    libraries = ""  # those that compute on a GPU: one release of PyTorch is built for several
    if on_gpu:
        cuda = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        libraries = f", ROCm {torch.version.hip}" if torch.version.hip else f", {cuda}"
    other = [variables("gpu" if on_gpu else "cpu"), torch_other_precisions(device.type)]
    return {
        **gpu,
        "engine": "torch",
        "engine_version": f"torch {torch.__version__}{libraries}",
        "platform": device.type,
        "instruction_set": torch.cuda.get_device_name(device) if on_gpu else instruction_set(),
        "settings": " ".join(filter(None, other)),
        "threads": torch.get_num_threads(),
        "deterministic": not torch_not_deterministic(device.type),
        "mkldnn": bool(torch.backends.mkldnn.enabled),
        "matmul_precision": torch_matmul_precision(device.type),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
    }


def tensorflow_settings() -> Settings:
    """The fields of a recipe for computing with TensorFlow."""
    tf: Any = sys.modules["tensorflow"]
    gpus = tf.config.list_physical_devices("GPU")
    gpu_details = tf.config.experimental.get_device_details(gpus[0]) if gpus else {}
    one_dnn = os.environ.get("TF_ENABLE_ONEDNN_OPTS")
    flags = [f"TF_ENABLE_ONEDNN_OPTS={one_dnn}"] if one_dnn else []
    return {
        "engine": "tensorflow",
        "engine_version": f"tensorflow {tf.__version__}",
        "platform": "gpu" if gpus else "cpu",
        "instruction_set": gpu_details.get("device_name", "gpu") if gpus else instruction_set(),
        "settings": " ".join([*flags, *filter(None, [variables("gpu" if gpus else "cpu")])]),
        "threads": tf.config.threading.get_intra_op_parallelism_threads() or unpinned(),
        "tf32": bool(tf.config.experimental.tensor_float_32_execution_enabled()),
    }


def present_jax_settings() -> Settings:
    """`jax_settings` of the first device of a backend that has started, as the program has set it."""
    device = sys.modules["jax"].local_devices()[0]
    value = xla_flags(os.environ).get(XLA_DETERMINISTIC, "false").lower()
    threads = os.environ.get(JAX_THREADS, "")
    pool = int(threads) if threads.isdigit() else unpinned()
    return jax_settings(device, pool, value in ("", "1", "true") or device.platform == "cpu")


def process_settings() -> Settings:
    """What the frameworks that this process has imported say: `torch.threads`, `jax.x64`, ..."""
    found: dict[str, Settings] = {}
    if jax_backend_started():
        found["jax"] = present_jax_settings()
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "get_num_threads"):  # else its import is under way
        device = "cuda" if torch.cuda.is_initialized() else "cpu"
        found["torch"] = torch_settings(torch.device(device))
    if hasattr(sys.modules.get("tensorflow"), "config"):
        found["tensorflow"] = tensorflow_settings()
    return {
        f"{engine}.{name}": value
        for engine, settings in found.items()
        for name, value in settings.items()
        if name != "engine"
    }


def jax_backend_started() -> bool:
    """Whether JAX has started a backend; False without JAX. True if this JAX cannot tell."""
    if not hasattr(sys.modules.get("jax"), "devices"):
        return False
    from jax._src import xla_bridge

    initialized = getattr(xla_bridge, "backends_are_initialized", None)
    return True if initialized is None else bool(initialized())


def unpinned() -> str:
    """The entry for a pool of threads that is not fixed: "unpinned:<cores>"."""
    return f"unpinned:{cores()}"


def cores() -> int | None:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def instruction_set(cpuinfo: str | None = None, machine: str | None = None) -> str:
    """`x86_64 AuthenticAMD: avx avx2 f16c fma`: architecture, vendor (MKL looks at it), what
    kernels use.

    Without `cpuinfo`, the text of /proc/cpuinfo, only the architecture is known.
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


def variables(kind: str, environ: Mapping[str, str] | None = None) -> str:
    """The variables that count for `kind` ("cpu" or "gpu"), as `MKL_CBWR=AVX2 ...`."""
    environ = os.environ if environ is None else environ
    found = [f"{name}={environ[name]}" for name in VARIABLES[kind] if environ.get(name)]
    other = "--xla_gpu_" if kind == "cpu" else "--xla_cpu_"
    kept = sorted(
        f"{flag}={value}" if value else flag
        for flag, value in xla_flags(environ).items()
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


def torch_not_deterministic(kind: str) -> str:
    """PyTorch's setting that allows operations whose bits differ from run to run; "" if none does."""
    torch = sys.modules["torch"]
    mode = torch.get_deterministic_debug_mode()
    if mode == 0:
        return "torch.use_deterministic_algorithms(False)"
    if mode == 1:
        return "torch.use_deterministic_algorithms(True, warn_only=True)"
    # It chooses the convolution that was fastest this time.
    if kind == "cuda" and torch.backends.cudnn.benchmark:
        return "torch.backends.cudnn.benchmark = True"
    return ""


def torch_matmul_precision(kind: str) -> str:
    """`highest` (float32), `high` (TF32) or `medium` (bfloat16), whichever family it was set by."""
    try:
        return sys.modules["torch"].get_float32_matmul_precision()
    except RuntimeError:
        value = _torch_precisions(kind).get(_TORCH_OPERATIONS[kind][0], "none")
        return _TORCH_OLDER.get(value, value)


def torch_other_precisions(kind: str) -> str:
    """`cudnn.rnn=ieee mkldnn.conv=bf16`: settings other than PyTorch's defaults, except for matmul."""
    usual = {"cudnn.conv": "tf32", "cudnn.rnn": "tf32"}
    return " ".join(
        f"{name}={value}"
        for name, value in sorted(_torch_precisions(kind).items())
        if name != _TORCH_OPERATIONS[kind][0] and value not in (usual.get(name, "ieee"), "none")
    )


def torch_cudnn_tf32() -> bool:
    """Whether convolutions on a GPU may use TF32, as they do by default."""
    value = _torch_precisions("cuda").get("cudnn.conv")
    allowed = sys.modules["torch"].backends.cudnn.allow_tf32 if value is None else value == "tf32"
    return bool(allowed)


def _torch_precisions(kind: str) -> dict[str, str]:
    """The newer settings by operation; empty for a PyTorch that does not have them."""
    precisions = {}
    for name in _TORCH_OPERATIONS.get(kind, ()):
        backend, _, operation = name.partition(".")
        backends = sys.modules["torch"].backends
        owner: Any = getattr(getattr(backends, backend, None), operation, None)
        value = getattr(owner, "fp32_precision", None)
        if value is not None:
            precisions[name] = str(value)
    return precisions
