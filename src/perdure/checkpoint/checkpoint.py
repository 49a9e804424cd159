"""`Checkpoint`: named members that are saved and restored as one state; and reads without a manager."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from perdure.checkpoint.address import find_step
from perdure.checkpoint.arguments import step_number
from perdure.checkpoint.caller_warning import warn_caller
from perdure.checkpoint.restore_source import load_good
from perdure.checkpoint.restorer import warn_of_skipped
from perdure.errors import ArgumentError, StepNotFoundError
from perdure.state import AttributeState, flatten, unflatten
from perdure.state import restore as restore_state
from perdure.state.epoch_ends import load_epoch_ends
from perdure.state.restore_request import RestoreRequest
from perdure.store import Loaded, Run, Storage
from perdure.store.loading import Needs
from perdure.store.selection import Selection


class Checkpoint(AttributeState):
    """A state of named members: `Checkpoint(model=model, optimizer=optimizer, epoch=0)`.

    Members are attributes. `CheckpointManager.save` and `restore` take it as a state: modules and
    optimizers in it are restored in place, other members are replaced.

    Raises:
        AttributeError: A member has the name of a method.
    """

    def __init__(self, **members: Any) -> None:
        for name, member in members.items():
            if hasattr(type(self), name):
                raise AttributeError(
                    f"a member cannot be called {name!r}: that is a method of Checkpoint."
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
        """Commit the members as `step` of a run directory; durable on return.

        The members are not copied first: if another thread changes them meanwhile, the checkpoint is
        readable and holds values from before and after the change.

        Args:
            directory: Path, URL or `Storage` of the run directory; created if it is missing.
            step: An integer from 0.
            codec: "shuffle-zstd" stores chunks in fewer bytes where it can; needs the extra `zstd`.

        Returns:
            The fingerprint.

        Raises:
            StoreError: As `CheckpointManager.save`.
        """
        step = step_number(step)
        with Run(directory, create=True, codec=codec) as run:
            saved = run.save(step, flatten(self)).fingerprint
            for note in run.notes:
                warn_caller(note)
            return saved

    def restore(self, directory: str | os.PathLike[str] | Storage, step: int | None = None) -> int:
        """Restore the members. Changes nothing in the run directory.

        Args:
            directory: The run directory, or one checkpoint of it: `RUN@STEP`, as
                `CheckpointManager.latest_checkpoint` gives it, or as for `perdure.load_checkpoint`.
            step: The step; None for the newest good checkpoint. Newer ones that are damaged are
                skipped with a warning.

        Returns:
            The step that was restored.

        Raises:
            MismatchError: The members do not fit.
            StepNotFoundError: There is no such checkpoint.
            CorruptionError: The `step` that was asked for is damaged, or all are.
            UnreachableError: A checkpoint cannot be read now.
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

    Changes nothing in the run directory. An empty plain dict of the state is left out.

    Args:
        directory: The run directory, or one checkpoint of it: `RUN@STEP`, `RUN@latest`, `RUN@best`,
            `RUN@best:max:METRIC` or `RUN@best:min:METRIC`.
        step: The step; None for the newest good checkpoint. Newer ones that are damaged are skipped
            with a warning.
        leaves: Paths of leaves or of branches (`"model"` for all below it) and patterns
            (`"**/kernel"`): only their chunks are read.

    Raises:
        StepNotFoundError: There is no such checkpoint.
        CorruptionError: The `step` that was asked for is damaged, or all are.
        UnreachableError: A checkpoint cannot be read now.
    """
    wanted = RestoreRequest(Selection(leaves)).wanted() if leaves else None
    return unflatten(load_verified(directory, step, wanted).leaves)


def load_verified(
    directory: str | os.PathLike[str] | Storage,
    step: int | None = None,
    wanted: Callable[[str], bool] | None = None,
) -> Loaded:
    """Load `step`, or the newest good checkpoint, and warn about each newer one that is damaged.

    `directory` may name one checkpoint, as for `open_checkpoint`. Only leaves whose path `wanted`
    accepts are read. Raises `StepNotFoundError` if the run directory holds no checkpoint.
    """
    if directory is None:
        raise ArgumentError(
            "directory: expected a run directory, found None. `latest_checkpoint` is None before the "
            "first save; `CheckpointManager.restore_or_initialize` then starts from a fresh state."
        )
    run, step = find_step(directory, step)
    loaded = load_good(run, None, step, Needs(wanted)).loaded
    if loaded is None:
        raise StepNotFoundError(f"{run.where}: expected a checkpoint, found none. Save one first.")
    warn_of_skipped(run.where, loaded)
    manifest = loaded.manifest
    where = f"{run.where}: step {manifest.step}"
    load_epoch_ends(loaded.leaves, manifest.process_leaves, where)
    return loaded
