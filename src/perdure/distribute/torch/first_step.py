"""What `grad` must not do to the state or outside of it, and takes too long to look for each time."""

from __future__ import annotations

import contextlib
import gc
import itertools
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from perdure.distribute.torch import compiled, state_view
from perdure.errors import StateError

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements of a tensor, and how many tensors of attributes, that are not too many to look at.
_LARGEST, _MOST_ATTRIBUTES = 1 << 26, 1000


class FirstStep:
    """The parameters, other tensors and generators of a state before the replicas of the first
    step.

    Raises StateError if a parameter or a buffer has no shape yet (a lazy module).
    """

    def __init__(self, state: Any, is_compiled: bool = False) -> None:
        self._state = state
        # What is compiled with the hook of `watched` would be compiled again without it.
        self._is_compiled = is_compiled
        self._tensors: list[tuple[str, Tensor, int]] = []
        known = self._known = set[int]()
        for path, module in state_view.instances(state, nn.Module):
            for part in module.modules():  # some leave out tensors of theirs in `named_parameters`
                known.update(map(id, (*part._parameters.values(), *part._buffers.values())))
                self._is_compiled |= compiled.is_compiled(part)
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                where = ".".join(filter(None, (path, name)))
                if nn.parameter.is_lazy(tensor):
                    raise StateError(
                        f"{where}: expected a tensor with a shape, found one of a lazy module, which "
                        "gets its shape in the first forward pass. Call the model once on an example "
                        "before the first step"
                    )
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
        self._attributes = list(itertools.islice(others, _MOST_ATTRIBUTES))
        self._optimizers = state_view.instances(state, torch.optim.Optimizer)
        # The modules that `grad` ran, in this order, and of those outside of the state what changes
        # where they are trained: weakly, because `grad` may make modules of its own.
        self._ran: dict[int, weakref.ref[nn.Module]] = {}
        self._outside: list[tuple[weakref.ref[Tensor], int]] = []
        self._generators = [
            (p, g, g.get_state()) for p, g in state_view.instances(state, torch.Generator)
        ]

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Notes the modules that run in it."""
        if self._is_compiled:
            yield
            return
        hook = nn.modules.module.register_module_forward_pre_hook(self._note)
        try:
            yield
        finally:
            hook.remove()

    def _note(self, module: nn.Module, args: Any) -> None:
        # While PyTorch compiles a program nothing is noted, so that this is no part of the program.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or id(module) in self._ran:
            return
        self._ran[id(module)] = weakref.ref(module)
        parameters = [p for p in module._parameters.values() if type(p) is nn.Parameter]
        buffers = [b for b in module._buffers.values() if b is not None and module.training]
        for tensor in (*(p for p in parameters if p.requires_grad), *buffers):
            if id(tensor) not in self._known and _is_plain(tensor):
                self._outside.append((weakref.ref(tensor), _sum(tensor)))

    def warn_of_outside(self) -> None:
        """Called after `update`: a warning if the step trained a module that is not in the state."""
        if not self._outside:
            return
        gc.collect()  # what `grad` made and only cycles keep
        groups = [group for _, optimizer in self._optimizers for group in optimizer.param_groups]
        trained = {id(parameter) for group in groups for parameter in group["params"]}
        changed = {
            id(tensor)
            for reference, before in self._outside
            if (tensor := reference()) is not None
            and (id(tensor) in trained or _sum(tensor) != before)
        }
        for module in (reference() for reference in self._ran.values()):
            if module is not None and any(
                id(tensor) in changed
                for tensor in (*nn.Module.parameters(module), *nn.Module.buffers(module))
            ):
                warnings.warn(
                    f"grad uses a {type(module).__name__} that is not in the state of the step, and "
                    "the step changes it. The strategy does not keep its gradients and buffers apart "
                    "for each logical replica, and a checkpoint of the state does not have it. Put the "
                    "module into the state",
                    UserWarning,
                    stacklevel=5,
                )
                return

    def require_unchanged(self) -> None:
        """StateError if `grad` has changed one of these tensors."""
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
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # pyright: ignore[reportAttributeAccessIssue]
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.numel() <= _LARGEST
    )


def _sum(tensor: Tensor) -> int:
    """The sum of the bytes in memory, as integers."""
    if tensor.layout is not torch.strided:
        return 0
    data = tensor.detach().reshape(-1)
    return int(data.view(_INTEGERS.get(data.element_size(), torch.uint8)).sum())
