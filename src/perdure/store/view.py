"""One immutable view of the contents of a run directory, for all who ask.

Invariant: nothing is deleted because of a remembered manifest. A new view compares each manifest in the
cache with the digest in its file, and reads the manifests that differ.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import or_
from typing import Generic, NamedTuple, TypeVar

import msgspec

from perdure.errors import CorruptionError, PruneError
from perdure.store.failures import is_gone
from perdure.store.format import (
    MANIFESTS,
    PACKS,
    QUARANTINE,
    manifest_name,
    pack_step,
    step_of,
    steps_text,
)
from perdure.store.manifest import Manifest, ManifestSummary
from perdure.store.manifest_json import HEAD_BYTES, decode_head, decode_manifest, summarize
from perdure.store.names import pinned_steps, step_aside
from perdure.store.pools import map_ahead, pool
from perdure.store.run_log import LogView, RunLog, line_references
from perdure.store.run_marker import folder_problem, lacks_manifests, other_run
from perdure.store.storage import Storage
from perdure.text import counted, few, quoted

READ_NEWEST = 64
"""So many of the newest manifests a writer decodes, and depends on their chunks. Of others it takes a
summary: a run may have more manifests than fit into memory."""

START_OVER = (
    "To begin this run again on purpose, from what its mirror has or else from step 0, call "
    "`restore_or_initialize(..., start_over=True)`, or use another run directory."
)
"""What to do about a run that has lost its checkpoints."""

K = TypeVar("K")


class OutdatedPlanError(PruneError):
    """The run directory is not what a plan was made from. Nothing was deleted; plan again."""


class _Manifests(NamedTuple, Generic[K]):
    """The manifests that a look found, of checkpoints by step, in quarantine by name.

    `read` are in memory; `unreadable` has the reasons why others cannot be read, `unknown` the ones
    whose bytes nobody saw, `foreign` the ones of another run.
    """

    readable: dict[K, ManifestSummary]
    read: dict[K, Manifest]
    unreadable: dict[K, str]
    unknown: dict[K, str]
    foreign: set[K]


@dataclass
class ViewCache:
    """Results of earlier views, so that the next view reads only objects that have changed.

    By name the summaries of manifests, some manifests, and the sizes of packs, which never change;
    and the names of the packs, None if they have to be listed.
    """

    summaries: dict[str, ManifestSummary] = field(default_factory=dict)
    manifests: dict[str, Manifest] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    packs: frozenset[str] | None = None

    def add(self, manifest: Manifest, head: bytes) -> None:
        """Note that a manifest was committed, whose file begins with `head`."""
        name = manifest_name(manifest.step)
        self.summaries[name], self.manifests[name] = summarize(manifest, head), manifest
        for older in sorted(self.manifests)[:-READ_NEWEST]:
            del self.manifests[older]
        self.sizes.update((pack.name, pack.size) for pack in manifest.packs)
        if self.packs is not None:
            self.packs = self.packs.union(pack.name for pack in manifest.packs)

    def remove(self, packs: Collection[str]) -> None:
        """Note that packs were deleted."""
        for pack in packs:
            self.sizes.pop(pack, None)
        if self.packs is not None:
            self.packs = self.packs.difference(packs)


class View:
    """What a run directory held at one look: names, manifests and sizes, but no chunks.

    It does not change. Parts are listed when first asked for. Of what the `cache` has, only
    changes are read; `whole` decodes every manifest and lists the packs again.
    """

    def __init__(
        self, storage: Storage, log: RunLog, cache: ViewCache | None = None, *, whole: bool = False
    ) -> None:
        self._storage, self._run_log = storage, log
        self._cache = ViewCache() if cache is None else cache
        self._is_whole = whole

    # ------------------------------------------------------------ checkpoints

    @property
    def steps(self) -> list[int]:
        """Steps that have a manifest, oldest first."""
        return [*self._names]

    @property
    def readable(self) -> Mapping[int, ManifestSummary]:
        """The summaries of the readable manifests by step, oldest first."""
        return self._committed.readable

    @property
    def unreadable(self) -> Mapping[int, str]:
        """Why each other manifest cannot be read, by step."""
        return self._committed.unreadable

    @property
    def newest(self) -> Mapping[int, Manifest]:
        """The newest manifests by step; nothing else is looked at."""
        return self._newest.read

    @property
    def manifests(self) -> Mapping[int, Manifest]:
        """All readable manifests."""
        return {step: self.manifest(step) for step in self.readable}

    @cached_property
    def summaries(self) -> Mapping[int, ManifestSummary]:
        """The summaries of the checkpoints that lack nothing, as far as names and sizes tell."""
        return {step: row for step, row in self.readable.items() if step not in self.missing}

    @cached_property
    def missing(self) -> Mapping[int, str]:
        """Why each checkpoint with a readable manifest cannot be read: a pack is missing or cut."""
        return {
            step: f"{self._storage.where}: step {step} needs {pack}, {why}."
            for step, summary in self.readable.items()
            for pack, size in summary.packs.items()
            if (why := self._fault(pack, size)) is not None
        }

    @property
    def broken(self) -> Mapping[int, str]:
        """Why each checkpoint that is not in `summaries` cannot be read."""
        return {**self.unreadable, **self.missing}

    # ------------------------------------------------------------ what else is there

    @cached_property
    def packs(self) -> Mapping[str, int]:
        """The packs with their sizes."""
        return {pack: size for pack, size in self._sizes.items() if isinstance(size, int)}

    @cached_property
    def pinned(self) -> frozenset[int]:
        """The pinned steps, by the folder or by the log."""
        return pinned_steps(self._storage) | self.log.pinned

    @property
    def quarantined(self) -> Mapping[str, Manifest]:
        """The readable manifests in quarantine by name."""
        return self._aside.read

    @property
    def lost(self) -> list[str]:
        """Names of manifests in quarantine that are damaged or belong to another run."""
        return sorted(self._aside.unreadable.keys() - self._aside.unknown.keys())

    @cached_property
    def unknown(self) -> list[str]:
        """What could not be read although it need not be damaged; it may need any pack."""
        aside = [f"{name}: {why}" for name, why in self._aside.unknown.items()]
        unsized = [
            f"{PACKS}{pack}: {e}" for pack, e in self._sizes.items() if isinstance(e, OSError)
        ]
        unknown = [*self._committed.unknown.values(), *aside, *unsized]
        for step in sorted(self.pinned.difference(self.steps, map(step_aside, self._aside_names))):
            unknown.append(f"step {step} is pinned, and {manifest_name(step)} is not there")
        if why := self.lost_checkpoints(for_deletion=True):
            unknown.append(why)
        return unknown

    @cached_property
    def frozen(self) -> str | None:
        """Why nothing at all may be deleted: the log lacks lines, or something is another run's."""
        if self.foreign is not None:
            return self.foreign
        problem = self.log.problem_with(line_references(self._committed.read.values()))
        return problem or folder_problem(self._storage, self._run_log.run)

    @property
    def foreign(self) -> str | None:
        """Why a checkpoint here is another run's; None if none is."""
        found = self._committed
        return found.unreadable[min(found.foreign)] if found.foreign else None

    @cached_property
    def log(self) -> LogView:
        """What the log says, read after the manifests, which refer to lines that are there."""
        return self._run_log.view

    def lost_checkpoints(
        self, *, for_deletion: bool = False, for_start: bool = False
    ) -> str | None:
        """Why a run without a manifest has lost its manifests; None if it need not have had any, or
        if they were set aside because of damage.

        A rollback keeps the checkpoint that it goes back to. Packs count only where the log does
        not know: each first save that was killed leaves one.
        """
        if self.steps:
            return None
        log, where = self.log, self._storage.where
        if not for_deletion and not all(map(log.is_rolled_back, self._aside_names)):
            return None  # that is where they are
        lost = f"{where}: no checkpoint is in {MANIFESTS}, which may be moved or not mounted"
        if log.saved is not None:
            return f"{lost}; step {log.saved} was saved, by the log of the run"
        if log.last is not None and lacks_manifests(self._storage):
            return f"{lost}; each writer makes that folder before its first line of the log"
        steps = {pack_step(pack) for pack in self._pack_names}
        if not steps:
            return None
        # A save begins after the one before it is committed: saves of several steps that were all
        # killed are rare, and a start or a deletion that should not be costs everything.
        is_many = len(steps) > 1 and (for_deletion or for_start)
        if log.problem is None and log.knows_saves and not is_many:
            return None
        return f"{lost}; {PACKS} holds data of {counted(len(steps), 'save')}"

    def later_saves(self, newest: int) -> str | None:
        """A warning if manifests after the step `newest` seem to be lost: there are packs of several
        later steps, of which a killed save leaves one."""
        newest = max([newest, *self.steps])
        if self.log.journal.steps_after(newest) is not None:
            return None  # the lines of the log are compared with what the program computes again
        later = {pack for pack in self._pack_names if pack_step(pack) > newest}
        if len({*map(pack_step, later)}) > 1:
            aside = {pack.name for man in self.quarantined.values() for pack in man.packs}
            later -= aside
        steps = {*map(pack_step, later)}.difference(step for step, _ in self.log.removed)
        if len(steps) < 2:
            return None
        return (
            f"{self._storage.where}: step {newest} is the newest checkpoint, and {PACKS} holds data "
            f"of steps {steps_text(sorted(steps))}, whose manifests are not there. If {MANIFESTS} "
            f"is an older copy, bring the newer ones back before the next save, which replaces these "
            f"steps."
        )

    def nothing_left(self, *, for_start: bool = False) -> str | None:
        """Why the run has no checkpoint although it had some; None if it has one, or need not have
        had any."""
        if self.steps:
            return None
        if (lost := self.lost_checkpoints(for_start=for_start)) is not None:
            return f"{lost}. Bring it back."
        if not self._aside_names:
            return None
        return (
            f"{self._storage.where}: no checkpoint is left in {MANIFESTS}, and "
            f"{few(self._aside_names)} are set aside. Bring that folder, or what these need, back from "
            f"a copy; `perdure verify --repair` then returns what is whole again."
        )

    def refusal_to_begin(self) -> str | None:
        """Why no training may begin here: the run has lost its checkpoints, or is not made whole."""
        where = self._storage.where
        if (origin := self._run_log.unfinished) is not None:
            return (
                f"{where}: was to be made from {origin}, which did not end. Nothing was changed. "
                f"Repeat that command, or use another run directory. To go on from what is there, "
                f"call `restore_or_initialize(..., start_over=True)`."
            )
        if (why := self.nothing_left(for_start=True)) is None:
            return None
        return (
            f"{why} A start at step 0 was refused, and nothing was changed. `perdure verify "
            f"{quoted(where)}` shows what is there; `perdure rollback {quoted(where)} --undo` returns "
            f"what a rollback set aside. {START_OVER}"
        )

    def list_all(self) -> None:
        """Look at everything that a plan needs, now."""
        _ = self._committed, self._aside, self.packs, self.missing, self.pinned, self.unknown

    # ------------------------------------------------------------ looking

    @cached_property
    def _names(self) -> dict[int, tuple[str, str]]:
        """Name and version of each manifest by step, oldest first."""
        entries, cache = self._storage.entries(MANIFESTS), self._cache
        for gone in [name for name in cache.summaries if name.startswith(MANIFESTS)]:
            if gone not in entries:
                del cache.summaries[gone]
                cache.manifests.pop(gone, None)
        # Names of manifests sort as their steps do.
        listed = ((step_of(name), name, entries[name].version) for name in sorted(entries))
        return {step: (name, version) for step, name, version in listed if step is not None}

    @cached_property
    def _committed(self) -> _Manifests[int]:
        older = self._found([*self._names][:-READ_NEWEST], is_light=not self._is_whole)
        return _Manifests(*map(or_, older, self._newest))

    @cached_property
    def _newest(self) -> _Manifests[int]:
        return self._found([*self._names][-READ_NEWEST:])

    def _found(self, steps: Collection[int], *, is_light: bool = False) -> _Manifests[int]:
        """What a look finds of manifests; only summaries if `is_light`."""
        found: _Manifests[int] = _Manifests({}, {}, {}, {}, set())

        def read(step: int) -> None:
            self._read(step, step, *self._names[step], found, is_light=is_light)

        if (streams := self._storage.streams) and len(steps) > 1:
            for _ in map_ahead(pool("manifests", streams), read, steps, streams):
                pass
            return found._replace(readable=dict(sorted(found.readable.items())))
        for step in steps:
            read(step)
        return found

    @cached_property
    def _aside(self) -> _Manifests[str]:
        """The manifests in quarantine."""
        found: _Manifests[str] = _Manifests({}, {}, {}, {}, set())
        for name, entry in sorted(self._storage.entries(QUARANTINE).items()):
            if name.endswith(".json"):
                self._read(name, step_aside(name), name, entry.version, found)
        return found

    @property
    def _aside_names(self) -> list[str]:
        return sorted([*self._aside.read, *self._aside.unreadable])

    def _read(
        self,
        key: K,
        step: int | None,
        name: str,
        version: str,
        found: _Manifests[K],
        *,
        is_light: bool = False,
    ) -> None:
        """Add a manifest to `found` with this key, which is read unless the cache has it."""
        storage, cache = self._storage, self._cache
        where = f"{storage.where}/{name}"
        summary = cache.summaries.get(name)
        try:
            if summary is not None and is_same_file(storage, name, version, summary):
                if version != summary.version:
                    summary = msgspec.structs.replace(summary, version=version)
                    cache.summaries[name] = summary
                manifest = cache.manifests.get(name)
                if manifest is not None or not (self._is_whole or name.startswith(QUARANTINE)):
                    found.readable[key] = summary
                    if manifest is not None:
                        found.read[key] = manifest
                    return
            data = storage.read(name)
            manifest = (decode_head if is_light else decode_manifest)(data, where, step)
            if (problem := other_run(manifest, self._run_log.run, where)) is not None:
                found.unreadable[key] = problem
                found.foreign.add(key)
                return
            # The version was listed before the read, so it may be that of older bytes: it is not kept.
            cache.summaries[name] = found.readable[key] = summarize(manifest, data)
            if isinstance(manifest, Manifest):
                cache.manifests[name] = found.read[key] = manifest
        except FileNotFoundError:
            return
        except ConnectionError:
            raise  # there is no answer, so the next manifest could not be read either
        except OSError as error:
            found.unreadable[key] = f"{where}: cannot be read: {error}."
            if not is_gone(error):  # as a directory, a pipe or a device there is
                found.unknown[key] = found.unreadable[key]
        except CorruptionError as error:
            found.unreadable[key] = str(error)

    def manifest(self, step: int) -> Manifest:
        """A readable manifest; `OutdatedPlanError` if it is not what it was at the look."""
        name, committed = manifest_name(step), self._committed
        if (manifest := committed.read.get(step)) is not None:
            return manifest
        where = f"{self._storage.where}/{name}"
        try:
            data = self._storage.read(name)
            manifest = decode_manifest(data, where, step)
            if data[:HEAD_BYTES] != committed.readable[step].head.encode():
                raise CorruptionError(f"{where}: has changed since it was read.")
        except (OSError, CorruptionError) as error:
            self._cache.summaries.pop(name, None)  # the next look reads it
            raise OutdatedPlanError(f"step {step} cannot be read: {error}") from error
        committed.read[step] = manifest
        return manifest

    @cached_property
    def _pack_names(self) -> frozenset[str]:
        if self._cache.packs is not None and not self._is_whole:
            return self._cache.packs
        names = set()
        for name, entry in self._storage.entries(PACKS).items():
            if pack_step(pack := name.removeprefix(PACKS)) >= 0:
                names.add(pack)
                if entry.size is not None:
                    self._cache.sizes.setdefault(pack, entry.size)
        self._cache.packs = frozenset(names)
        return self._cache.packs

    @cached_property
    def _sizes(self) -> dict[str, int | OSError]:
        """The sizes of the packs that are there, or why one is not known."""
        sizes: dict[str, int | OSError] = {}
        for pack in sorted(self._pack_names):
            try:
                sizes[pack] = self.pack_size(pack)
            except FileNotFoundError:
                continue
            except ConnectionError:
                raise
            except OSError as error:
                sizes[pack] = error
        return sizes

    def _fault(self, pack: str, size: int) -> str | None:
        """Why no checkpoint can read from a pack, as far as its name and its size tell."""
        found = self.packs.get(pack)
        if found is None:
            return "which is missing"
        return None if found == size else f"which has {found} bytes and not {size}"

    def pack_size(self, pack: str) -> int:
        """Bytes of a pack. They are remembered, because packs never change."""
        sizes = self._cache.sizes
        if pack not in sizes:
            sizes[pack] = self._storage.size(PACKS + pack)
        return sizes[pack]


def is_same_file(storage: Storage, name: str, version: str, summary: ManifestSummary) -> bool:
    """Whether the file of a manifest still has the digest that is remembered."""
    if version and version == summary.version:
        return True
    head = bytearray(HEAD_BYTES)
    storage.read_into(name, 0, memoryview(head))
    return head == summary.head.encode()
