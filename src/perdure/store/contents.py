"""The contents of a run directory, for plans: names, summaries and manifests, but no chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from msgspec import Struct

from perdure.errors import CorruptionError, PruneError
from perdure.store.format import (
    INDEX,
    MANIFESTS,
    PINS,
    QUARANTINE,
    TEMP_SUFFIX,
    manifest_name,
    step_of,
)
from perdure.store.manifest import Manifest
from perdure.store.manifest_json import HEAD_BYTES
from perdure.store.storage import Storage


class ManifestSummary(Struct, frozen=True, array_like=True, gc=False):
    """What a plan needs to know of a manifest: a run may have more manifests than fit into memory.

    Attributes:
        head: The first `HEAD_BYTES` of its file, which hold its digest.
        created: As in the manifest.
        metrics: As in the manifest.
        packs: Names of the packs that it reads from.
        version: The version of its file, where that is known.
    """

    head: str
    created: str
    metrics: dict[str, float | None]
    packs: tuple[str, ...]
    version: str = ""


def summarize(manifest: Manifest, data: bytes) -> ManifestSummary:
    """The summary of a manifest; `data` are the first bytes of its file."""
    return ManifestSummary(
        data[:HEAD_BYTES].decode(),
        manifest.created,
        manifest.metrics,
        tuple([pack.name for pack in manifest.packs]),
    )


class OutdatedPlanError(PruneError):
    """The run directory is not what a plan was made from. Nothing was deleted; plan again."""


class Manifests(Mapping[int, Manifest]):
    """The readable manifests of a snapshot by step. One that is not in memory is read when it is asked
    for; `OutdatedPlanError` if that fails, or it has changed since the snapshot."""

    def __init__(
        self,
        steps: Iterable[int],
        decoded: Mapping[int, Manifest],
        read: Callable[[int], Manifest],
    ) -> None:
        self._manifests: dict[int, Manifest | None] = {step: decoded.get(step) for step in steps}
        self._read = read

    def __getitem__(self, step: int) -> Manifest:
        manifest = self._manifests[step]
        if manifest is None:
            try:
                manifest = self._manifests[step] = self._read(step)
            except ConnectionError:
                raise
            except (OSError, CorruptionError) as error:
                raise OutdatedPlanError(f"step {step} cannot be read: {error}") from error
        return manifest

    def __contains__(self, step: object) -> bool:
        return step in self._manifests

    def __iter__(self) -> Iterator[int]:
        return iter(self._manifests)

    def __len__(self) -> int:
        return len(self._manifests)


class PackSizes(Mapping[str, int]):
    """The packs that are there, with their sizes, which are asked for when they are needed."""

    def __init__(self, names: Iterable[str], size: Callable[[str], int]) -> None:
        self._names = dict.fromkeys(names)
        self._size = size

    def __getitem__(self, name: str) -> int:
        if name not in self._names:
            raise KeyError(name)
        return self._size(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class Contents:
    """A snapshot of names, manifests and sizes.

    `manifests` are the readable ones by step, `summaries` what plans need of those that lack no pack,
    `broken` all others with the reason, and `unreadable` those of them without a manifest;
    `quarantined` the readable manifests in quarantine by name, `lost` the names there that are damaged
    or another run's; `packs` the packs present with their sizes. `unknown` says which manifests, of
    checkpoints and in quarantine, could not be read for a reason other than damage: they may need any
    pack. `frozen` says why nothing at all may be deleted: the log, or a folder, is damaged or not that
    of the run.
    """

    manifests: Mapping[int, Manifest]
    summaries: Mapping[int, ManifestSummary]
    unreadable: Mapping[int, str]
    broken: Mapping[int, str]
    quarantined: Mapping[str, Manifest]
    lost: tuple[str, ...]
    packs: Mapping[str, int]
    pinned: frozenset[int]
    unknown: tuple[str, ...] = ()
    frozen: str | None = None


def committed_steps(storage: Storage) -> list[int]:
    """Steps that have a manifest, oldest first."""
    return sorted(step for name in storage.list(MANIFESTS) if (step := step_of(name)) is not None)


def steps_from(storage: Storage, step: int) -> list[int]:
    """Committed steps that are not below `step`, oldest first. Costs no more than those."""
    names = storage.entries(MANIFESTS, manifest_name(step - 1) if step else "")
    return sorted(other for name in names if (other := step_of(name)) is not None)


def newest_step(storage: Storage) -> int | None:
    """The newest committed step; in a bucket with an index at the cost of two requests."""
    if storage.lists_versions:
        # The names of the index say where to begin, and not what there is.
        hints = [name.rpartition("-")[2] for name in storage.list(INDEX)]
        begin = max((int(hint) for hint in hints if hint.isdecimal()), default=-1)
        if begin >= 0 and (later := steps_from(storage, begin)):
            return later[-1]
    names = list(storage.list(MANIFESTS))
    newest = step_of(max(names, default=""))
    if newest is None:  # there is none, or another name comes last
        newest = max((step for name in names if (step := step_of(name)) is not None), default=None)
    return newest


def pinned_steps(storage: Storage) -> frozenset[int]:
    """Steps that no deletion may touch."""
    names = (name.removeprefix(PINS) for name in storage.list(PINS))
    return frozenset(int(name) for name in names if name.isdecimal())


def step_aside(name: str) -> int | None:
    """The step of a manifest in quarantine, by its name."""
    digits, _, rest = name.removeprefix(QUARANTINE).partition("-")
    return int(digits) if digits.isdecimal() and rest.endswith(".json") else None


def quarantined(storage: Storage) -> list[str]:
    """Names of what is in quarantine: manifests, packs and logs that a repair set aside."""
    return sorted(name for name in storage.list(QUARANTINE) if not name.endswith(TEMP_SUFFIX))
