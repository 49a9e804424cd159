"""Finds a program that restored a tensor, continues with the old one, and saves the restored one.

A restore changes parameters and modules in place, but returns a new tensor for any other tensor: two
restores into one target are two values, and members of a target may share memory. A program that
ignores the new tensor would save the same old value in every later checkpoint.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from perdure.errors import StateError


class _Replaced(NamedTuple):
    old: weakref.ref[torch.Tensor]
    old_version: int
    new_version: int


_replaced: Any = WeakIdKeyDictionary()


def remember(old: torch.Tensor, new: torch.Tensor) -> None:
    """A restore returns `new` in place of `old`."""
    if not (old.is_inference() or new.is_inference()):
        _replaced[new] = _Replaced(weakref.ref(old), old._version, new._version)


def check_in_use(new: torch.Tensor) -> None:
    """Raise if `new`, which is saved now, is unchanged since a restore returned it, and the program has
    changed the tensor in whose place it was returned."""
    if not _replaced or (entry := _replaced.get(new)) is None:
        return
    old = entry.old()
    if old is None or new._version != entry.new_version:
        del _replaced[new]
    elif old._version != entry.old_version and not _same_bits(old, new):
        raise StateError(
            "the restore returned a new tensor here, and the program has changed the tensor that it "
            "gave to the restore instead, so that every save would store the restored value again. Use "
            "the tensors of the state that the restore returns (`buffer.copy_(restored)`), or save the "
            "module that owns them: modules and parameters are restored in place."
        )


def _same_bits(old: torch.Tensor, new: torch.Tensor) -> bool:
    if old.shape != new.shape or old.dtype != new.dtype or old.device != new.device:
        return False
    one, other = (part.detach().contiguous().reshape(-1).view(torch.uint8) for part in (old, new))
    return torch.equal(one, other)
