"""What precision PyTorch gives to operations on float32, for the recipe.

PyTorch has two families of settings for it: the older `set_float32_matmul_precision` and `allow_tf32`,
and the newer `fp32_precision` of each backend. Invariant: both are read, because the older names raise
once the newer ones were used, and do not know all of what those can say. Nothing is changed here: TF32
and bfloat16 are no less deterministic than float32, they are another recipe.
"""

from __future__ import annotations

from typing import Any

import torch

# By type of device: operations whose precision can be set.
_OPERATIONS = {
    "cpu": ("mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn"),
    "cuda": ("cuda.matmul", "cudnn.conv", "cudnn.rnn"),
}
# The names of the older interface.
_OLDER = {"none": "highest", "ieee": "highest", "tf32": "high", "bf16": "medium"}


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
        place: Any = getattr(getattr(torch.backends, backend, None), operation, None)
        value = getattr(place, "fp32_precision", None)
        if value is not None:
            precisions[name] = str(value)
    return precisions
