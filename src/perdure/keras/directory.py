"""The managers that callbacks of this process have open."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from perdure.checkpoint import CheckpointManager, ManagerOptions

# By directory. An exception ends a `fit` without a word to its callbacks, and the next one must not
# find the directory locked by what is left of it.
_open: dict[str, CheckpointManager] = {}


def open_manager(
    directory: Any, options: ManagerOptions | None = None, **more: Any
) -> CheckpointManager:
    """A manager for `directory`; one that is left over in this process is closed before."""
    # A backup holds the generators itself, as they were where `fit` resumes.
    options = replace(options or ManagerOptions(), save_random_state=False)
    manager = CheckpointManager(directory, options=options, **more)
    if (left := _open.pop(manager.directory, None)) is not None:
        left.close()
    _open[manager.directory] = manager
    return manager


def close_manager(manager: CheckpointManager) -> None:
    """Wait for the save under way and let others write; raises what the save raised."""
    _open.pop(manager.directory, None)
    manager.close()


def finish_others(manager: CheckpointManager) -> None:
    """Wait for the saves of all other managers; raises what they raised.

    A backup says that what happened before it need not be done again. So a checkpoint of a model that
    was saved before a backup is durable before it.
    """
    for other in [each for each in _open.values() if each is not manager]:
        other.wait_until_finished()
