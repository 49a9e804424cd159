"""Reading the checkpoints of a run: their list, their manifests, and all or some of their leaves.

Readers take no lock and change nothing. A prune may run meanwhile: chunks that it moved are read from
their new places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from perdure.errors import (
    CorruptionError,
    StepNotFoundError,
)
from perdure.store.catalog import Catalog
from perdure.store.contents import committed_steps, newest_step, pinned_steps
from perdure.store.failures import read_error
from perdure.store.format import manifest_name, steps_text
from perdure.store.leaf import Leaf, Leaves
from perdure.store.manifest import Manifest
from perdure.store.manifest_json import decode_manifest
from perdure.store.rollback_notes import rolled_back
from perdure.store.shard_plan import Region
from perdure.store.storage import Storage, confirmed


@dataclass(frozen=True)
class Loaded:
    """A verified checkpoint.

    Attributes:
        manifest: What was committed.
        leaves: The leaves of the state, or those that were asked for.
        skipped: (step, reason) of each newer checkpoint that is damaged.
        process_leaves: The leaves of each process that are no part of the state; empty in a partial
            load.
    """

    manifest: Manifest
    leaves: Leaves
    skipped: tuple[tuple[int, str], ...] = ()
    process_leaves: Mapping[str, Leaf] = field(default_factory=dict)


def list_steps(storage: Storage) -> list[int]:
    """Committed steps, oldest first; raises `UnreachableError` if they cannot be listed."""
    try:
        return committed_steps(storage)
    except OSError as error:
        raise read_error(error, f"{storage.where}: the list of its checkpoints") from error


def find_newest(storage: Storage) -> int | None:
    """The newest committed step; raises `UnreachableError` if the steps cannot be listed."""
    try:
        return newest_step(storage)
    except OSError as error:
        raise read_error(error, f"{storage.where}: the list of its checkpoints") from error


def list_pins(storage: Storage) -> frozenset[int]:
    """Pinned steps; raises `UnreachableError` if they cannot be listed."""
    try:
        return pinned_steps(storage)
    except OSError as error:
        raise read_error(error, f"{storage.where}: the list of its pins") from error


def read_manifest(storage: Storage, step: int) -> Manifest:
    """The checked manifest of `step`.

    Raises:
        StepNotFoundError: There is no such checkpoint.
        CorruptionError: The bytes of the manifest are damaged.
        UnreachableError: The manifest cannot be read.
    """
    name = manifest_name(step)
    where = f"{storage.where}/{name}"
    try:
        return confirmed(storage, name, lambda: decode_manifest(storage.read(name), where, step))
    except FileNotFoundError:
        raise StepNotFoundError(_no_such_step(storage, step)) from None
    except (OSError, MemoryError) as error:
        raise read_error(error, f"{storage.where}: step {step}: {name}") from error


class SharedReads(Protocol):
    """Divides chunks of which several processes of this machine need elements."""

    def announce(
        self,
        fingerprint: str,
        wanted: Mapping[int, int],
        alone: int,
        place: Callable[[int, memoryview], None],
    ) -> bool:
        """Ask the other processes to share chunks; False if there are none.

        Args:
            fingerprint: That of the manifest.
            wanted: The bytes of each chunk, by its number in the manifest.
            alone: Bytes that this process reads besides these.
            place: Called in any thread with the number and the verified bytes of a chunk that another
                process has read.
        """
        ...

    def divide(self) -> set[int]:
        """The numbers of the chunks that others read; waits until all have announced theirs."""
        ...

    def take(self) -> tuple[int, memoryview]:
        """A free slot and its memory, of CHUNK_BYTES."""
        ...

    def give(self, slot: int, chunks: Sequence[tuple[int, int, int]]) -> None:
        """Hand verified chunks in a slot to the others: (number, place in the slot, bytes).

        The slot is free again once all have copied their elements; at once without chunks.
        """
        ...

    def finish(self) -> set[int]:
        """Wait until all have what they share; returns the numbers of the chunks that came."""
        ...

    def close(self) -> None:
        """End all sharing. Nothing calls `place` afterwards. May be called twice."""
        ...


class Needs(NamedTuple):
    """What a load of a checkpoint reads.

    Attributes:
        wanted: Given the path of a leaf, whether to read it; None for all.
        regions: Given the manifest, the only elements of some arrays that are read (`Leaf.shards`).
        verifies_all: Whether the chunks of these arrays that are not needed are verified too.
        sharing: Reads chunks of these arrays together with other processes of this machine.
    """

    wanted: Callable[[str], bool] | None = None
    regions: Callable[[Manifest], Mapping[str, tuple[Region, ...]]] | None = None
    verifies_all: bool = False
    sharing: SharedReads | None = None


EVERYTHING = Needs()


def load_step(storage: Storage, catalog: Catalog, step: int, needs: Needs = EVERYTHING) -> Loaded:
    """Read and verify what is needed of one checkpoint.

    Damage is noted in `catalog`. Raises as `read_manifest` does.
    """
    # numpy: not needed to list a run
    from perdure.store.reader import load_entries, load_leaves, verify_leaves

    manifest, wanted = read_manifest(storage, step), needs.wanted
    while True:
        try:
            regions = {} if needs.regions is None else needs.regions(manifest)
            if regions and needs.verifies_all:
                verify_leaves(storage, manifest, wanted)
            leaves = load_leaves(storage, manifest, wanted, regions, needs.sharing)
            entries = () if wanted else manifest.process_leaves
            process_leaves = load_entries(storage, manifest, entries)
            catalog.loaded.add(step)
            return Loaded(manifest, leaves, process_leaves=process_leaves)
        except CorruptionError as error:
            # A prune may have moved the chunks since the manifest was read; then it has changed.
            renewed = read_manifest(storage, step)
            if renewed == manifest:
                catalog.distrust(error)
                raise
            manifest = renewed


def _no_such_step(storage: Storage, step: int) -> str:
    steps = list_steps(storage)
    noun = "step" if len(steps) == 1 else "steps"
    present = f"{noun} {steps_text(steps)}" if steps else "no checkpoint"
    message = f"{storage.where}: expected a checkpoint of step {step}, found {present}. "
    if any(aside.manifest.step == step for aside in rolled_back(storage)):
        return message + (
            f"Step {step} was set aside by a rollback; `perdure rollback {storage.where} --undo` "
            f"brings it back."
        )
    if not steps:
        return message + "Save one first, or name another run directory."
    nearest = min(steps, key=lambda other: (abs(other - step), -other))
    return message + f"Ask for one of those; the nearest is step {nearest}."
