"""Finds changes that a logical replica makes in place to tensors from outside of it.

The result would depend on which replicas ran before in this process. A `TorchDispatchMode` sees
every write, also through `.data`.
"""

from __future__ import annotations

import functools
from collections.abc import Container
from typing import Any, NoReturn

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from perdure.distribute.engine import describe_leaf
from perdure.distribute.run.context import get_replica_context
from perdure.errors import StateError

FORM = (
    "Replicas run one after another, so the result would depend on how many of them this process has. "
    "In the function of strategy.run, only optimizer.step() may change parameters; return other values "
    "and combine them with strategy.reduce, or change them in `update` of strategy.step, which also "
    "takes the mean of BatchNorm's statistics"
)
# They replace what they write to and read nothing of it. A replica may fill its own rows of a tensor.
_REPLACES = ("copy_", "fill_", "zero_", "index_put_", "_index_put_impl_", "_foreach_zero_")
# A replica may do this to a gradient from outside, without a gradient of its own: `zero_grad`.
_CLEARS = ("zero_", "_foreach_zero_")
_BATCH_NORM = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
# Positions of the running mean and the flag for training among their arguments.
_MEAN, _TRAINING = 3, 5


class ChangeWatch(TorchDispatchMode):
    """Raises StateError for a change of a tensor from outside of the replica.

    `storages` belong to the replica, with what it allocates; `gradients` from outside it has read.
    """

    def __init__(self, storages: set[int], gradients: Container[int]) -> None:
        super().__init__()
        self._storages = storages
        self._gradients = gradients
        # Weak references to the memory, so that no other tensor gets the same identity.
        self._seen: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if get_replica_context() is None:  # in a collective, which runs for all replicas
            return func(*args, **kwargs)
        name, written, allocates = _described(func)
        for number, argument, replaces in written:
            value = args[number] if number < len(args) else kwargs.get(argument)
            self._check(name, value, replaces)
        if name in _BATCH_NORM and args[_TRAINING] and args[_MEAN] is not None:
            refuse("running_mean of a batch normalization", name)
        result = func(*args, **kwargs)
        if allocates:
            for leaf in result if isinstance(result, (list, tuple)) else (result,):
                if is_strided(leaf):
                    storage = leaf.untyped_storage()
                    self._storages.add(storage._cdata)
                    self._seen.append(StorageWeakRef(storage))
        return result

    def _check(self, name: str, value: Any, replaces: bool) -> None:
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if not is_strided(tensor) or storage_id(tensor) in self._storages:
                continue
            overwritten = name not in _CLEARS and storage_id(tensor) in self._gradients
            if isinstance(tensor, torch.nn.Parameter) or overwritten or not replaces:
                refuse(f"a tensor from outside of it, {describe_leaf(tensor)},", name)


@functools.cache
def _described(func: Any) -> tuple[str, list[tuple[int, str, bool]], bool]:
    """An operation's name, the (position, name, is unread) it writes to, if results are new."""
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    written = [
        (number, argument.name, argument.is_out or name in _REPLACES)
        for number, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return name, written, name == "lift_fresh" or not any(r.alias_info for r in schema.returns)


def refuse(changed: str, name: str) -> NoReturn:
    """StateError: the replica that runs changes something in place, by the operation `name`."""
    context = get_replica_context()
    assert context is not None
    where = f"logical replica {context.replica_id_in_sync_group}"
    raise StateError(f"{where} changes {changed} in place ({name}). {FORM}")


def is_strided(value: Any) -> bool:
    """Whether it is a tensor that has memory of its own."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def storage_id(tensor: torch.Tensor) -> int:
    """The identity of the tensor's memory."""
    return tensor.untyped_storage()._cdata
