"""The kinds of lines in the log of a run directory.

A line of kind `step` is the journal of one step.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from perdure.store.format import Metric


class Event(Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False, tag_field="kind"):
    """What a line says."""


class JournalEntry(Event, frozen=True, kw_only=True, tag="step"):
    """What a journal has about one step: digests of `state` after it, of the `total` and the
    `batch`.

    `attempt` recorded it; `topology` (host, processes, devices) must never decide a digest.
    """

    step: int
    state: str
    total: str | None = None
    batch: str | None = None
    metrics: dict[str, Metric] = {}
    attempt: int
    topology: dict[str, int | str] = {}


class Started(Event, frozen=True, kw_only=True, tag="run"):
    """The first line: the id of the run, as in its marker."""

    run: str


class Saved(Event, frozen=True, kw_only=True, tag="saved"):
    """The run has committed a checkpoint, its first one; None: all were deleted on purpose."""

    step: int | None = None


class Rules(Event, frozen=True, kw_only=True, tag="rules"):
    """What the writer keeps: `max_to_keep` (None for all) and its other rules by name."""

    max_to_keep: int | None = None
    retention: dict[str, Any] = {}


class Removed(Event, frozen=True, kw_only=True, tag="removed"):
    """A checkpoint is removed on purpose, or is committed `again` with the same bits."""

    step: int
    fingerprint: str
    again: bool = False


class Pinned(Event, frozen=True, kw_only=True, tag="pinned"):
    """No deletion may touch a checkpoint, or it may again if `pinned` is False.

    The folder of pins says the same: what is lost of one of the two, the other one knows.
    """

    step: int
    pinned: bool = True


class SetAside(Event, frozen=True, kw_only=True, tag="set aside"):
    """An object moves to quarantine because of damage."""

    name: str
    to: str
    reason: str
    time: str = ""


class Damaged(Event, frozen=True, kw_only=True, tag="damaged"):
    """A pack is damaged, and stays: no save depends on a chunk in it."""

    pack: str
    reason: str
    time: str = ""


class RolledBackCheckpoint(Struct, frozen=True, array_like=True):
    """A checkpoint that a rollback moves to the name `to`, and the readable one before it."""

    step: int
    to: str
    after: tuple[int, str] | None = None


class RolledBack(Event, frozen=True, kw_only=True, tag="rolled back"):
    """A rollback to a step moves newer checkpoints to quarantine."""

    step: int
    checkpoints: tuple[RolledBackCheckpoint, ...]
    time: str = ""


class Cut(Event, frozen=True, kw_only=True, tag="cut"):
    """A rollback sets the lines of later steps aside."""

    step: int


class Returned(Event, frozen=True, kw_only=True, tag="returned"):
    """The `checkpoints`, by their names in quarantine, return, and the lines that the lines `cuts`
    set aside; if there are `cuts`, other lines after `step` are set aside."""

    step: int
    cuts: tuple[int, ...]
    checkpoints: tuple[str, ...] = ()


class Done(Event, frozen=True, kw_only=True, tag="done"):
    """Every checkpoint has moved of which the last rollback or return says so."""


class Dropped(Event, frozen=True, kw_only=True, tag="dropped"):
    """The lines that rollbacks set aside do not return any more."""


class Lost(Event, frozen=True, kw_only=True, tag="lost"):
    """A repair has accepted that lines are lost; `rules` says whether rules may be among them."""

    reason: str
    rules: bool = True


decoder = msgspec.json.Decoder(
    JournalEntry
    | Started
    | Saved
    | Rules
    | Removed
    | Pinned
    | SetAside
    | Damaged
    | RolledBack
    | Cut
    | Returned
    | Done
    | Dropped
    | Lost
)
entry_decoder = msgspec.json.Decoder(JournalEntry)


def first_difference(one: JournalEntry, two: JournalEntry) -> tuple[str, str, str] | None:
    """What differs first in the order of the computation, and both digests; None for nothing."""
    for what in ("batch", "total", "state"):
        digests = getattr(one, what), getattr(two, what)
        if None not in digests and digests[0] != digests[1]:
            return what, *digests
    return None
