"""PyTorch: tensors, modules, optimizers before their first step, generators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from perdure.errors import UnsupportedLeafError
from perdure.state.adapter import Node, Spec
from perdure.state.nested import flat, nest
from perdure.store.leaf import Leaf


class TorchState:
    """See `perdure.state.adapter.Adapter`."""

    def spec(self, value: Any) -> Spec | None:
        if not isinstance(value, torch.Tensor):
            return None
        if value.layout != torch.strided or value.is_quantized:
            raise UnsupportedLeafError(
                f"a tensor of layout {value.layout}{', quantized' if value.is_quantized else ''}; "
                f"expected a dense one. Convert it with `.to_dense()` or `.dequantize()`."
            )
        return Spec(_name(value.dtype), tuple(value.shape))

    def leaf(self, value: Any) -> Leaf | None:
        spec = self.spec(value)
        if spec is None:
            return None
        if value.is_meta:
            raise UnsupportedLeafError("a tensor on the meta device has no data.")
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        octets = plain.reshape(-1).view(torch.uint8).numpy()
        data = octets.data if octets.size else memoryview(b"")
        return Leaf(spec.dtype, spec.shape, data, frozen=plain.data_ptr() != value.data_ptr())

    def load(self, like: Any, leaf: Leaf) -> Any:
        dtype = getattr(torch, leaf.dtype)
        target = torch.empty(leaf.shape, dtype=dtype)
        if leaf.data.nbytes:
            target.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(leaf.data, np.uint8)
        return target.to("cpu" if like.is_meta else like.device)

    def node(self, value: Any, stored: Mapping[str, Spec] | None) -> Node | None:
        if isinstance(value, torch.nn.Module):
            state = nest(value.state_dict(), ".")
            return Node([("", state)], lambda new: _load_module(value, new[0]))
        if isinstance(value, torch.optim.Optimizer):
            state = value.state_dict()
            if stored is not None:
                state["state"] = _lazy_state(stored, _parameter_count(value))
            return Node([("", state)], lambda new: _load_optimizer(value, new[0]))
        if isinstance(value, torch.Generator):
            return Node([("", value.get_state())], lambda new: value.set_state(new[0]))
        return None


def _load_module(module: torch.nn.Module, nested: Mapping[str, Any]) -> torch.nn.Module:
    module.load_state_dict(flat(nested, "."))
    return module


def _lazy_state(stored: Mapping[str, Spec], parameters: int) -> dict[int, dict[str, Any]]:
    """The per-parameter state that a checkpoint holds, as a template.

    An optimizer makes this state at its first step, so its own state says nothing about what fits.
    Entries of parameters that the optimizer does not have are left out, and reported as differences.
    """
    template: dict[int, dict[str, Any]] = {}
    for path, spec in stored.items():
        kind, _, rest = path.partition("/")
        index, _, name = rest.partition("/")
        if kind == "state" and index.isdigit() and int(index) < parameters and "/" not in name:
            template.setdefault(int(index), {})[name] = _template(spec)
    return template


def _template(spec: Spec) -> Any:
    if spec.dtype.startswith("py:"):
        return {"py:int": 0, "py:float": 0.0, "py:bool": False, "py:none": None}.get(spec.dtype, "")
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")


def _parameter_count(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _load_optimizer(optimizer: torch.optim.Optimizer, state: Any) -> torch.optim.Optimizer:
    optimizer.load_state_dict(state)
    return optimizer


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


ADAPTER = TorchState()
