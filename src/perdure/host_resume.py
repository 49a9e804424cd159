"""How a plug-in resumes a run whose training loop belongs to another library.

The host makes its objects itself, and needs to know where it stands before it does. So the newest good
checkpoint is read first, and the objects are restored once they exist.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from perdure.checkpoint import CheckpointManager, Restored
from perdure.errors import StateError


def has_persistent_workers(loaders: Iterable[Any]) -> bool:
    """Whether one of these `DataLoader`s keeps its workers between epochs."""
    return any(getattr(loader, "persistent_workers", False) for loader in loaders)


def persistent_workers_error(remedy: str) -> StateError:
    """The refusal of a `DataLoader` that keeps its workers from one epoch to the next.

    A loader draws a seed for new workers from the generator that may also decide the order of the data.
    With `persistent_workers` only the first epoch of a process draws one, and the workers keep their
    generators from epoch to epoch. A resumed process has new workers, so that both its order and the
    random changes in its workers would differ.
    """
    return StateError(
        f"persistent_workers: expected False, found True. A resumed process starts new workers, which "
        f"draw other random numbers than workers that are kept from epoch to epoch, and their start "
        f"changes the order of the data. {remedy}"
    )


def newest_checkpoint(manager: CheckpointManager) -> Restored | None:
    """Claim the run, and read its newest good checkpoint without a target; None for a new run."""
    manager.claim()
    return manager.restore() if manager.all_steps() else None


def restore_members(
    manager: CheckpointManager,
    newest: Restored,
    members: Mapping[str, Any],
    read_only: Collection[str],
) -> None:
    """Restore the objects of the host in place.

    Args:
        manager: The manager of the run.
        newest: What `newest_checkpoint` has returned.
        members: The objects, by their names in the checkpoint.
        read_only: The names of the members that are only read from `newest`.

    Raises:
        MismatchError: An object does not fit, or a member exists only here or only in the checkpoint.
    """
    names = members.keys() | (newest.state.keys() - read_only)
    manager.restore(newest.step, dict(members), leaves=sorted(names))
