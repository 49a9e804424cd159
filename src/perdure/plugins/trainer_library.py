"""What the plug-ins share: how a run resumes whose loop belongs to a trainer library."""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from typing import Any, TypeVar

import numpy as np

from perdure.checkpoint.manager import CheckpointManager
from perdure.checkpoint.manager_options import Restored
from perdure.digests import digest
from perdure.errors import MissingExtraError, StateError, warn_caller
from perdure.runtime.process_group import group_of
from perdure.state import bits
from perdure.state.extra_members import ExtraMembers, Restoring, load_orders
from perdure.state.generators import read_generator, split_off, write_generator
from perdure.state.per_rank import PerRank, rank_context
from perdure.state.process_random import capture, restore_all
from perdure.state.program_code import held_generators
from perdure.state.walk import Walk
from perdure.store.leaf import Leaf, Leaves

T = TypeVar("T")
GeneratorStates = dict[str, np.ndarray[Any, Any]]

_EPOCH_BEGAN = "epoch_began"
_LOADING = "loading"
_OTHERS = "others"  # in the member `_LOADING`
_PARTS = (
    "dataset",
    "collate_fn",
    "sampler",
    "batch_sampler",
    "generator",
    "synchronized_generator",
)
"""What a loader draws random numbers in."""


class LibraryRun:
    """The run of a library's loop. `resumed` is its newest good checkpoint until a step.

    The library draws the batch of a step before it asks for a save, and a resumed loop draws it again,
    so the generators of that moment continue. Each of several processes (rank `index` of `count`) has
    its own generators, and its own value in `process_value`.
    """

    def __init__(self, manager: CheckpointManager, index: int, count: int) -> None:
        manager.claim()
        self.manager = manager
        self.loading, self._others = Loading(), Loading("the data of another loader")
        self._index = index
        self.resumed: Restored | None = manager.restore() if manager.all_steps() else None
        if self.resumed is not None:
            require_count(str(manager.directory), len(self.resumed.state[_EPOCH_BEGAN]), count)
        self._saved = None if self.resumed is None else self.resumed.step
        self._at_save = generator_states()
        self._epoch_began: GeneratorStates = {}
        self._is_new_epoch = False

    def load_from(self, loader: Any, *others: Any) -> None:
        """Take the batches from `loader`, whose generators have their state of the save until it loads;
        so have the generators of the `others`, such as loaders of evaluations."""
        self.loading.of(loader)
        self._others.of(*others)
        if self.resumed is not None:
            self._restore_loading("now")

    def process_value(self, name: str) -> Any:
        """The value that this process had in the member `name`, a `PerRank`."""
        assert self.resumed is not None
        return self.resumed.state[name][f"rank{self._index}"]

    def _restore_loading(self, when: str) -> None:
        # Without a generator the states are an empty dict, which is in no checkpoint.
        states = self.process_value(_LOADING)
        self.loading.restore(states.get(when, {}))
        if when == "now":
            self._others.restore(states.get(_OTHERS, {}))

    def begin(self, members: Mapping[str, Any], *read_only: str) -> None:
        """Begin with the library's objects, by name. A resumed run restores them, or MismatchError;
        its members `read_only` are only read."""
        if (resumed := self.resumed) is None:
            self.manager.resume_members(members)
            return
        names = members.keys() | (resumed.state.keys() - {*read_only, _EPOCH_BEGAN, _LOADING})
        if names:
            self.manager.resume_members(members, resumed.step, sorted(names))

    def begin_epoch(self, *, is_new: bool = False) -> None:
        """Note the generators with which an epoch begins; an interrupted epoch gets its generators
        back. An epoch that `is_new` begins at the save, and has not drawn its order yet."""
        self._is_new_epoch = is_new
        if self.resumed is not None:
            restore_generators(self.process_value(_EPOCH_BEGAN))
            self._restore_loading("began")
        self.loading.begin_epoch()
        self._epoch_began = generator_states()

    def must_load_again(self, loader: Any) -> bool:
        """Whether the batches that the checkpoint has seen must be loaded: that has drawn random
        numbers in some process, or it happens in workers, which nobody can ask."""
        assert self.resumed is not None
        if type(loader).__name__ == "DataLoaderDispatcher":
            # Accelerate 1.15 skips so many batches of all processes together, which are too few.
            return True
        has_drawn = (each["has_drawn"] for each in self.resumed.state[_LOADING].values())
        return bool(getattr(loader, "num_workers", 0)) or any(has_drawn)

    def between_steps(
        self, step: int, state: Callable[[], dict[str, Any]], *, may_save: bool = True
    ) -> None:
        """Save `state()` if it is time and the step is whole; exit with status 75 after a signal."""
        is_preempted = self.manager.reached_preemption(step)
        if self.resumed is not None:
            if not self._is_new_epoch:
                self._restore_loading("now")
                restore_generators(self._at_save)
            self.resumed = None
            if is_preempted:  # nothing was trained since
                self.manager.exit_preempted()
        elif step and may_save:
            if is_preempted:
                self.manager.save_and_exit(step, self._whole(state))
            if self.manager.should_save(step):
                self.manager.save(step, self._whole(state))
                self._saved = step

    def finish(
        self, step: int, state: Callable[[], dict[str, Any]], *, may_save: bool = True
    ) -> None:
        """Save the end; exit with status 75 after a signal in the last step: what the program does
        next may take longer than it has."""
        is_preempted = self.manager.reached_preemption(step)
        if step != self._saved and may_save:
            self.manager.save(step, self._whole(state), force=True)
        if is_preempted:
            self.manager.exit_preempted()

    def _whole(self, state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        loading = self.loading.state() | {_OTHERS: self._others.between_passes()}
        extra = {_EPOCH_BEGAN: self._epoch_began, _LOADING: loading}
        return state() | {name: PerRank(value) for name, value in extra.items()}


class Loading:
    """The random numbers that are drawn while the batches of an epoch are loaded (augmentation).

    The first load of an epoch draws its order, from the generators of the process and from those that
    the parts of a loader hold. From then on loading has streams of its own, which are split off there
    and from which nothing else draws, such as a step or an evaluation. So a resumed run that loads the
    batches of the epoch again draws the same ones, without training.
    """

    def __init__(self, what: str = "the data") -> None:
        self._what = what
        self._parts: list[Any] = []
        self._held: list[Any] = []
        self._began: dict[str, Any] = {}
        self._own: list[Any] | None = None
        self._has_drawn = False

    def of(self, *loaders: Any) -> None:
        """Take the batches from these loaders."""
        self._parts = [getattr(loader, name, None) for loader in loaders for name in _PARTS]
        self._held = self._found()

    def _found(self) -> list[Any]:
        process_generators = set(map(id, _generators_of_process()))
        return [each for each in held_generators(self._parts) if id(each) not in process_generators]

    def begin_epoch(self) -> None:
        self._began = self._now()
        self._own, self._has_drawn = None, False

    def state(self) -> dict[str, Any]:
        """The member of a state: how the epoch began, and how it is now."""
        if self._own is not None and list(map(id, self._found())) != list(map(id, self._held)):
            raise StateError(
                "the data: the dataset, its sampler or its `collate_fn` has exchanged a random "
                "generator within an epoch, which a resumed run would not repeat. Seed the one that "
                "it has (`rng.seed(...)`), or exchange it where an epoch begins (`set_epoch`)."
            )
        return {"has_drawn": self._has_drawn, "began": self._began, "now": self._now()}

    def between_passes(self) -> dict[str, Any]:
        """The states of the generators of loaders that are not within a pass."""
        self._find_again()
        return self._now()

    def _find_again(self) -> None:
        """Those that `set_epoch` may have exchanged."""
        if len(found := self._found()) > len(self._held):
            raise StateError(
                f"{self._what}: the dataset, its sampler or its `collate_fn` has made a random "
                "generator for its first batch. A resumed run would begin its epoch with another "
                "one. Make it when you make that object (a collator of transformers: "
                "`collator.create_rng()`)."
            )
        self._held = found

    def _now(self) -> dict[str, Any]:
        """The states of the generators that the loaders hold."""
        return {f"{number}": read_generator(each) for number, each in enumerate(self._held)}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Give the generators that the loaders hold the states of "began" or "now"."""
        torch = sys.modules["torch"]
        if len(states) != len(self._held):
            raise StateError(
                f"{self._what}: expected {len(states)} random generators in the dataset, its sampler "
                f"and its `collate_fn`, as the run had, found {len(self._held)}. Without them a "
                f"resumed run would see other batches. Make the same loader, and its generators at "
                f"once."
            )
        for number, generator in enumerate(self._held):
            state = states[f"{number}"]
            is_bare = isinstance(generator, torch.Generator) and not torch.is_tensor(state)
            write_generator(generator, torch.from_numpy(state.copy()) if is_bare else state)

    def apart(self, load: Callable[[], T]) -> T:
        """`load()`; the numbers that it draws are none of the training."""
        if self._own is None:
            loaded = load()
            self._find_again()
            self._own = list(map(split_off, [*_generators_of_process(), *self._held]))
            return loaded
        generators = [*_generators_of_process(), *self._held]
        training, before = list(map(read_generator, generators)), self._own
        _write(generators, before)
        try:
            return load()
        finally:
            self._own = list(map(read_generator, generators))
            self._has_drawn = self._has_drawn or not bits.same(before, self._own)
            _write(generators, training)


class LoaderInPlace:
    """Replaces a loader of a library and has its attributes. A subclass decides what a pass loads."""

    def __init__(self, loader: Any, loading: Loading) -> None:
        self._loader, self._loading = loader, loading

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)


def _generators_of_process() -> list[Any]:
    """Those of Python, NumPy and PyTorch from which the functions of their modules draw."""
    numpy: Any = np.random.get_state
    python: Any = random.getstate
    return [python.__self__, numpy.__self__, sys.modules["torch"].default_generator]


def _write(generators: Iterable[Any], states: Iterable[Any]) -> None:
    for generator, state in zip(generators, states, strict=True):
        write_generator(generator, state)


@contextmanager
def manager_of(
    run: str | os.PathLike[str] | CheckpointManager, count: int, **options: Any
) -> Iterator[CheckpointManager]:
    """The manager that the user has passed, or one with these options for a run directory, of the
    group of the library's `count` processes."""
    if isinstance(run, CheckpointManager):
        if (found := run._processes.count) != count:
            raise StateError(
                f"{run.directory}: expected a manager of {count} processes, as many as the framework "
                f"of the loop counts, found {found}. Make it with "
                f"`processes=perdure.torch.process_group()`; Accelerate counts one in each process if "
                f"`PartialState()` was made before `Accelerator(cpu=True)`: make the Accelerator first."
            )
        yield run
        return
    with CheckpointManager(run, processes=_processes_of(count), **options) as manager:
        yield manager


def _processes_of(count: int) -> Any:
    """The group of `count` processes that the library has made; None for one process."""
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


def arrange_buckets(modules: Iterable[Any]) -> None:
    """Let each DDP module add its gradients in one order from the first step of the process on; see
    `perdure.state.torch_buckets`. A collective, or StateError in all processes."""
    from perdure.state.torch_buckets import arrange, not_arranged, refuse_fixed

    modules = [*modules]
    refuse_hook_states(modules)
    found = not_arranged({f"model {number}": module for number, module in enumerate(modules)})
    refuse_fixed(found)
    arrange(found.values())


def refuse_hook_states(modules: Iterable[Any]) -> None:
    """UnsupportedLeafError for a DDP module whose communication hook keeps what no checkpoint gets: a
    plug-in saves the module inside, which does not show it."""
    from perdure.state.torch_state import refuse_hook_state

    for module in modules:
        refuse_hook_state(module)


def share_buffers(accelerator: Any, models: Iterable[Any]) -> None:
    """Give all processes of an Accelerator the buffers of the first, as DDP does before each forward
    pass: statistics of BatchNorm, for instance, which differ until then."""
    shares = getattr(accelerator.ddp_handler, "broadcast_buffers", True)
    if accelerator.distributed_type.startswith("MULTI_") and shares:
        for buffer in (buffer for model in models for buffer in model.buffers()):
            sys.modules["torch"].distributed.broadcast(buffer, 0)


class LibraryExtras:
    """The extra members, without generators, of objects that a library restores by their `state_dict`.
    `capture` returns plain values, of this process alone."""

    def __init__(self, index: int = 0, count: int = 1) -> None:
        self._rank = index, count
        self._members = ExtraMembers(save_random_state=False)

    def observe(self, state: Any) -> None:
        """The training begins with these objects: what it changes from then on is captured."""
        with rank_context(*self._rank):
            self._members.observe(state)

    def capture(self, state: Any) -> dict[str, Any]:
        """By path dtype, shape and bytes of each value; an error if one could not be restored."""
        with rank_context(*self._rank):
            captured = self._members.capture(Walk.of(state), Leaves(), 0)
        torch = sys.modules["torch"]
        return {
            path: (
                leaf.dtype,
                leaf.shape,
                torch.from_numpy(np.frombuffer(bytearray(leaf.data), "u1")),
            )
            for path, leaf in captured.items()
        }

    def restore(self, state: Any, captured: Mapping[str, Any], where: str) -> None:
        """Give the objects what was captured, after the library has restored them; StateError."""
        leaves = {
            path: Leaf(dtype, tuple(shape), memoryview(data.numpy()), frozen=True)
            for path, (dtype, shape, data) in captured.items()
        }
        restoring = Restoring(leaves, lambda path: path, where, group_of(None))
        load_orders(restoring, leaves)
        with rank_context(*self._rank):
            for note in self._members.restore(restoring, Walk.of(state)):
                warn_caller(note)


def generator_states() -> GeneratorStates:
    """The present state of each random generator of the process, by its name: a member of a state."""
    return {name: np.frombuffer(bytearray(state), np.uint8) for name, state in capture().items()}


def restore_generators(states: Mapping[str, np.ndarray[Any, Any]]) -> None:
    for note in restore_all({name: state.tobytes() for name, state in states.items()}):
        warn_caller(note)


def digest_of(value: Any) -> str:
    """Equal in processes with equal states; empty for one with values that have no exact form."""
    try:
        return str(digest(value))
    except StateError:
        return ""


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
