"""The tensors of a module from the leaves of a checkpoint, without the module."""

from __future__ import annotations

from typing import Any

import msgspec

from perdure.errors import MismatchError
from perdure.state.object_restore import ObjectStates
from perdure.store.leaf import Leaves


def module_tensors(leaves: Leaves, branch: str) -> dict[str, Any]:
    """The values of the module at `branch` by dotted name; its arrays become tensors on the CPU.

    Raises:
        MismatchError: there is another object or a leaf at `branch`, or a random key of JAX below it.
    """
    if branch in leaves.containers or branch in leaves:
        raise MismatchError(
            f"{branch}: expected a module, found "
            + (leaves[branch].describe() if branch in leaves else "the state of another object")
            + "; restore it with `CheckpointManager.restore`."
        )
    if keys := [path for path, leaf in leaves.items() if leaf.dtype.startswith("key<")]:
        raise MismatchError(f"{keys[0]}: PyTorch has nothing like a random key of JAX.")
    # In the checkpoint of a run on another device, entries name that device.
    containers = {
        path: msgspec.structs.replace(entry, arrays=entry.arrays and entry.arrays.partition("@")[0])
        for path, entry in leaves.containers.items()
    }
    strong = {path: leaf.strong() for path, leaf in leaves.items()}
    states = ObjectStates(Leaves(strong, containers), _refuse)
    return states.named_values(branch, "torch")


def _refuse(_: Any, path: str) -> Any:
    raise MismatchError(f"{path}: only the object that saved this can rebuild it.")
