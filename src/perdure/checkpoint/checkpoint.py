"""`Checkpoint`: named members saved and restored as one state."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from perdure.checkpoint.arguments import step_number
from perdure.errors import ArgumentError, StepNotFoundError
from perdure.state import AttributeState, flatten, part_filter, part_names, unflatten
from perdure.state import restore as restore_state
from perdure.store import Loaded, Run, Storage
from perdure.store.urls import split_step


class Checkpoint(AttributeState):
    """Groups what belongs together: `Checkpoint(model=model, optimizer=optimizer, epoch=0)`.

    Members are attributes. It is itself a state, for `CheckpointManager.save` and `restore`:
    modules and optimizers in it are restored in place, other members are replaced.
    """

    def __init__(self, **members: Any) -> None:
        for name, member in members.items():
            if hasattr(type(self), name):
                raise AttributeError(
                    f"a member cannot be called {name!r}; Checkpoint has a method of it."
                )
            setattr(self, name, member)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def state_dict(self) -> dict[str, Any]:
        """The members by name."""
        return dict(vars(self))

    def load_state_dict(self, members: dict[str, Any]) -> None:
        """Replace members."""
        vars(self).update(members)

    def save(
        self, directory: str | os.PathLike[str] | Storage, step: int, codec: str | None = None
    ) -> str:
        """Commit the members as `step` of a run directory; durable on return. Gives the fingerprint.

        `codec` ("shuffle-zstd", with the extra `zstd`) stores them smaller where it can.
        They are read where they lie: if another thread changes them meanwhile, the checkpoint is
        readable and holds values from before and after the change.
        """
        step = step_number(step)
        with Run(directory, create=True, codec=codec) as run:
            saved = run.save(step, flatten(self)).fingerprint
            for note in run.notes:
                warnings.warn(note, stacklevel=2)
            return saved

    def restore(self, directory: str | os.PathLike[str] | Storage, step: int | None = None) -> int:
        """Restore the members from `step`, or from the newest good checkpoint; returns its step.

        `directory` may name one checkpoint: `RUN@STEP`, as `CheckpointManager.latest_checkpoint` does.
        Changes nothing in the run directory. Raises `MismatchError` when the members do not fit.
        """
        loaded = load_verified(directory, step)
        restore_state(self, loaded.leaves)
        return loaded.manifest.step


def load_checkpoint(
    directory: str | os.PathLike[str] | Storage,
    step: int | None = None,
    leaves: str | Iterable[str] | None = None,
) -> Any:
    """A checkpoint as nested dicts of NumPy arrays and Python scalars, without any framework.

    `step` None means the newest good one; `directory` may name one itself: `RUN@STEP`. `leaves` names
    leaf paths, or branches of the tree (`"model"` for all below it); only their chunks are read.
    Changes nothing in the run directory.
    """
    wanted = part_filter(part_names(leaves)) if leaves else None
    return unflatten(load_verified(directory, step, wanted).leaves)


def load_verified(
    directory: str | os.PathLike[str] | Storage,
    step: int | None = None,
    wanted: Callable[[str], bool] | None = None,
) -> Loaded:
    """Load `step`, or the newest good checkpoint, and warn about each newer one that is damaged.

    `directory` may name one checkpoint: `RUN@STEP`. Only leaves whose path `wanted` accepts are read.
    Raises `StepNotFoundError` if the run directory holds no checkpoint.
    """
    if directory is None:
        raise ArgumentError(
            "directory: expected a run directory, found None. `latest_checkpoint` is None before the "
            "first save; `CheckpointManager.restore_or_initialize` starts afresh then."
        )
    if isinstance(directory, str):
        directory, named = split_step(directory)
        if named is not None and step is not None and named != step:
            raise ArgumentError(
                f"step: expected {named}, which `{directory}@{named}` names, or None, found {step}."
            )
        step = named if step is None else step
    run = Run(directory)
    loaded = run.load_newest(wanted) if step is None else run.load(step_number(step), wanted)
    if loaded is None:
        raise StepNotFoundError(f"{run.where}: expected a checkpoint, found none. Save one first.")
    for bad, reason in loaded.skipped:
        warnings.warn(f"{run.where}: step {bad} is damaged and was skipped: {reason}", stacklevel=3)
    return loaded
