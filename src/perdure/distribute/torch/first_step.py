"""What `grad` must not do to the state, and what takes too long to look for in every step."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from perdure.distribute.torch import state_view
from perdure.errors import StateError

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements of a tensor, and how many tensors of attributes, that are not too many to look at.
_LARGE, _MOST = 1 << 26, 1000


class FirstStep:
    """The parameters, other tensors and generators of a state before the replicas of the first step.

    Raises:
        StateError: A parameter or a buffer has no shape yet (a lazy module).
    """

    def __init__(self, state: Any) -> None:
        self._state = state
        self._tensors: list[tuple[str, Tensor, int]] = []
        known: set[int] = set()
        for path, module in state_view.modules(state):
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                where = ".".join(filter(None, (path, name)))
                if nn.parameter.is_lazy(tensor):
                    raise StateError(
                        f"{where}: expected a tensor with a shape, found one of a lazy module, which "
                        "gets its shape in the first forward pass. Call the model once on an example "
                        "before the first step"
                    )
                known.add(id(tensor))
                if type(tensor) is nn.Parameter:
                    self._tensors.append((where, tensor, _sum(tensor)))
        for where, tensor in state_view.named_tensors(state):
            known.add(id(tensor))
            if type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta:
                self._tensors.append((where, tensor, _sum(tensor)))
        others = (
            (path, tensor, _sum(tensor))
            for path, tensor in state_view.attributes(state).items()
            if id(tensor) not in known and _is_plain(tensor)
        )
        self._attributes = list(itertools.islice(others, _MOST))
        self._generators = [
            (p, g, g.get_state()) for p, g in state_view.instances(state, torch.Generator)
        ]

    def require_unchanged(self) -> None:
        """StateError if `grad` has changed one of them."""
        for path, parameter, before in self._tensors:
            if _sum(parameter) != before:
                raise StateError(
                    f"{path}: grad changed this parameter or tensor through .data, another tensor over "
                    "its memory, or an operation whose changes PyTorch does not count (batch_norm with "
                    "running statistics). Only update may change the state, because grad runs once for "
                    "each logical replica"
                )
        changed = [entry for entry in self._attributes if _sum(entry[1]) != entry[2]]
        # One that was replaced may be a cache, or kept to be looked at.
        now = state_view.attributes(self._state) if changed else {}
        for path, tensor, _ in changed:
            if now.get(path) is tensor:
                raise StateError(
                    f"{path}: grad changed this tensor in place, an attribute that is no buffer, so "
                    "that its value depends on which replicas ran here before. Make it a buffer "
                    "(register_buffer), which gets the mean over the replicas, or return from grad "
                    "what each replica contributes and change it in update"
                )
        for path, generator, before in self._generators:
            if not torch.equal(generator.get_state(), before):
                raise StateError(
                    f"{path}: grad drew from this generator of the state, so that its numbers depend "
                    "on which replicas ran here before. Draw from key, the generator that grad gets, "
                    "or in update"
                )


def _is_plain(tensor: Tensor) -> bool:
    """Whether its memory can be read, and is not so large that this takes long."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.numel() <= _LARGE
    )


def _sum(tensor: Tensor) -> int:
    """The sum of what is in memory, as integers."""
    if tensor.layout is not torch.strided:
        return 0
    data = tensor.detach().reshape(-1)
    return int(data.view(_INTEGERS.get(data.element_size(), torch.uint8)).sum())
