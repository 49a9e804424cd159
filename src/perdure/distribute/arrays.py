"""The few array operations that losses and metrics need, for values of JAX, PyTorch and NumPy.

No framework is imported here: a value of a framework exists only if the framework is imported already.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def namespace(*values: Any) -> Any:
    """The operations for these values: PyTorch's or JAX's if one of the values is theirs."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    for value in values:
        if torch is not None and isinstance(value, torch.Tensor):
            return _Torch(torch, value.device)
        if jax is not None and isinstance(value, jax.Array):
            return _NumPy(jax.numpy)
    return _NumPy(np)


def is_traced(value: Any) -> bool:
    """Whether this is a placeholder inside of a JAX transformation, without a value."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.core.Tracer)


def on_host(value: Any) -> Any:
    """The value as a NumPy array; a traced value is returned as it is."""
    if is_traced(value):
        return value
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    return np.asarray(value)


class _NumPy:
    """NumPy, and JAX's version of it."""

    def __init__(self, module: Any) -> None:
        self._np = module

    def __getattr__(self, name: str) -> Any:
        """`where`, `log`, `stack` and `concatenate`, which all of them have."""
        return getattr(self._np, name)

    def array(self, value: Any, dtype: str | None = None) -> Any:
        return self._np.asarray(value, dtype)

    def constant(self, value: Any, dtype: str) -> Any:
        """The value as an array. Stops the gradient."""
        return self.array(value, dtype)

    def bincount(self, value: Any, count: int) -> Any:
        if self._np is np:
            return np.bincount(value.reshape(-1), minlength=count).astype(np.int32)
        return self.array(self._np.bincount(value.reshape(-1), length=count), "int32")

    def arange(self, count: int) -> Any:
        return self._np.arange(count, dtype="int32")

    def zeros(self, shape: list[int], dtype: Any) -> Any:
        return self._np.zeros(shape, dtype)

    def ones(self, shape: Any, dtype: str) -> Any:
        return self._np.ones(tuple(shape), dtype)

    def sum(self, value: Any, axis: int | None = None) -> Any:
        """In the dtype of the value, also for small integers."""
        return self._np.asarray(self._np.sum(value, axis, dtype=value.dtype))

    def argmax(self, value: Any) -> Any:
        return self._np.argmax(value, -1)

    def amax(self, value: Any) -> Any:
        return self._np.max(value, -1)

    def is_finite(self, value: Any) -> Any:
        return self._np.isfinite(value).all()


class _Torch:
    """The same in PyTorch, on the device of the values."""

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch = torch
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def array(self, value: Any, dtype: str | None = None) -> Any:
        kind = None if dtype is None else getattr(self._torch, dtype)
        return self._torch.as_tensor(value, dtype=kind, device=self._device)

    def constant(self, value: Any, dtype: str) -> Any:
        return self.array(value, dtype).detach()

    def bincount(self, value: Any, count: int) -> Any:
        return self.array(self._torch.bincount(value.reshape(-1), minlength=count), "int32")

    def arange(self, count: int) -> Any:
        return self._torch.arange(count, dtype=self._torch.int32, device=self._device)

    def zeros(self, shape: list[int], dtype: Any) -> Any:
        return self._torch.zeros(shape, dtype=dtype, device=self._device)

    def ones(self, shape: Any, dtype: str) -> Any:
        return self._torch.ones(
            tuple(shape), dtype=getattr(self._torch, dtype), device=self._device
        )

    def sum(self, value: Any, axis: int | None = None) -> Any:
        return self._torch.sum(value, axis, dtype=value.dtype)

    def argmax(self, value: Any) -> Any:
        return self._torch.argmax(value, -1)

    def amax(self, value: Any) -> Any:
        return self._torch.amax(value, -1)

    def is_finite(self, value: Any) -> Any:
        return self._torch.isfinite(value).all()
