"""The tensors that pruning in PyTorch computed in the last forward pass, as leaves beside the state.

`torch.nn.utils.prune` trains `weight_orig`, and sets `weight` in each forward pass. The next pruning
ranks that `weight`, which is in no `state_dict` and is one optimizer step older than `weight_orig`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from perdure.state.adapter import adapter
from perdure.state.paths import join_dotted
from perdure.store.leaf import Leaf

PREFIX = "torch/pruned/"


def pruned_leaves(path: str, parts: Iterable[tuple[str, Any]]) -> dict[str, Leaf]:
    """A copy of each pruned tensor of a module, by `PREFIX` and its path.

    Args:
        path: the path of the module in the state.
        parts: the module and those in it, with their names.
    """
    leaves = {}
    for tensor_path, part, name in _pruned(path, parts):
        leaf = adapter("torch").leaf(vars(part)[name])
        if leaf is not None and leaf.shards is None:  # a sharded one is in each process in part
            leaves[PREFIX + tensor_path] = leaf.copy()
    return leaves


def set_pruned(path: str, parts: Iterable[tuple[str, Any]], stored: Mapping[str, Leaf]) -> None:
    """Set the tensors that `stored` has by their paths, without `PREFIX`."""
    for tensor_path, part, name in _pruned(path, parts):
        leaf = stored.get(tensor_path)
        like = vars(part)[name].detach()
        if leaf is not None and leaf.shape == tuple(like.shape):
            setattr(part, name, adapter("torch").load(like, leaf))


def _pruned(path: str, parts: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any, str]]:
    """The path of each pruned tensor, its module, and its name there."""
    if (prune := sys.modules.get("torch.nn.utils.prune")) is None:
        return
    for prefix, part in parts:
        for hook in part._forward_pre_hooks.values():
            if isinstance(hook, prune.BasePruningMethod):
                name = hook._tensor_name
                if vars(part).get(name) is not None:
                    yield join_dotted(path, f"{prefix}.{name}" if prefix else name), part, name
