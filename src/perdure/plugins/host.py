"""What the plug-ins share: how a run resumes whose loop belongs to another library, the host."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import numpy as np

from perdure.checkpoint.manager import CheckpointManager
from perdure.checkpoint.manager_options import Restored
from perdure.errors import MissingExtraError, StateError, warn_caller
from perdure.state.per_rank import PerRank
from perdure.state.process_random import capture, restore_all

GeneratorStates = dict[str, np.ndarray[Any, Any]]

_EPOCH_BEGAN = "epoch_began"
_LOADER = "loader"  # beside the generators of the process: the one that shuffles


class HostRun:
    """The run of a loop of another library. `resumed` is its newest good checkpoint until a step.

    The host draws the batch of a step before it asks for a save, and a resumed loop draws it again,
    so the generators of that moment continue. Each of several processes (rank `index` of `count`) has
    its own generators, and its own value in `of_process`.
    """

    def __init__(self, manager: CheckpointManager, index: int, count: int) -> None:
        manager.claim()
        self.manager = manager
        self._index = index
        self.resumed: Restored | None = manager.restore() if manager.all_steps() else None
        if self.resumed is not None:
            require_count(str(manager.directory), len(self.resumed.state[_EPOCH_BEGAN]), count)
        self._saved = None if self.resumed is None else self.resumed.step
        self._at_save = generator_states()
        self._epoch_began: GeneratorStates = {}

    def of_process(self, name: str) -> Any:
        """The value that this process had in the member `name`, a `PerRank`."""
        assert self.resumed is not None
        return self.resumed.state[name][f"rank{self._index}"]

    def restore(self, members: Mapping[str, Any], read_only: str) -> None:
        """Restore the objects of the host, by name, or MismatchError; `read_only` is only read."""
        assert self.resumed is not None
        names = members.keys() | (self.resumed.state.keys() - {read_only, _EPOCH_BEGAN})
        self.manager.restore(self.resumed.step, dict(members), leaves=sorted(names))

    def begin_epoch(self, shuffling: Any = None) -> None:
        """Note the generators with which an epoch begins; those of the interrupted one come back."""
        if self.resumed is not None:
            states = dict(self.of_process(_EPOCH_BEGAN))
            if (state := states.pop(_LOADER, None)) is not None:
                shuffling.set_state(sys.modules["torch"].from_numpy(state.copy()))
            restore_generators(states)
        self._epoch_began = generator_states()
        if shuffling is not None:
            self._epoch_began[_LOADER] = shuffling.get_state().numpy()

    def between_steps(
        self, step: int, state: Callable[[], dict[str, Any]], *, may_save: bool = True
    ) -> None:
        """Save `state()` if it is time and the step is whole; exit with status 75 after a signal."""
        is_preempted = self.manager.reached_preemption(step)
        if self.resumed is not None:
            self.resumed = None
            restore_generators(self._at_save)
            if is_preempted:  # nothing was trained since
                self.manager.exit_preempted()
        elif step and may_save:
            if is_preempted:
                self.manager.save_and_exit(step, self._whole(state))
            if self.manager.should_save(step):
                self.manager.save(step, self._whole(state))
                self._saved = step

    def finish(self, step: int, state: Callable[[], dict[str, Any]]) -> None:
        if step != self._saved:
            self.manager.save(step, self._whole(state), force=True)

    def _whole(self, state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        return state() | {_EPOCH_BEGAN: PerRank(self._epoch_began)}


@contextmanager
def manager_of(
    run: str | os.PathLike[str] | CheckpointManager, count: int, **options: Any
) -> Iterator[CheckpointManager]:
    """The manager that the user has passed, or one with these options for a run directory, of the
    group of the host's `count` processes."""
    if isinstance(run, CheckpointManager):
        yield run
        return
    with CheckpointManager(run, processes=_processes_of(count), **options) as manager:
        yield manager


def _processes_of(count: int) -> Any:
    """The group of `count` processes that the host has made; None for one process."""
    if count == 1:
        return None
    from perdure.distribute import initialize_distributed

    return initialize_distributed("torch")


def require_count(what: str, saved: int, count: int) -> None:
    """Refuse to resume a run on another number of processes."""
    if saved != count:
        raise StateError(
            f"{what}: expected {saved} processes, as the run had, found {count}. With another number "
            f"each step would have other examples. Start as many again; a loop with a strategy or "
            f"`perdure.torch.LogicalReplicas` keeps its bits on any number."
        )


def share_buffers(accelerator: Any, models: Iterable[Any]) -> None:
    """Give all processes of an Accelerator the buffers of the first, as DDP does before each forward
    pass: statistics of BatchNorm, for instance, which differ until then."""
    shares = getattr(accelerator.ddp_handler, "broadcast_buffers", True)
    if accelerator.distributed_type.startswith("MULTI_") and shares:
        for buffer in (buffer for model in models for buffer in model.buffers()):
            sys.modules["torch"].distributed.broadcast(buffer, 0)


def generator_states() -> GeneratorStates:
    """The present state of each random generator of the process, by its name: a member of a state."""
    return {name: np.frombuffer(bytearray(state), np.uint8) for name, state in capture().items()}


def restore_generators(states: Mapping[str, np.ndarray[Any, Any]]) -> None:
    for note in restore_all({name: state.tobytes() for name, state in states.items()}):
        warn_caller(note)


def keeps_workers(loaders: Iterable[Any]) -> bool:
    return any(getattr(loader, "persistent_workers", False) for loader in loaders)


def require_new_workers(is_kept: bool, remedy: str) -> None:
    if is_kept:
        raise StateError(
            f"persistent_workers: expected False, found True. A resumed process starts new workers, "
            f"which draw other random numbers and change the order of the data. {remedy}"
        )


def require_version(extra: str, package: str, first: str, before: str) -> None:
    """Raise `MissingExtraError` unless `package` is installed, from `first` on and below `before`."""
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
    match = re.match(r"[0-9]+(?:\.[0-9]+)*", release)
    return tuple(map(int, match[0].split("."))) if match else ()
