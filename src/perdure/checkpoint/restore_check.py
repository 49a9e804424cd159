"""`RestoreCheck`: finds at the first save, not after a crash, that a state could not be restored."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from perdure.errors import MismatchError, StateError, UnsupportedLeafError, warn_caller
from perdure.state import Template, differences, format_differences
from perdure.state.leaf_spec import Difference, LeafSpec
from perdure.state.object_flatten import FreshTarget, inner_objects, lost_objects
from perdure.state.paths import nearest
from perdure.state.replaced_members import ReplacedMembers
from perdure.state.restore_advice import state_dict_advice
from perdure.state.template import own_differences, same_specs, template_of_walk
from perdure.state.walk import Walk
from perdure.store import Leaf
from perdure.store.leaf import containers_of


class RestoreCheck:
    """Compares the state that is saved with the target that the program restores into.

    The first save is compared in full, without a target with the state itself; later ones, and
    those after a restore, if their structure has changed. A run that continues from parts of a
    checkpoint is warned once.
    """

    def __init__(self) -> None:
        self.fresh = FreshTarget()
        """What the target had at first; without a target, the state of the first save."""
        self._template: Template | None = None
        self._known: dict[str, LeafSpec] | None = None
        self._exact: int | None = None
        self._partial: int | None = None
        # The objects inside those of the target; None if they are not known.
        self._inner: Collection[str] | None = None
        self.replaced = ReplacedMembers()
        """What the last restore replaced, if the program has not taken what it returned."""

    @property
    def is_first(self) -> bool:
        """Whether the next save is the first one of the program."""
        return self._known is None

    def expect(self, like: Any, *, begins: bool = False) -> Walk | None:
        """The program restores into `like`; returns its walk, None if a save would refuse it. If
        the program `begins` with it, a value that no save takes is an error now."""
        walk = None
        try:
            walk = Walk(like)
            if begins:
                _require_values(walk)
            self._template = template_of_walk(walk)
            self.fresh = FreshTarget(walk)
        except StateError:
            if begins:
                raise
            self._template, self.fresh = None, FreshTarget()
        else:
            self._inner = None
            try:
                self._inner = inner_objects(walk.objects)
            except StateError:
                if begins:
                    raise
        self._known = self._partial = None
        return walk

    def restored(self, leaves: Mapping[str, Leaf]) -> None:
        """The target accepted `leaves`: another structure is only a warning from now on. An error
        would stop an interrupted run at a step that an uninterrupted one passes."""
        self._known = _structure(leaves)

    def restored_exactly(self, step: int) -> None:
        """A restore gave the program the whole state of `step`, perhaps without a target."""
        self._exact, self._partial = step, None

    def restored_in_part(self, step: int) -> None:
        """A restore gave the program another state than that of `step`, perhaps to move parts of it
        into objects."""
        if step != self._exact:
            self._partial = step

    def check_used(self, where: str, state: Walk, step: int) -> None:
        """Raise `StateError` if the program ignores the state that the restore before this save, the
        first one after it, has returned."""
        try:
            self.replaced.check_unused(state, step)
        except StateError as error:
            raise StateError(f"{where}: {error}") from None
        self.replaced.forget()
        if note := self.replaced.changed_elsewhere(state):
            warn_caller(f"{where}: {note}")

    def check_first(self, where: str, state: Any, leaves: Mapping[str, Leaf]) -> None:
        """Raise `MismatchError` if the first save could not be restored; later calls do nothing."""
        if self._known is not None:
            return
        if self._template is None:
            target, lines = "the state itself", own_differences(state, leaves)
            self.fresh = FreshTarget(Walk.of(state))
        else:
            target = "the target that was given to the restore"
            lines = self._differences(self._template, leaves)
        if lines:
            grown = (
                " A dict that gains keys belongs in an object with `state_dict` and "
                "`load_state_dict`."
            )
            raise MismatchError(
                f"{where}: this state could never be restored into {target}:\n"
                f"{format_differences(lines)}\n"
                f'("the checkpoint" is what would be saved.) Give the restore a target of the same '
                f"structure, dtypes and shapes as the state that the loop saves."
                f"{grown * any(line.expected is None and not line.reason for line in lines)}"
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
        if self._inner is not None and containers:
            lines += lost_objects(leaves, template.objects, self._inner)
        return lines


def _require_values(walk: Walk) -> None:
    """Raise `UnsupportedLeafError` for an abstract array: a program cannot begin with it."""
    abstract = {kind for kind in walk.takers if kind.__name__ == "ShapeDtypeStruct"}
    for path, value in walk.pairs() if abstract else ():
        if type(value) in abstract:
            raise UnsupportedLeafError(
                f"{path or '(the state itself)'}: is abstract ({value}), and the run has no checkpoint "
                f"that could give it a value. Give `restore_or_initialize` the fresh state; "
                f"`restore` takes abstract targets."
            )


def _structure(leaves: Mapping[str, Leaf]) -> dict[str, LeafSpec]:
    return {path: LeafSpec(leaf.dtype, leaf.shape) for path, leaf in leaves.items()}
