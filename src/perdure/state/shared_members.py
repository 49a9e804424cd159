"""Members that are one object at two paths are one object after a restore, or it is refused."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from perdure.errors import CorruptionError, MismatchError
from perdure.state.extra_members import ExtraMember, Restoring, Saving
from perdure.state.leaf_values import plain_value, scalar_leaf
from perdure.state.walk import Walk
from perdure.store.leaf import Leaf

_MUTABLE = (dict, list, deque, set, bytearray)
_decoder = msgspec.json.Decoder(list[list[str]])


class SharedMembers(ExtraMember):
    """See `perdure.state.extra_members.ExtraMember`."""

    def take(self, saving: Saving) -> dict[str, Leaf]:
        walk = saving.walk
        first: dict[int, str] = {}
        groups: dict[str, list[str]] = {}

        def add(path: str, number: int) -> None:
            if (known := first.setdefault(number, path)) != path:
                groups.setdefault(known, [known]).append(path)

        for start, stop in walk.runs:
            if not _is_mutable(walk.values[start]):
                continue
            numbers = list(map(id, walk.values[start:stop]))
            # There may be very many arrays, and nearly always each is there once.
            if len(set(numbers)) == len(numbers) and first.keys().isdisjoint(numbers):
                first.update(zip(numbers, walk.paths[start:stop], strict=True))
                continue
            for path, number in zip(walk.paths[start:stop], numbers, strict=True):
                add(path, number)
        for branch in walk.branches:
            if isinstance(branch.value, _MUTABLE):
                add(branch.path, id(branch.value))
        for path, node in walk.objects.items():
            if isinstance(shared := getattr(node.target, "param_groups", None), list):
                add(path, id(shared))
        if not groups:
            return {}
        text = msgspec.json.encode(sorted(groups.values())).decode()
        return {f"process/{saving.process}/shared": scalar_leaf(text)}

    def put(self, restoring: Restoring) -> list[str]:
        """Compare what the restore itself, which is given `shared_groups`, cannot make one."""
        groups: dict[int, list[str]] = {}
        leaves, renamed, where, of_group, _ = restoring
        for path, group in shared_groups(leaves, renamed, where, of_group.index).items():
            groups.setdefault(group, []).append(path)
        for first, *others in groups.values():
            if first in restoring.walk.objects:
                _require_one_list(restoring.walk, restoring.where, first, others)
        return []


def shared_groups(
    leaves: Mapping[str, Leaf], renamed: Callable[[str], str], where: str, process: int
) -> dict[str, int]:
    """The number of the object that is at a path and at others, by the path; as in `Restoring`."""
    path = f"process/{process}/shared"
    # Perhaps saved by fewer processes, whose members are alike.
    leaf = leaves.get(path) or leaves.get("process/0/shared")
    try:
        groups = [] if leaf is None else _decoder.decode(plain_value(leaf))
    except ValueError as error:  # of msgspec
        raise CorruptionError(f"{where}: {path} cannot be read: {error}.") from error
    return {renamed(path): n for n, paths in enumerate(groups) for path in paths}


def _is_mutable(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return isinstance(value, np.ndarray) or (torch is not None and isinstance(value, torch.Tensor))


def _require_one_list(walk: Walk, where: str, first: str, others: list[str]) -> None:
    groups = getattr(walk.objects[first].target, "param_groups", None)
    for other in others:
        target = walk.objects[other].target if other in walk.objects else None
        if getattr(target, "param_groups", None) is not groups:
            raise MismatchError(
                f"{where}: {first} and {other} had one list of `param_groups` when they were saved, "
                f"and the target has two, so that a scheduler of one would not change the other. Make "
                f"the target as the run did that saved it (`self.param_groups = base.param_groups`), "
                f"and restore again."
            )
