"""What the adapter of PyTorch has to know about single tensors."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from perdure.state.leaf_spec import LeafSpec

LAZY = UninitializedTensorMixin
"""The base class of tensors that have no shape yet."""


def tensor_spec(tensor: torch.Tensor) -> LeafSpec:
    """dtype and shape of a tensor that is not lazy."""
    return LeafSpec(_dtype_name(tensor.dtype), tuple(tensor.shape))


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def has_shared_elements(value: Any) -> bool:
    """Whether elements of a tensor share memory (`expand`), so that PyTorch cannot copy into it."""
    if not isinstance(value, torch.Tensor) or isinstance(value, LAZY):
        return False
    if value.layout != torch.strided or value.is_nested:
        return False
    steps = value.stride()
    return 0 in steps and any(
        n > 1 and step == 0 for n, step in zip(value.shape, steps, strict=True)
    )


def copy_into(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy the elements of `value` into `tensor`; of elements that share memory only the first."""
    if has_shared_elements(tensor):
        once = tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())
        tensor, value = tensor.detach()[once], value[once]
    with torch.no_grad():
        tensor.copy_(value)
