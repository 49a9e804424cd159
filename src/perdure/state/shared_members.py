"""Members that are one object at two paths are one object after a restore, or it is refused."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping

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

        def add(found: list[tuple[int, str]]) -> None:
            # There may be very many, and nearly always each is there once.
            numbers = {number for number, _ in found}
            if len(numbers) == len(found) and first.keys().isdisjoint(numbers):
                first.update(found)
                return
            for number, path in found:
                if (known := first.setdefault(number, path)) != path:
                    groups.setdefault(known, [known]).append(path)

        arrays = {kind for kind in walk.takers if _is_mutable(kind)}
        containers = {kind for kind in walk.kinds if issubclass(kind, _MUTABLE)}
        if arrays:
            add([(id(value), path) for path, value in walk.pairs() if type(value) in arrays])
        add(
            [
                (id(each.value), each.path)
                for each in walk.branches
                if type(each.value) in containers
            ]
        )
        of_groups = (
            (path, getattr(node.target, "param_groups", None))
            for path, node in walk.objects.items()
        )
        add([(id(shared), path) for path, shared in of_groups if isinstance(shared, list)])
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


def _is_mutable(kind: type) -> bool:
    torch = sys.modules.get("torch")
    return issubclass(kind, np.ndarray) or (torch is not None and issubclass(kind, torch.Tensor))


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
