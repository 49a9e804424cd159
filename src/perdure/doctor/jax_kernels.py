"""The kernels of the doctor on JAX; see `perdure.doctor.kernels`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from perdure.distribute.jax.xla_settings import ask_for_determinism, pin
from perdure.doctor.kernels import DETERMINISTIC, ONE_THREAD, listed
from perdure.runtime.environment import JAX_THREADS, Settings, present_jax_settings


def prepare(condition: str) -> None:
    # A GPU may be in use; how much memory is taken at once changes no bit.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if condition == DETERMINISTIC:
        ask_for_determinism()
        pin()
    elif condition == ONE_THREAD:
        os.environ[JAX_THREADS] = "1"


def describe() -> Settings:
    return {"devices": listed(devices()), **present_jax_settings()}


def devices() -> dict[str, tuple[str, Any]]:
    local = jax.local_devices()
    with suppress(RuntimeError):  # JAX_PLATFORMS may leave the CPU out
        local += [d for d in jax.local_devices(backend="cpu") if d not in local]
    return {str(device): (device.device_kind, device) for device in local}


def place(array: Any, dtype: str, device: Any) -> Any:
    if array.dtype == np.float32:
        array = array.astype(jnp.dtype(dtype))
    return jax.device_put(array, device)


def program(compute: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(compute)


def with_gradients(function: Callable[..., Any], inputs: Sequence[Any]) -> tuple[Any, Any]:
    result, pull = jax.vjp(function, *inputs)
    weights = jnp.cos(jnp.arange(result.size)).astype(result.dtype).reshape(result.shape)
    return result, pull(weights)


def _pool(x: Any) -> Any:
    shape, steps = (1, 1, 2, 2), (1, 1, 2, 2)
    return lax.reduce_window(x.reshape(4, 8, 30, 30), -jnp.inf, lax.max, shape, steps, "VALID")


def _layer_norm(x: Any, scale: Any, bias: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale + bias


def _embedding(table: Any, rows: Any, weights: Any) -> dict[str, Any]:
    result, pull = jax.vjp(lambda table: table[rows], table)
    return {"result": result, "gradient": pull(weights)[0]}


def _sort(x: Any) -> dict[str, Any]:
    return {"result": jnp.sort(x, stable=False), "order": jnp.argsort(x, stable=False)}


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "matmul": jnp.matmul,
    "matmul of one row": jnp.matmul,
    "convolution": lambda x, w: lax.conv(x, w, (1, 1), "SAME"),
    "max pooling": _pool,
    "sum": jnp.sum,
    "cumulative sum": jnp.cumsum,
    "scatter-add": lambda start, rows, values: start.at[rows].add(values),
    "embedding": _embedding,
    "attention": jax.nn.dot_product_attention,
    "layer norm": _layer_norm,
    "sort with ties": _sort,
    "exp, tanh, erf": lambda x: {"exp": jnp.exp(x), "tanh": jnp.tanh(x), "erf": lax.erf(x)},
}
