"""The managers that callbacks of this process have open."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from perdure.checkpoint import CheckpointManager, ManagerOptions
from perdure.errors import ArgumentError

# By directory. An exception ends a `fit` without a word to its callbacks, and the next one must not
# find the directory locked by what is left of it.
_open: dict[str, CheckpointManager] = {}
# By directory too, the `params` of the callback. All callbacks of one `fit` share one such dict.
_params: dict[str, Any] = {}


def open_manager(
    directory: Any, params: Any, options: ManagerOptions | None = None, **more: Any
) -> CheckpointManager:
    """A manager for `directory`; one that an earlier `fit` of this process left is closed before.

    ArgumentError if another callback of the same `fit` (the same `params`) has it open.
    """
    # A backup holds the generators itself, as they were where `fit` resumes.
    options = replace(options or ManagerOptions(), save_random_state=False)
    manager = CheckpointManager(directory, options=options, **more)
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
    """Wait for the save under way and let others write; raises what the save raised."""
    _open.pop(manager.directory, None)
    _params.pop(manager.directory, None)
    manager.close()


def finish_others(manager: CheckpointManager) -> None:
    """Wait for the saves of all other managers; raises what they raised.

    A backup says that what happened before it need not be done again. So a checkpoint of a model that
    was saved before a backup is durable before it.
    """
    for other in [each for each in _open.values() if each is not manager]:
        other.wait_until_finished()
