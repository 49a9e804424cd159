"""What the plug-ins share: how a run resumes whose training loop belongs to another library, the host.

The host makes its objects itself, and needs to know where it stands before it does. So the newest good
checkpoint is read first, and the objects are restored once they exist.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from importlib import metadata
from typing import Any

import numpy as np

from perdure.checkpoint.manager import CheckpointManager
from perdure.checkpoint.manager_options import Restored
from perdure.errors import MissingExtraError, StateError, warn_caller
from perdure.state.process_random import capture, encode, restore_all

GeneratorStates = dict[str, np.ndarray[Any, Any]]


def generator_states() -> GeneratorStates:
    """The present state of each random generator of the process, by its name: a member of a state."""
    return {
        name: np.frombuffer(bytearray(state), np.uint8) for name, state in encode(capture()).items()
    }


def restore_generators(states: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Restore generators; warns about each that cannot be restored."""
    for note in restore_all({name: state.tobytes() for name, state in states.items()}):
        warn_caller(note)


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


def require_version(extra: str, package: str, first: str, before: str) -> None:
    """Raise unless the installed release of `package` is at least `first` and below `before`.

    Args:
        extra: The extra of perdure that installs it.
        package: The name of the distribution.
        first: The first supported release, as "2.5".
        before: The first release that is not supported any more, as "3".

    Raises:
        MissingExtraError: The package is not installed, or has another release.
    """
    install = f"Install the extra: pip install 'perdure[{extra}]'."
    try:
        release = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise MissingExtraError(f"{package} is not installed. {install}", name=package) from None
    if not _numbers(first) <= _numbers(release) < _numbers(before):
        raise MissingExtraError(
            f"expected {package} from release {first} on and below {before}, found {release}. "
            f"{install}",
            name=package,
        )


def _numbers(release: str) -> tuple[int, ...]:
    """The leading numbers of a release: (2, 13, 0) of "2.13.0+cpu"."""
    match = re.match(r"[0-9]+(?:\.[0-9]+)*", release)
    return tuple(map(int, match[0].split("."))) if match else ()
