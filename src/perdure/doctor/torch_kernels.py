"""The kernels of the doctor on PyTorch; see `perdure.doctor.kernels`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from perdure.distribute.torch.engine import THREADS, fix_cublas
from perdure.doctor.kernels import DETERMINISTIC, ONE_THREAD, Refused, listed
from perdure.runtime.environment import Settings, torch_settings


def prepare(condition: str) -> None:
    if condition == DETERMINISTIC:  # as perdure.distribute.torch.engine sets it
        fix_cublas(os.environ, started=False)
        torch.set_num_threads(THREADS)
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
        torch.backends.cudnn.benchmark = False
    elif condition == ONE_THREAD:
        torch.set_num_threads(1)


def describe() -> Settings:
    found = devices()
    _, first = next(iter(found.values()))
    return {"devices": listed(found), **torch_settings(first)}


def devices() -> dict[str, tuple[str, Any]]:
    found: dict[str, tuple[str, Any]] = {}
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        found[str(device)] = (torch.cuda.get_device_name(device), device)
    found["cpu"] = ("cpu", torch.device("cpu"))
    return found


def place(array: Any, dtype: str, device: Any) -> Any:
    tensor = torch.from_numpy(array).to(device)
    return tensor.to(getattr(torch, dtype)) if array.dtype == np.float32 else tensor


def program(compute: Callable[..., Any]) -> Callable[..., Any]:
    def call(*inputs: Any) -> Any:
        try:
            return compute(*inputs)
        except RuntimeError as error:
            if "deterministic" in str(error) and torch.are_deterministic_algorithms_enabled():
                raise Refused(str(error)) from error
            raise

    return call


def with_gradients(function: Callable[..., Any], inputs: Sequence[Any]) -> tuple[Any, Any]:
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    result = function(*inputs)
    weights = torch.cos(torch.arange(result.numel(), device=result.device))
    weights = weights.to(result.dtype).reshape(result.shape)
    return result.detach(), torch.autograd.grad(result, inputs, weights)


def _embedding(table: Any, rows: Any, weights: Any) -> dict[str, Any]:
    table = table.detach().requires_grad_()
    result = functional.embedding(rows, table)
    (gradient,) = torch.autograd.grad(result, table, weights)
    return {"result": result.detach(), "gradient": gradient}


def _scatter_add(start: Any, rows: Any, values: Any) -> Any:
    return start.scatter_add(0, rows.long()[:, None].expand_as(values), values)


def _sort(x: Any) -> dict[str, Any]:
    result, order = torch.sort(x)
    return {"result": result, "order": order}


def _attention(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v).contiguous()


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "matmul": torch.matmul,
    "matmul of one row": torch.matmul,
    "convolution": lambda x, w: functional.conv2d(x, w, padding=1),
    "max pooling": lambda x: functional.max_pool2d(x.reshape(4, 8, 30, 30), 2),
    "sum": torch.sum,
    "cumulative sum": lambda x: torch.cumsum(x, 0),
    "scatter-add": _scatter_add,
    "index_add": lambda start, rows, values: start.index_add(0, rows, values),
    "index_put": lambda start, rows, values: start.index_put(
        (rows.long(),), values, accumulate=True
    ),
    "embedding": _embedding,
    "attention": _attention,
    "layer norm": lambda x, scale, bias: functional.layer_norm(x, (129,), scale, bias),
    "sort with ties": _sort,
    "exp, tanh, erf": lambda x: {"exp": x.exp(), "tanh": x.tanh(), "erf": x.erf()},
}
