"""`Checkpoint`: named members that are saved and restored as one state; and reads without a manager."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from inspect import signature
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary, ref

import numpy as np

from perdure.checkpoint.address import find_step, refuse_checkpoint_name
from perdure.checkpoint.arguments import shown, step_number
from perdure.checkpoint.chunk_sharing import ChunkSharing
from perdure.checkpoint.manager_options import ManagerOptions
from perdure.checkpoint.restorer import load_good, warn_of_skipped
from perdure.checkpoint.retention import Retention
from perdure.errors import (
    ArgumentError,
    MismatchError,
    NotARunError,
    StepNotFoundError,
    warn_caller,
)
from perdure.state import AttributeState, flatten, is_state, unflatten
from perdure.state import restore as restore_state
from perdure.state.attribute_values import put_value
from perdure.state.extra_members import load_epoch_ends
from perdure.state.leaf_values import SCALARS
from perdure.state.paths import join_key, split_path
from perdure.state.restore_request import RestoreRequest
from perdure.state.walk import Walk
from perdure.store import Loaded, LocalStorage, Run, Storage
from perdure.store.format import MARKER
from perdure.store.loading import ReadRequest
from perdure.store.selection import Selection
from perdure.store.urls import name_at_step, open_storage
from perdure.tensorflow_names import TensorFlowNames, names_forms, refuse_arguments
from perdure.text import few

Directory = str | os.PathLike[str] | Storage
Init = TypeVar("Init", bound=Callable[..., None])

_ORDER = ("checkpoint", "directory", "max_to_keep", "keep_checkpoint_every_n_hours")


class RestoreStatus(int):
    """The step that `Checkpoint.restore` has restored, 0 if none, with the methods that TensorFlow
    has.

    `unused` has the leaves of the checkpoint that no member takes: a warning when the status is
    dropped, unless one of the methods was called.
    """

    unused: tuple[str, ...] = ()
    _where: str | None = None
    _is_expected = False

    @classmethod
    def of(cls, where: str | None, step: int, unused: Iterable[str] = ()) -> RestoreStatus:
        """The status of a restore from the checkpoint `where`; None if nothing was restored."""
        status = cls(step)
        status._where, status.unused = where, tuple(unused)
        return status

    def expect_partial(self) -> RestoreStatus:
        """Say that members of the checkpoint may be left out."""
        self._is_expected = True
        return self

    def assert_existing_objects_matched(self) -> RestoreStatus:
        """Raise `MismatchError` if nothing was restored. Members that the checkpoint lacks are no case:
        `restore` has refused them."""
        self._is_expected = True
        if self._where is None:
            raise MismatchError("expected a checkpoint to restore, found None: there is none yet.")
        return self

    assert_nontrivial_match = assert_existing_objects_matched

    def assert_consumed(self) -> RestoreStatus:
        """Raise `MismatchError` if nothing was restored, or the checkpoint has more members."""
        self.assert_existing_objects_matched()
        if self.unused:
            raise MismatchError(self._text())
        return self

    def _text(self) -> str:
        return (
            f"{self._where}: the Checkpoint has no members for {few(self.unused)}, which were not "
            f"restored. Add the members, or call `expect_partial()` on what `restore` returns."
        )

    def __del__(self) -> None:
        if self.unused and not self._is_expected:
            warn_caller(self._text())


class Checkpoint(AttributeState, TensorFlowNames):
    """A state of named members: `Checkpoint(model=model, optimizer=optimizer, epoch=0)`.

    Members are attributes; the optimizer of a compiled model of Keras comes with the model, as
    `model.optimizer`. `CheckpointManager.save` and `restore` take it as a state: modules,
    optimizers, NumPy arrays of one dtype and shape, and dicts and lists of plain values and such
    arrays are restored in place; other members are replaced. A manager may also be made for it, in
    TensorFlow's order: `CheckpointManager(checkpoint, directory, max_to_keep=3)`.
    """

    def __init__(self, *unnamed: Any, **members: Any) -> None:
        if unnamed:
            raise ArgumentError(
                f"Checkpoint: expected members by name, such as Checkpoint(model=model), found "
                f"{shown(unnamed[0])} without one."
            )
        for name, member in members.items():
            if hasattr(type(self), name):
                raise AttributeError(
                    f"a member cannot be called {name!r}: that is a method of Checkpoint."
                )
            setattr(self, name, member)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def implied_members(self) -> dict[str, Any]:
        """The optimizers of compiled models of Keras among the members, if no member is one, as
        `NAME.optimizer`."""
        kind, found = getattr(sys.modules.get("keras"), "Model", ()), dict[str, Any]()
        for name, model in vars(self).items():
            optimizer = getattr(model, "optimizer", None) if isinstance(model, kind) else None
            if optimizer is None or any(each is optimizer for each in vars(self).values()):
                continue
            if model.built and not optimizer.built and model.trainable_variables:
                optimizer.build(model.trainable_variables)
            found[f"{name}.optimizer"] = optimizer
        return found

    def state_dict(self) -> dict[str, Any]:
        """The members by name."""
        return dict(vars(self))

    def load_state_dict(self, members: dict[str, Any]) -> None:
        """Replace members."""
        vars(self).update(members)

    @names_forms("save")
    def save(
        self,
        directory: Directory | None = None,
        step: int | None = None,
        codec: str | None = None,
        *,
        file_prefix: str | os.PathLike[str] | None = None,
    ) -> str:
        """Commit the members as `step` of a run directory; durable on return, as `RUN@STEP`, which
        `restore` takes.

        The members are not copied first: if another thread changes them meanwhile, the checkpoint
        has values from before and after the change. Raises `StoreError` as
        `CheckpointManager.save`.

        Args:
            directory: Path, URL or `Storage` of the run directory; created if it is missing.
            step: An integer from 0; None for the one after the newest.
            codec: "shuffle-zstd" stores chunks in fewer bytes where it can; needs the extra `zstd`.
            file_prefix: TensorFlow's argument in place of `directory`, which is then its folder.
        """
        if file_prefix is not None and directory is None:
            directory = os.path.dirname(os.fspath(file_prefix)) or "."
        if directory is None:
            raise ArgumentError(
                "directory: expected a run directory, found none. With a manager call `manager.save`."
            )
        number = None if step is None else step_number(step)
        with Run(directory, create=True, codec=codec) as run:
            number = (run.newest_step() or 0) + 1 if number is None else number
            run.save(number, flatten(self))
            for note in run.notes:
                warn_caller(note)
            return name_at_step(run.where, number)

    @names_forms("save")
    def restore(self, directory: Directory | None, step: int | None = None) -> RestoreStatus:
        """Restore the members; returns the step. Changes nothing in the run directory.

        If a manager was made for this `Checkpoint`, and the checkpoint is one of its run, this is
        the manager's restore, which resumes the run exactly.

        Args:
            directory: The run directory, or one checkpoint of it: `RUN@STEP`, as
                `latest_checkpoint` gives it, or as for `perdure.load_checkpoint`. None restores
                nothing.
            step: The step; None for the newest good checkpoint. Damaged ones are skipped with a
                warning.

        Raises:
            MismatchError: The checkpoint lacks a member, or one does not fit.
            UnsupportedLeafError: A member cannot be restored: a model of Keras that is not built. Also
                with `directory=None`, if a manager was made for this `Checkpoint`.
            StepNotFoundError: There is no such checkpoint.
            CorruptionError: The `step` that was asked for is damaged, or all are.
            UnreachableError: A checkpoint cannot be read now.
        """
        manager = managers[self]() if self in managers else None
        if directory is None:
            if manager is not None:  # refuse what a save would, and a restore here later
                Walk(self)
            return RestoreStatus.of(None, 0)
        run, number = find_step(directory, step)
        if manager is not None and manager.directory == run.where:
            manager.wait_until_finished()  # `number` may be the step of the save under way
            newest = run.newest_step() if number is None else number
            paths = () if newest is None else (leaf.path for leaf in run.manifest(newest).leaves)
            unused = [path for path in paths if not self._takes(split_path(path))]
            restored = manager.restore(number, self, leaves=[*self._paths()] if unused else None)
            return RestoreStatus.of(name_at_step(run.where, restored.step), restored.step, unused)
        loaded = load_verified(directory, step)
        taken = loaded.leaves.select(lambda path: self._takes(split_path(path)))
        with kept_members(self):
            restore_state(self, taken)
        found = loaded.manifest.step
        if any(path.endswith("/iterators_index") for path in loaded.process_leaves):
            warn_caller(
                f"{run.where}: step {found}: the iterators of tf.data are where they were. A restore "
                f"by a manager brings them to their place: CheckpointManager(checkpoint, directory)."
            )
        return RestoreStatus.of(
            name_at_step(run.where, found), found, loaded.leaves.keys() - taken.keys()
        )

    def _takes(self, keys: list[str]) -> bool:
        """Whether a leaf at this path belongs to a member; `Checkpoint`s may be members of others."""
        name, *rest = keys
        member = vars(self).get(name)
        if member is None and name in self.implied_members():
            return True
        if rest and isinstance(member, Checkpoint):
            return member._takes(rest)
        return name in vars(self)

    def _paths(self, path: str = "") -> Iterator[str]:
        for name, member in vars(self).items():
            below = join_key(path, name)
            yield from member._paths(below) if isinstance(member, Checkpoint) else [below]
        yield from (join_key(path, name) for name in self.implied_members())


@contextmanager
def kept_members(state: Any) -> Iterator[None]:
    """A restore inside keeps the objects of a `Checkpoint` that the program may hold: its NumPy arrays,
    and its dicts and lists of plain values and NumPy arrays, get the restored values in place."""
    members = vars(state) if isinstance(state, Checkpoint) else {}
    in_place = (np.ndarray, dict, list, deque)
    before = {n: each for n, each in members.items() if type(each) in in_place and _is_plain(each)}
    yield
    for name, held in before.items():
        members[name] = put_value(held, members[name])


def _is_plain(value: Any) -> bool:
    if type(value) in (dict, list, deque, tuple):
        return all(map(_is_plain, value.values() if type(value) is dict else value))
    return type(value) in SCALARS or type(value) is np.ndarray


managers: WeakKeyDictionary[Checkpoint, ref[Any]] = WeakKeyDictionary()
"""The manager that was made for a `Checkpoint`."""


@names_forms("latest_checkpoint")
def latest_checkpoint(directory: Directory) -> str | None:
    """The newest checkpoint of a run directory as `RUN@STEP` (after a save under way); None if
    there is none. In a folder whose only run directory is named as TensorFlow's prefixes are
    (`checkpoint.save("folder/ckpt")`), that one's.

    Raises `ArgumentError` if `directory` is no run directory, and has one below it or names a
    checkpoint.
    """
    refuse_checkpoint_name(directory)
    storage = open_storage(directory)
    for manager in [reference() for reference in managers.values()]:
        if manager is not None and manager.directory == storage.where:
            return manager.latest_checkpoint
    try:
        run = Run(directory)
    except NotARunError:
        if isinstance(storage, LocalStorage) and os.path.isdir(storage.where):
            with os.scandir(storage.where) as entries:
                below = [e.path for e in entries if os.path.exists(os.path.join(e.path, MARKER))]
            if len(below) == 1 and "ckpt" in os.path.basename(below[0]):
                return latest_checkpoint(below[0])
            if below:  # None would let a program start over
                raise ArgumentError(
                    f"directory: expected a run directory, found one that contains {few(below)}. Name "
                    f"the run directory itself."
                ) from None
        return None
    step = run.newest_step()
    return None if step is None else name_at_step(run.where, step)


def takes_tensorflow_order(init: Init) -> Init:
    """An `__init__` that also takes (checkpoint, directory, ...), and TensorFlow's keywords."""

    known = {*signature(init).parameters, *_ORDER, "checkpoint_interval"} - {"self"}

    @wraps(init)
    def init_in_either_order(self: Any, *given: Any, **named: Any) -> None:
        if given and isinstance(given[0], Checkpoint):
            given, named = given[len(_ORDER) :], {**dict(zip(_ORDER, given, strict=False)), **named}
        elif given[1:] or (given and "directory" in named):
            raise ArgumentError(
                f"expected CheckpointManager(directory, ...) with all others by name, or a "
                f"perdure.Checkpoint and then the directory, found {type(given[0]).__name__} first. A "
                f"model, or the members of a Checkpoint of TensorFlow, become "
                f"perdure.Checkpoint(model=model). Options are given as "
                f"`options=perdure.ManagerOptions(...)`."
            )
        refuse_arguments("CheckpointManager", named.keys() - {"checkpoint", "max_to_keep"}, known)
        if (interval := named.pop("checkpoint_interval", None)) is not None:
            named["save_interval_steps"] = interval
        if (hours := named.pop("keep_checkpoint_every_n_hours", None)) is not None:
            options = named.get("options") or ManagerOptions()
            rules = replace(options.retention or Retention(), keep_every_n_hours=hours)
            named["options"] = replace(options, retention=rules)
        init(self, *given, **named)

    return init_in_either_order  # type: ignore[return-value]


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
        step: The step; None for the newest good checkpoint. Damaged ones are skipped with a
            warning.
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
    sharing: ChunkSharing | None = None,
) -> Loaded:
    """Load `step`, or the newest good checkpoint, and warn about each newer one that is damaged.
    Only leaves whose path `wanted` accepts are read. Processes with `sharing` read it together."""
    if directory is None:
        raise ArgumentError(
            "directory: expected a run directory, found None. `latest_checkpoint` is None before the "
            "first save; `CheckpointManager.restore_or_initialize` then starts from a fresh state."
        )
    run, step = find_step(directory, step)
    loaded = load_good(run, step, ReadRequest(wanted, sharing=sharing)).loaded
    if loaded is None:
        raise StepNotFoundError(f"{run.where}: expected a checkpoint, found none. Save one first.")
    warn_of_skipped(run.where, loaded)
    manifest = loaded.manifest
    where = f"{run.where}: step {manifest.step}"
    load_epoch_ends(loaded.leaves, manifest.process_leaves, where)
    return loaded


def makes_state(value: Any) -> bool:
    """Whether `value` is a function that makes a state. Modules are states, though callable."""
    if not callable(value):
        return False
    functions = (FunctionType, MethodType, BuiltinFunctionType, type)
    if isinstance(value, functions) or type(value) is partial:
        return True
    # `__wrapped__`: what jax.jit, eqx.filter_jit and functools.wraps leave on a function.
    return hasattr(value, "__wrapped__") or not is_state(value)
