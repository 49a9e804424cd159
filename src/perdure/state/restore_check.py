"""Finds at a save, not after a crash, that a run could not be resumed, or does not use its restore.

A state that does not fit the target of the restore could never be restored. A restore returns new
containers, numbers and arrays: a program that saves the old ones of its target silently starts over.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from perdure.errors import MismatchError, StateError, UnsupportedLeafError, warn_caller
from perdure.state.adapter import leaf_of
from perdure.state.attribute_values import mark_of
from perdure.state.leaf_spec import Difference, LeafSpec, format_differences, state_dict_advice
from perdure.state.leaf_values import SCALARS, same_bits
from perdure.state.paths import below, join_part, nearest
from perdure.state.per_rank import own_shards_only
from perdure.state.reachable import program_frames, reachable_values
from perdure.state.snapshots import TargetBaseline, inner_objects, lost_objects
from perdure.state.walk import (
    MAPPINGS,
    Template,
    Walk,
    differences,
    same_specs,
    template_of,
)
from perdure.store.format import unescape
from perdure.store.leaf import Leaf, containers_of

_LOOKS = 3
"""How many saves after a restore are compared: a program that changes a value does so in each step."""


_GROWN = " A dict that gains keys belongs in an object with `state_dict` and `load_state_dict`."


class ReplacedMembers:
    """The members of a target that a restore replaced by new ones, kept alive until `forget`."""

    def __init__(self) -> None:
        self._new: dict[str, Any] = {}
        # By the `id` of a member, which is kept alive so that no other object gets that `id`.
        self._old: dict[int, tuple[str, Any]] = {}
        # By the `id` of a returned PyTorch tensor, which code changes in place: the one of the target
        # and the returned one, each with its version.
        self._tensors: dict[int, tuple[weakref.ref[Any], int, weakref.ref[Any], int]] = {}
        # By the `id` of a dict or a list, which is not kept alive, its path and its keys.
        self._containers: dict[int, tuple[str, list[Any]]] = {}
        self._marks: dict[str, Any] = {}
        self._looks = 0

    def add_leaf(self, path: str, old: Any, new: Any) -> None:
        """`new` was returned in place of the number or array `old`."""
        if type(old) not in SCALARS:
            self._old[id(old)] = path, old
            before, after = _version(old), _version(new)
            if before is not None and after is not None:
                self._tensors[id(new)] = weakref.ref(old), before, weakref.ref(new), after
        elif type(old) is type(new) and _same(old, new):
            return
        self._new[path] = new

    def add_container(self, path: str, old: Any) -> None:
        """A new container was returned in place of `old`."""
        if not isinstance(old, tuple):  # the program may use an equal constant elsewhere
            self._old[id(old)] = path, old
        if type(old) in (dict, list):
            self._containers[id(old)] = path, list(old) if type(old) is dict else [len(old)]

    def drop(self, path: str) -> None:
        """The value at `path` was changed in place, so that the program has its new members."""
        for inside in [inside for inside in self._new if nearest(inside, (path,)) is not None]:
            del self._new[inside]

    def forget(self) -> None:
        """The program has taken the returned state. Tensors and containers are watched further."""
        self._new.clear()
        self._old.clear()

    def clear(self) -> None:
        """There is no returned state."""
        self.forget()
        self._tensors.clear()
        self._containers.clear()

    def check_unused(self, walk: Walk, step: int) -> None:
        """Raise `StateError` if the state that is saved as `step` has a member of the target, unless
        the member equals its restored value, or is the number of the step."""
        with own_shards_only():
            if self._new:
                self._check(walk, step)
            if self._tensors:
                self._check_tensors(walk)

    def changed_elsewhere(self, walk: Walk) -> str | None:
        """A warning if the program saves the restored dict or list, and changes the old one, which it
        gave to the restore and still has under another name (`ema.shadow`)."""
        if not self._containers or self._looks == _LOOKS:
            return None
        self._looks += 1
        before, self._marks = self._marks, {}
        saved = {id(branch.value) for branch in walk.branches}
        saved |= {id(node.target) for node in walk.objects.values()}
        saved |= {id(value) for value in walk.values if type(value) not in SCALARS}
        frames = program_frames(sys._getframe())
        for name, reached in reachable_values(frames, unnamed=False).items():
            value = reached.get()
            if not (path := self._path_of(value)) or id(value) in saved:
                continue
            items = value.items() if isinstance(value, dict) else enumerate(value)
            now = {key: _mark(item, saved) for key, item in items}
            self._marks[name] = now
            if name in before and before[name] != now:
                self._looks = _LOOKS
                return (
                    f"{path}: the program has changed {name}, which it gave to the restore, and saves "
                    f"the restored one, so that every later checkpoint would have the restored value "
                    f"again. Continue with what the restore returned (`ema.shadow = state['ema']`), or "
                    f"make the object that has it a member of the state."
                )
        return None

    def _path_of(self, value: Any) -> str:
        path, keys = self._containers.get(id(value), ("", []))
        is_same = type(value) is dict and list(value) == keys
        return path if is_same or (type(value) is list and [len(value)] == keys) else ""

    def _check(self, walk: Walk, step: int) -> None:
        """Look at each leaf that was in the target, or lies in a container that was."""
        held = {
            b.path: self._old[id(b.value)][0] for b in walk.branches if id(b.value) in self._old
        }
        for path, value in walk.pairs():
            target_path = self._old[id(value)][0] if id(value) in self._old else None
            if target_path is None and (above := nearest(path, held)) is not None:
                target_path = join_part(held[above], below(path, above))
            if target_path in self._new and not self._is_fine(value, target_path, step):
                raise StateError(
                    f"{path or '(the state itself)'}: the restore returned a new value here, which "
                    f"this program does not use: it saves what it gave to the restore, so that it has "
                    f"begun again from the fresh value. Continue with the state that the restore "
                    f"returns: `state, step = manager.restore_or_initialize(state)`."
                )

    def _is_fine(self, value: Any, target_path: str, step: int) -> bool:
        """Whether a leaf of the target has the value that it should have. A counter that began
        again may have reached the restored number once more; a constant array is equal."""
        if type(value) in SCALARS:
            return type(value) is int and value == step
        return _same(value, self._new[target_path])

    def _check_tensors(self, walk: Walk) -> None:
        for path, new in walk.pairs():
            if (tensor := self._tensors.get(id(new))) is None or tensor[2]() is not new:
                continue
            (_, old_version, _, new_version), old = tensor, tensor[0]()
            if old is None or _version(new) != new_version:
                del self._tensors[id(new)]
            elif _version(old) != old_version and not _same(old, new):
                raise StateError(
                    f"{path or '(the state itself)'}: the restore returned a new tensor here, and the "
                    f"program has changed the tensor that it gave to the restore instead, so that "
                    f"every save would store the restored value again. Use the tensors of the state "
                    f"that the restore returns, or save the module that owns them: modules and "
                    f"parameters are restored in place."
                )


def _version(value: Any) -> Any:
    try:
        return getattr(value, "_version", None)
    except RuntimeError:  # of an inference tensor
        return None


def _same(one: Any, other: Any) -> bool:
    first, second = leaf_of(one), leaf_of(other)
    return first is not None and second is not None and same_bits(first, second)


class RestoreCheck:
    """Compares the state that is saved with the target that the program restores into.

    The first save is compared in full; later ones, and those after a restore, if their structure
    has changed.
    """

    def __init__(self) -> None:
        self.baseline = TargetBaseline()
        """What the target had at first; without a target, the state of the first save."""
        self._template: Template | None = None
        self._known: dict[str, LeafSpec] | None = None
        self._exact: int | None = None
        self._partial: int | None = None
        # The paths of objects inside the objects of the target; None if they are not known.
        self._inner: Collection[str] | None = None
        self.replaced = ReplacedMembers()
        """The members that the last restore replaced, until the program takes the returned state."""

    @property
    def is_first(self) -> bool:
        """Whether the next save is the first one of the program."""
        return self._known is None

    @property
    def is_new(self) -> bool:
        """Whether the program has saved nothing and has given nothing to a restore."""
        return self.is_first and self._template is None

    def expect(self, like: Any, *, begins: bool = False) -> Walk | None:
        """The program restores into `like`; returns its walk, None if a save would refuse it. If
        the program `begins` with it, a value that no save takes is an error now."""
        walk = self._template = self._inner = self._known = self._partial = None
        self.baseline = TargetBaseline()
        try:
            walk = Walk(like)
            if begins:
                _require_values(walk)
            self._template, self.baseline = template_of(walk), TargetBaseline(walk)
            self._inner = inner_objects(walk.objects)
        except StateError:
            if begins:
                raise
        return walk

    def restored(self, step: int, leaves: Mapping[str, Leaf] | None, *, exactly: bool) -> None:
        """A restore gave the program the state of `step`: `exactly`, or changed or only parts of it.

        From now on a structure that differs from `leaves` is only a warning: an error would stop an
        interrupted run at a step that an uninterrupted run passes.
        """
        if exactly:
            self._exact, self._partial = step, None
            self._known = self._known if leaves is None else _structure(leaves)
        elif step != self._exact:
            self._partial = step

    def check_used(self, where: str, state: Walk, step: int) -> None:
        """Raise `StateError` if the program ignores the state that the last restore has returned."""
        try:
            self.replaced.check_unused(state, step)
        except StateError as error:
            raise StateError(f"{where}: {error}") from None
        self.replaced.forget()
        if note := self.replaced.changed_elsewhere(state):
            warn_caller(f"{where}: {note}")

    def check_first(self, where: str, walk: Walk, leaves: Mapping[str, Leaf]) -> None:
        """Raise `MismatchError` if the first save could not be restored; later calls do nothing."""
        if self._known is not None:
            return
        if self._template is None:
            target, lines = "the state itself", differences(template_of(walk), leaves)
            self.baseline = TargetBaseline(walk)
        else:
            target = "the target that was given to the restore"
            lines = self._differences(self._template, leaves)
        if lines:
            dicts = {branch.path for branch in walk.branches if type(branch.value) in MAPPINGS}
            new = [line.path for line in lines if line.expected is None and not line.reason]
            has_grown = any(path.rpartition("/")[0] in dicts for path in new)
            raise MismatchError(
                f"{where}: this state could never be restored into {target}:\n"
                f"{format_differences(lines)}\n"
                f'("the checkpoint" is what would be saved.) Give the restore a target of the same '
                f"structure, dtypes and shapes as the state that the loop saves.{_GROWN * has_grown}"
                f"{state_dict_advice(lines)}"
            )
        self._known = _structure(leaves) if self._template is not None else {}
        if self._partial is not None:
            warn_caller(
                f"{where}: this manager has restored step {self._partial} only in part, and now saves "
                f"into the same run. It can be resumed exactly from here on, but this step does not "
                f"follow from the checkpoints before it. To begin a new run with parts of this one, "
                f"save into another directory."
            )

    def changed(self, where: str, leaves: Mapping[str, Leaf]) -> str | None:
        """A warning if the structure has changed, and the target does not fit any more; else None."""
        if self._known is None or self._template is None:
            return None
        if same_specs(self._known, self._known.values(), leaves):
            return None
        self._known = _structure(leaves)
        if not (lines := self._differences(self._template, leaves)):
            return None
        return (
            f"{where}: the structure of the state has changed, and it can no longer be restored into "
            f"the target that this program began with:\n{format_differences(lines)}\n"
            f"A restart needs a target of the new structure."
        )

    def _differences(self, template: Template, leaves: Mapping[str, Leaf]) -> list[Difference]:
        containers = containers_of(leaves)
        described = {path for path, entry in containers.items() if entry.grown}
        lines = [
            line
            for line in differences(template, leaves)
            if not described or nearest(line.path, described) is None
        ]
        # Attributes that an object has lost since then are no difference.
        names = {path: entry.keys for path, entry in containers.items() if entry.kind == "object"}
        lines = [line for line in lines if _has_attribute(names, line.path)]
        if self._inner is not None and containers:
            lines += lost_objects(leaves, template.objects, self._inner)
        return lines


def _has_attribute(names: Mapping[str, Sequence[Any] | None], path: str) -> bool:
    owner = nearest(path, names) if names else None
    kept = None if owner is None or owner == path else names[owner]
    return kept is None or unescape(below(path, owner or "").partition("/")[0]) in kept


def _mark(value: Any, saved: Collection[int]) -> Any:
    """As `mark_of`, without the values that are members of the state, at any depth."""
    if id(value) in saved:
        return None
    if type(value) is dict:
        return {key: _mark(part, saved) for key, part in value.items()}
    return [_mark(part, saved) for part in value] if type(value) is list else mark_of(value)


def _require_values(walk: Walk) -> None:
    abstract = {kind for kind in walk.takers if kind.__name__ == "ShapeDtypeStruct"}
    for path, value in walk.pairs() if abstract else ():
        if type(value) in abstract:
            raise UnsupportedLeafError(
                f"{path or '(the state itself)'}: is abstract ({value}), and the run has no checkpoint "
                f"that could give it a value. Give `restore_or_initialize` the fresh state; "
                f"`restore` takes abstract targets."
            )
    if (torch := sys.modules.get("torch")) is None:
        return
    # In a state with its optimizer, such a dict is a copy that the program keeps (of its best step).
    has_optimizer = any(isinstance(o.target, torch.optim.Optimizer) for o in walk.objects.values())
    for branch in walk.branches:
        if isinstance(branch.value, dict) and (owner := _owner_of_state_dict(branch.value, torch)):
            if has_optimizer and owner == _OPTIMIZER:
                continue
            raise UnsupportedLeafError(
                f"{branch.path or '(the state itself)'}: this is the `state_dict()` of {owner}. After "
                f"a restart it would have the restored values, and {owner} would have fresh ones. Give "
                f"the object itself (`{{'model': model, 'optimizer': optimizer}}`): it is restored in "
                f"place, without `load_state_dict`."
            )


_OPTIMIZER = "the optimizer"


def _owner_of_state_dict(value: dict[Any, Any], torch: Any) -> str:
    """The object that has returned this `state_dict()` and still changes its tensors; '' for a copy
    and for any other dict."""
    groups = value.get("param_groups")
    if "state" in value and isinstance(groups, list):
        return _OPTIMIZER
    if {"last_epoch", "_step_count"} <= value.keys():
        return "the scheduler"
    # PyTorch sets it for modules, and copies keep it. `__getattr__` of a program may raise anything.
    if "_metadata" not in (vars(value) if type(value).__dictoffset__ else ()):
        return ""
    parameter = torch.nn.Parameter
    live = {id(p): p for p in gc.get_objects() if issubclass(type(p), parameter)}.values()
    memory = {p.untyped_storage().data_ptr() for p in live if not p.is_meta}
    tensors = [each for each in value.values() if isinstance(each, torch.Tensor)]
    shares = any(each.untyped_storage().data_ptr() in memory for each in tensors if each.numel())
    return "the module" if shares else ""


def _structure(leaves: Mapping[str, Leaf]) -> dict[str, LeafSpec]:
    return {path: LeafSpec(leaf.dtype, leaf.shape) for path, leaf in leaves.items()}
