"""The versions and settings of PyTorch that can change bits, for the recipe. Changes nothing."""

from __future__ import annotations

from typing import Any

import torch

from perdure.distribute.engine import Scalar
from perdure.distribute.hardware import instruction_set, settings
from perdure.distribute.torch import precision as torch_precision


def environment(device: Any) -> dict[str, Scalar]:
    """The recipe's fields of the framework, for computing on `device` (a `torch.device`)."""
    on_gpu = device.type == "cuda"
    gpu: dict[str, Scalar] = {"cudnn_tf32": torch_precision.cudnn_tf32()} if on_gpu else {}
    all_settings = [
        settings("gpu" if on_gpu else "cpu"),
        torch_precision.other_precisions(device.type),
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
        "matmul_precision": torch_precision.matmul_precision(device.type),
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
