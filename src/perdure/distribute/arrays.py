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
            return _Torch(torch, device=value.device)
        if jax is not None and isinstance(value, jax.Array):
            return _Namespace(jax.numpy)
    return _Namespace(np)


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


class _Namespace:
    """NumPy, and JAX's version of it."""

    def __init__(self, module: Any, **where: Any) -> None:
        self._module = module
        self._where = where

    def __getattr__(self, name: str) -> Any:
        """`where`, `log`, `stack` and `concatenate`, which all of them have."""
        return getattr(self._module, name)

    def array(self, value: Any, dtype: str | None = None) -> Any:
        return self._module.asarray(value, dtype)

    def constant(self, value: Any, dtype: str) -> Any:
        """The value as an array. Stops the gradient."""
        return self.array(value, dtype)

    def bincount(self, value: Any, count: int) -> Any:
        if self._module is np:
            return np.bincount(value.reshape(-1), minlength=count).astype(np.int32)
        return self.array(self._module.bincount(value.reshape(-1), length=count), "int32")

    def arange(self, count: int) -> Any:
        return self._module.arange(count, dtype=self._dtype("int32"), **self._where)

    def zeros(self, shape: Any, dtype: Any) -> Any:
        return self._module.zeros(tuple(shape), dtype=self._dtype(dtype), **self._where)

    def ones(self, shape: Any, dtype: Any) -> Any:
        return self._module.ones(tuple(shape), dtype=self._dtype(dtype), **self._where)

    def sum(self, value: Any, axis: int | None = None) -> Any:
        """In the dtype of the value, also for small integers."""
        return self.array(self._module.sum(value, axis, dtype=value.dtype))

    def argmax(self, value: Any) -> Any:
        return self._module.argmax(value, -1)

    def amax(self, value: Any) -> Any:
        return self._module.amax(value, -1)

    def is_finite(self, value: Any) -> Any:
        return self._module.isfinite(value).all()

    def _dtype(self, dtype: Any) -> Any:
        return dtype


class _Torch(_Namespace):
    """The same in PyTorch, on the device of the values."""

    def array(self, value: Any, dtype: str | None = None) -> Any:
        return self._module.as_tensor(value, dtype=self._dtype(dtype), **self._where)

    def constant(self, value: Any, dtype: str) -> Any:
        return self.array(value, dtype).detach()

    def bincount(self, value: Any, count: int) -> Any:
        return self.array(self._module.bincount(value.reshape(-1), minlength=count), "int32")

    def _dtype(self, dtype: Any) -> Any:
        return getattr(self._module, dtype) if isinstance(dtype, str) else dtype
