"""What decides the next step and is in no `state_dict`: the extra members of every checkpoint.

They are process leaves: not in the fingerprint, and each process of a group has its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from perdure.state.walk import Walk
from perdure.store.leaf import Leaf, Leaves


class Group(Protocol):
    """What the members ask about a group of processes."""

    @property
    def index(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def is_chief(self) -> bool: ...


class Saving(NamedTuple):
    """A save of process number `process`: the walk of the state, and its leaves, which a member may
    still change."""

    walk: Walk
    leaves: Leaves
    process: int


class Restoring(NamedTuple):
    """A restore for one process: the process leaves of the checkpoint, what gives the path in the
    state for one in the checkpoint, the name in messages, the processes of this run, and the
    restored state."""

    leaves: Mapping[str, Leaf]
    renamed: Callable[[str], str]
    where: str
    group: Group
    walk: Walk


class ExtraMember:
    """One thing that is saved beside the state. Each process of a group has its own."""

    def see(self, walk: Walk) -> None:
        """The program begins with this state, or restores into it. May be called several times."""

    def take(self, saving: Saving) -> dict[str, Leaf]:
        """The leaves of a save; none if there is nothing to store."""
        return {}

    def put(self, restoring: Restoring) -> list[str]:
        """Give back what `take` has stored; returns warnings."""
        return []


_MEMBERS = {
    "perdure.state.epoch_ends:EpochEnds": None,
    "perdure.state.shared_members:SharedMembers": None,
    "perdure.state.attributes:Attributes": None,
    "perdure.state.torch_gradients:Gradients": "torch",
    "perdure.state.process_random:ProcessRandom": None,
}
"""The class of each member, and the framework without which it has nothing to store. The attributes
come before the gradients: a parameter has to require one first. The generators come last, because the
others may draw random numbers."""

_RANDOM = "perdure.state.process_random:ProcessRandom"


class ExtraMembers:
    """The extra members of the states that a manager saves and restores."""

    def __init__(self, *, save_random_state: bool) -> None:
        self._places = [place for place in _MEMBERS if save_random_state or place != _RANDOM]
        self._made: dict[str, ExtraMember] = {}
        self._members()

    def begin(self) -> None:
        """The program begins: random numbers count from here on."""
        if (random := self._made.get(_RANDOM)) is not None:
            random.begin()  # type: ignore[attr-defined]

    def see(self, state: Any) -> None:
        """See `ExtraMember.see`; `state` may be a walk."""
        walk = Walk.of(state)
        for member in self._members():
            member.see(walk)

    def take(self, walk: Walk, leaves: Leaves, process: int) -> dict[str, Leaf]:
        """The process leaves of a save."""
        taken: dict[str, Leaf] = {}
        for member in self._members():
            taken |= member.take(Saving(walk, leaves, process))
        return taken

    def put(self, restoring: Restoring) -> list[str]:
        """Give back what was stored, after the state itself; returns warnings."""
        return [note for member in self._members() for note in member.put(restoring)]

    def _members(self) -> list[ExtraMember]:
        """Those whose framework is imported."""
        for place in self._places:
            framework = _MEMBERS[place]
            if place not in self._made and (framework is None or framework in sys.modules):
                module, _, name = place.partition(":")
                self._made[place] = getattr(import_module(module), name)()
        return [self._made[place] for place in self._places if place in self._made]
