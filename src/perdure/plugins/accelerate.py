"""For users of Accelerate: a loop over batches that resumes by itself, in the middle of an epoch too.

    for step, batch in perdure.plugins.accelerate.batches(accelerator, loader, "runs/a", epochs=3):

In this module, too, `import accelerate` means the library.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from perdure.checkpoint.manager import CheckpointManager
from perdure.checkpoint.manager_options import Restored
from perdure.errors import StateError, missing_extra
from perdure.plugins.host import (
    GeneratorStates,
    generator_states,
    has_persistent_workers,
    newest_checkpoint,
    persistent_workers_error,
    require_version,
    restore_generators,
    restore_members,
)

require_version("accelerate", "accelerate", "1.1", "2")
try:
    import torch
    from accelerate import Accelerator, skip_first_batches
except ModuleNotFoundError as error:
    raise missing_extra("accelerate", error) from error

__all__ = ["batches"]

_LOADER = "loader"  # beside the generators of the process: the one that shuffles


def batches(
    accelerator: Accelerator,
    loader: Any,
    run: str | os.PathLike[str] | CheckpointManager,
    *,
    epochs: int,
) -> Iterator[tuple[int, Any]]:
    """The batches of all epochs, after those that the newest good checkpoint has seen.

    When the loop asks for the next batch, the step that it has finished is saved if it is time: what
    `accelerator.prepare` and `register_for_checkpointing` were given, the gradient scaler, the random
    generators and the position in the data. After SIGTERM it is saved, and the process exits with
    status 75. A step that has only accumulated gradients is not saved.

    Args:
        accelerator: Has prepared everything that the loop changes.
        loader: The prepared loader.
        run: The run directory, where every 500th step is saved; or a manager.
        epochs: How often the loop sees all batches.

    Yields:
        The number of batches before this one, over all epochs, and the batch.

    Raises:
        StateError: There are several processes, a loader has `persistent_workers=True`, or `loader` is
            not prepared.
    """
    if accelerator.num_processes > 1:
        raise StateError(
            f"perdure.plugins.accelerate: expected one process, found {accelerator.num_processes}. "
            f"The data position of several has not been proved; use `accelerator.save_state`, or a "
            f"loop of your own with perdure.plugins.dcp."
        )
    if not any(loader is prepared for prepared in accelerator._dataloaders):
        raise StateError(
            f"perdure.plugins.accelerate: expected the loader that `accelerator.prepare` has returned "
            f"for a DataLoader, found a {type(loader).__qualname__} that it has not prepared."
        )
    if has_persistent_workers(accelerator._dataloaders):
        raise persistent_workers_error("Make each DataLoader with persistent_workers=False.")
    if isinstance(run, CheckpointManager):
        yield from _batches(accelerator, loader, run, epochs)
        return
    with CheckpointManager(run, save_interval_steps=500) as manager:
        yield from _batches(accelerator, loader, manager, epochs)


def _batches(
    accelerator: Any, loader: Any, manager: CheckpointManager, epochs: int
) -> Iterator[tuple[int, Any]]:
    resumed = newest_checkpoint(manager)
    at_save = generator_states()
    step = first_epoch = finished = 0
    if resumed is not None:
        restore_members(manager, resumed, _members(accelerator), {"position", "epoch_began"})
        step, position = resumed.step, resumed.state["position"]
        first_epoch, finished = position["epoch"], position["finished"]
        accelerator.step = position["accumulated"]
    for epoch in range(first_epoch, epochs):
        if resumed is not None:
            _set_generators(loader, resumed)
        began = _generators(loader)
        loader.set_epoch(epoch)
        source = skip_first_batches(loader, finished) if finished else loader
        for batch in source:
            state = {"position": _position(accelerator, epoch, finished), "epoch_began": began}
            is_preempted = manager.reached_preemption(step)
            if resumed is not None:  # this batch was drawn before the save, too
                restore_generators(at_save)
                resumed = None
                if is_preempted:  # nothing was trained since
                    manager.exit_preempted()
            elif step and accelerator.sync_gradients:
                if is_preempted:
                    manager.save_and_exit(step, _members(accelerator) | state)
                if manager.should_save(step):
                    manager.save(step, _members(accelerator) | state)
            yield step, batch
            step, finished = step + 1, finished + 1
        finished = 0
    if step not in manager.all_steps()[-1:]:
        end = {"position": _position(accelerator, epochs, 0), "epoch_began": _generators(loader)}
        manager.save(step, _members(accelerator) | end, force=True)


def _members(accelerator: Any) -> dict[str, Any]:
    """What Accelerate's own `save_state` saves, without its wrappers, which add nothing."""
    members = {
        "models": [accelerator.unwrap_model(model) for model in accelerator._models],
        "optimizers": [optimizer.optimizer for optimizer in accelerator._optimizers],
        "schedulers": [scheduler.scheduler for scheduler in accelerator._schedulers],
        "scaler": accelerator.scaler,
        "objects": list(accelerator._custom_objects),
    }
    return {name: member for name, member in members.items() if member}


def _position(accelerator: Any, epoch: int, finished: int) -> dict[str, int]:
    return {"epoch": epoch, "finished": finished, "accumulated": accelerator.step}


def _generators(loader: Any) -> GeneratorStates:
    """The generators with which an epoch begins: they may decide its order."""
    states = generator_states()
    shuffling = getattr(loader, "synchronized_generator", None)
    if shuffling is not None:
        states[_LOADER] = shuffling.get_state().numpy()
    return states


def _set_generators(loader: Any, resumed: Restored) -> None:
    states = dict(resumed.state["epoch_began"])
    shuffling = states.pop(_LOADER, None)
    if shuffling is not None:
        loader.synchronized_generator.set_state(torch.from_numpy(shuffling.copy()))
    restore_generators(states)
