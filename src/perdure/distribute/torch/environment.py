"""The versions and settings of PyTorch that can change bits, for the recipe. Changes nothing.

PyTorch has two families of settings for the precision of operations on float32: the older ones
(`set_float32_matmul_precision`, `allow_tf32`) and the newer `fp32_precision` of each backend. Both are
read, because the older names raise once the newer ones were used, and do not know all of what those can
say. TF32 and bfloat16 are no less deterministic than float32, they are another recipe.
"""

from __future__ import annotations

from typing import Any

import torch

from perdure.distribute.engine import Scalar
from perdure.distribute.hardware import instruction_set, settings

# By type of device: operations whose precision can be set.
_OPERATIONS = {
    "cpu": ("mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn"),
    "cuda": ("cuda.matmul", "cudnn.conv", "cudnn.rnn"),
}
# The names of the older interface.
_OLDER = {"none": "highest", "ieee": "highest", "tf32": "high", "bf16": "medium"}


def environment(device: Any) -> dict[str, Scalar]:
    """The recipe's fields of the framework, for computing on `device` (a `torch.device`)."""
    on_gpu = device.type == "cuda"
    gpu: dict[str, Scalar] = {"cudnn_tf32": cudnn_tf32()} if on_gpu else {}
    all_settings = [
        settings("gpu" if on_gpu else "cpu"),
        other_precisions(device.type),
    ]
    return {
        **gpu,
        "engine": "torch",
        "engine_version": f"torch {torch.__version__}{_libraries() if on_gpu else ''}",
        "platform": device.type,
        "instruction_set": torch.cuda.get_device_name(device) if on_gpu else instruction_set(),
        "settings": " ".join(filter(None, all_settings)),
        "threads": torch.get_num_threads(),
        "deterministic": not not_deterministic(device.type),
        "mkldnn": bool(torch.backends.mkldnn.enabled),
        "matmul_precision": matmul_precision(device.type),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
    }


def not_deterministic(kind: str) -> str:
    """The setting that allows operations whose bits differ from run to run; "" if there is none."""
    mode = torch.get_deterministic_debug_mode()
    if mode == 0:
        return "torch.use_deterministic_algorithms(False)"
    if mode == 1:
        return "torch.use_deterministic_algorithms(True, warn_only=True)"
    # It chooses the convolution that was fastest this time.
    if kind == "cuda" and torch.backends.cudnn.benchmark:
        return "torch.backends.cudnn.benchmark = True"
    return ""


def _libraries() -> str:
    """The libraries that compute on a GPU; one release of PyTorch is built for several."""
    if torch.version.hip:
        return f", ROCm {torch.version.hip}"
    return f", CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"


def matmul_precision(kind: str) -> str:
    """`highest` (float32), `high` (TF32) or `medium` (bfloat16), whichever family it was set by."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        value = _precisions(kind).get(_OPERATIONS[kind][0], "none")
        return _OLDER.get(value, value)


def other_precisions(kind: str) -> str:
    """`cudnn.rnn=ieee mkldnn.conv=bf16`: settings other than PyTorch's defaults, except for matmul."""
    usual = {"cudnn.conv": "tf32", "cudnn.rnn": "tf32"}
    return " ".join(
        f"{name}={value}"
        for name, value in sorted(_precisions(kind).items())
        if name != _OPERATIONS[kind][0] and value not in (usual.get(name, "ieee"), "none")
    )


def cudnn_tf32() -> bool:
    """Whether convolutions on a GPU may use TF32, as they do by default."""
    value = _precisions("cuda").get("cudnn.conv")
    return bool(torch.backends.cudnn.allow_tf32) if value is None else value == "tf32"


def _precisions(kind: str) -> dict[str, str]:
    """The newer settings by operation; empty for a PyTorch that does not have them."""
    precisions = {}
    for name in _OPERATIONS.get(kind, ()):
        backend, _, operation = name.partition(".")
        setting: Any = getattr(getattr(torch.backends, backend, None), operation, None)
        value = getattr(setting, "fp32_precision", None)
        if value is not None:
            precisions[name] = str(value)
    return precisions
