"""The persistent buffers that Lightning does not bring back by itself.

Lightning loads into the shapes that the program makes: a buffer that the run has made, or that has
grown, is an error. It saves the buffers of the first process alone: with DDP they are equal in all
processes only after a forward pass that is followed by an exchange of gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer

_CHANGED = "perdure_buffers"  # the name in the checkpoint


def persistent(module: torch.nn.Module) -> dict[str, Any]:
    """The buffers by name that are whole in this process; None is a buffer without a value."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, part in module.named_modules()
        for name, buffer in part._buffers.items()
        if name not in part._non_persistent_buffers_set
        and not isinstance(buffer, (DTensor, UninitializedBuffer))
    }


@torch.no_grad()
def restore(module: torch.nn.Module, buffers: Mapping[str, torch.Tensor | None]) -> None:
    """Give a module these buffers, in its own memory where they fit."""
    present = persistent(module)
    for path, value in buffers.items():
        if value is not None and path in present and _form(value) == _form(present[path]):
            present[path].copy_(value)
            continue
        inside, _, name = path.rpartition(".")
        new = None if value is None else value.to(getattr(module, "device", "cpu"))
        module.get_submodule(inside).register_buffer(name, new)


def _form(buffer: torch.Tensor | None) -> Any:
    """What a load keeps."""
    if buffer is None:
        return None
    return [str(buffer.dtype).removeprefix("torch."), list(buffer.shape)]


def _forms(module: torch.nn.Module) -> dict[str, Any]:
    return {path: _form(each) for path, each in persistent(module).items()}


class ChangedBuffers:
    """The buffers that a run has made, or given another dtype or shape."""

    def __init__(self) -> None:
        self._made: dict[str, Any] | None = None  # by the program
        self._before: set[str] = set()  # changed before the resume

    def observe(self, module: torch.nn.Module) -> None:
        """The program has made the module; the first call counts."""
        if self._made is None:
            self._made = _forms(module)

    def save(self, module: torch.nn.Module, checkpoint: dict[str, Any]) -> None:
        """Note in a checkpoint which ones `make` has to make."""
        self.observe(module)
        made = self._made or {}
        now = dict.fromkeys(made) | _forms(module)
        changed = {
            path: form
            for path, form in now.items()
            if path in self._before or path not in made or form != made[path]
        }
        if changed:
            checkpoint[_CHANGED] = changed

    def make(self, module: torch.nn.Module, checkpoint: Mapping[str, Any]) -> None:
        """Make in a new module what the run of `checkpoint` has made, so that it can be loaded."""
        self.observe(module)
        changed = checkpoint.get(_CHANGED, {})
        self._before |= changed.keys()
        restore(
            module,
            {
                path: None if form is None else torch.empty(form[1], dtype=getattr(torch, form[0]))
                for path, form in changed.items()
            },
        )
