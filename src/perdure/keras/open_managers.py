"""The managers that the Keras callbacks of this process have open."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from perdure.checkpoint import CheckpointManager, ManagerOptions
from perdure.errors import ArgumentError

# By directory. An exception ends a `fit` without calling its callbacks, and the next `fit` must not
# find the directory locked by the manager of the first.
_open: dict[str, CheckpointManager] = {}
# By directory: the `params` of the callback. All callbacks of one `fit` share one such dict.
_params: dict[str, Any] = {}


def open_manager(
    directory: Any, params: Any, options: ManagerOptions | None = None, **arguments: Any
) -> CheckpointManager:
    """A manager for `directory`. The one that an earlier `fit` of this process left is closed first.

    Raises:
        ArgumentError: Another callback of the same `fit` (the same `params`) has it open.
    """
    # A backup holds the random generators itself, as they are at the batch at which `fit` resumes.
    options = replace(options or ManagerOptions(), save_random_state=False)
    # No strategy of perdure computes the state of a `fit`.
    manager = CheckpointManager(directory, options=options, **{"recipe": {}, **arguments})
    if manager.directory in _open:
        if params is not None and _params.get(manager.directory) is params:
            manager.close()
            raise ArgumentError(
                f"{manager.directory}: two callbacks of this `fit` save into this directory. Give each "
                f"BackupAndRestore and each ModelCheckpoint a directory of its own."
            )
        _open.pop(manager.directory).close()
    _open[manager.directory], _params[manager.directory] = manager, params
    return manager


def close_manager(manager: CheckpointManager) -> None:
    """Wait for the current save and unlock the directory. Raises what the save raised."""
    _open.pop(manager.directory, None)
    _params.pop(manager.directory, None)
    manager.close()


def finish_others(manager: CheckpointManager) -> None:
    """Wait for the saves of all other managers. Raises what they raised.

    A resume does not repeat what happened before a backup. So a checkpoint that was saved before a
    backup must be durable before it.
    """
    for other in [open_ for open_ in _open.values() if open_ is not manager]:
        other.wait_until_finished()
