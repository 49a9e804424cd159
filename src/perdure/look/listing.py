"""`ls`: the checkpoints of a run, with sizes, age and why each is kept. Reads manifests, not packs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from perdure.checkpoint.address import Where, open_run, read_manifests
from perdure.checkpoint.retention import candidates, decide, recorded_retention
from perdure.errors import StoreError
from perdure.look.tables import Shown, Table, printable, size_text
from perdure.store import Run
from perdure.store.compact import LiveChunks, relocated_size
from perdure.store.format import Metric, seconds_of
from perdure.store.garbage_collection import DEAD_SHARE
from perdure.store.manifest import Manifest
from perdure.store.manifest_json import decode_manifest
from perdure.text import few

if TYPE_CHECKING:
    from perdure.store.rollback import AsideCheckpoint

NOT_RECORDED = "not recorded"
"""Why a checkpoint is kept, if no manager has recorded its rules: it was imported, for instance."""

_MOST_METRICS = 4


@dataclass(frozen=True)
class ListedCheckpoint:
    """One committed checkpoint.

    `own_nbytes` are bytes of packs that deleting it alone frees; `shared_nbytes` those of its
    chunks that stay then. `kept`: why, by the rules that its last manager recorded.
    """

    step: int
    created: str
    age_s: float
    leaf_count: int
    nbytes: int
    own_nbytes: int
    shared_nbytes: int
    fingerprint: str
    metrics: Mapping[str, Metric]
    pinned: bool
    kept: str


@dataclass(frozen=True, repr=False)
class RunListing(Shown):
    """The checkpoints of a run, and why others are damaged or unread, by step."""

    where: str
    checkpoints: tuple[ListedCheckpoint, ...]
    damaged: Mapping[int, str] = field(default_factory=dict)
    unread: Mapping[int, str] = field(default_factory=dict)
    rolled_back: tuple[AsideCheckpoint, ...] = ()
    quarantined: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The listing for JSON."""
        return {
            "run": self.where,
            "checkpoints": [asdict(row) for row in self.checkpoints],
            "damaged": [{"step": step, "error": error} for step, error in self.damaged.items()],
            "unread": [{"step": step, "error": error} for step, error in self.unread.items()],
            "quarantined": list(self.quarantined),
            "rolled_back": [
                {
                    "step": aside.manifest.step,
                    "rolled_back_to": aside.why.rolled_back_to,
                    "when": aside.why.time,
                    "name": aside.name,
                }
                for aside in self.rolled_back
            ],
        }

    def _blocks(self) -> list[str | Table]:
        header = [
            "step",
            "created",
            "age",
            "leaves",
            "size",
            "own",
            "shared",
            "fingerprint",
            "kept",
        ]
        optional = ["created", "leaves", "fingerprint", "shared"]
        has_metrics = any(row.metrics for row in self.checkpoints)
        rows: list[list[object]] = [
            [
                row.step,
                row.created,
                age_text(row.age_s),
                row.leaf_count,
                size_text(row.nbytes),
                size_text(row.own_nbytes),
                size_text(row.shared_nbytes),
                row.fingerprint[:16],
                row.kept,
                *([_metrics_text(row.metrics)] if has_metrics else []),
            ]
            for row in self.checkpoints
        ]
        if has_metrics:
            header.append("metrics")
            optional.append("metrics")
        return [
            Table(header, rows, optional),
            *(
                f"step {each.manifest.step} is set aside: {each.why.reason}"
                for each in self.rolled_back
            ),
            *(f"step {step} is damaged: {error}" for step, error in self.damaged.items()),
            *self.unread.values(),
        ]


def list_run(where: Where, *, now: float | None = None) -> RunListing:
    """List the checkpoints of a run; reads every manifest and no pack.

    Args:
        where: The run directory.
        now: Seconds since 1970 to count ages from; by default those of the clock.

    Raises:
        HistoryError: The run has lost its checkpoints.
        NotARunError: There is no run directory.
        UnreachableError: Its checkpoints cannot be listed.
    """
    run = open_run(where)
    run.require_not_lost()
    manifests, damaged, unread = read_manifests(run)
    rolled_back = tuple(run.rolled_back())
    names = {aside.name for aside in rolled_back}
    others = tuple(name for name in run.quarantined() if name not in names)
    rows = tuple(listed(run, manifests, now))
    return RunListing(run.where, rows, damaged, unread, rolled_back, others)


def listed(
    run: Run, manifests: Mapping[int, Manifest], now: float | None = None
) -> list[ListedCheckpoint]:
    """What `list_run` has on each of `manifests`, which are all readable ones of `run`."""
    now = time.time() if now is None else now
    pinned = run.pinned()
    sizes = freed_bytes(manifests, _quarantined(run))
    reasons = _reasons(run, manifests, pinned)
    return [
        ListedCheckpoint(
            step,
            manifest.created,
            now - seconds_of(manifest.created),
            len(manifest.leaves),
            manifest.nbytes,
            *sizes[step],
            manifest.fingerprint,
            manifest.metrics,
            step in pinned,
            reasons[step],
        )
        for step, manifest in sorted(manifests.items())
    ]


def _reasons(
    run: Run, manifests: Mapping[int, Manifest], pinned: Collection[int]
) -> dict[int, str]:
    rules = recorded_retention(run)
    if rules is None:
        newest = max(manifests, default=None)
        named = {
            step: ["pinned"] * (step in pinned) + ["the newest"] * (step == newest)
            for step in manifests
        }
        return {step: ", ".join(reasons) or NOT_RECORDED for step, reasons in named.items()}
    verdicts = decide(candidates(manifests, pinned), rules.max_to_keep, rules.retention)
    return {
        verdict.step: verdict.reason if verdict.keep else f"until the next save: {verdict.reason}"
        for verdict in verdicts
    }


def age_text(seconds: float) -> str:
    """A time as text, such as `3 h`; `in the future` if a clock was set."""
    if seconds < -60:
        return "in the future"
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length or (seconds >= length and unit == "min"):
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def _metrics_text(metrics: Mapping[str, Metric]) -> str:
    """Text such as `accuracy=0.91 loss=0.25`: the first few metrics by name."""
    texts = (f"{printable(name)}={float(value):g}" for name, value in sorted(metrics.items()))
    return few(texts, _MOST_METRICS, " ")


def _quarantined(run: Run) -> list[Manifest]:
    """The readable manifests in quarantine: of rollbacks, and of checkpoints with damaged packs."""
    manifests: list[Manifest] = []
    names: list[str] = []
    with suppress(OSError):
        names = run.quarantined()
    for name in names:
        if name.endswith(".json"):
            with suppress(StoreError, OSError):
                manifests.append(decode_manifest(run.storage.read(name), name, None))
    return manifests


@dataclass
class _Pack:
    """A pack: its size, the chunks that are read from it, and by step the offsets of those read."""

    size: int
    chunks: LiveChunks = field(default_factory=dict)
    read: dict[int, set[int]] = field(default_factory=dict)


def freed_bytes(
    manifests: Mapping[int, Manifest], set_aside: Iterable[Manifest] = ()
) -> dict[int, tuple[int, int]]:
    """For each step, the bytes that deleting it alone frees, and those of its chunks that then
    stay.

    As `perdure prune`: a pack that no other checkpoint reads goes, needed chunks are copied out of
    one that is mostly unneeded. What goes anyway does not count. Packs of manifests `set_aside`
    stay.
    """
    held = {pack.name for manifest in set_aside for pack in manifest.packs}
    freed = dict.fromkeys(manifests, 0)
    stays = dict.fromkeys(manifests, 0)
    for name, pack in _packs(manifests).items():
        spared = 0 if name in held else _spared(pack.size, pack.chunks)
        readers = Counter(offset for offsets in pack.read.values() for offset in offsets)
        for step, offsets in pack.read.items():
            alone = {offset for offset in offsets if readers[offset] == 1}
            gain = 0
            if name not in held and len(pack.read) == 1:
                gain = pack.size
            elif name not in held and alone:
                left = {place: chunk for place, chunk in pack.chunks.items() if place not in alone}
                gain = _spared(pack.size, left)
            kept = offsets - alone if gain else offsets
            stays[step] += sum(pack.chunks[offset][1] for offset in kept)
            freed[step] += gain - spared if gain else 0
    return {step: (freed[step], stays[step]) for step in manifests}


def _packs(manifests: Mapping[int, Manifest]) -> dict[str, _Pack]:
    packs: dict[str, _Pack] = {}
    for step, manifest in manifests.items():
        named = [packs.setdefault(pack.name, _Pack(pack.size)) for pack in manifest.packs]
        for pack in named:
            pack.read.setdefault(step, set())
        for leaf in manifest.every_leaf():
            for chunk, size in zip(leaf.chunks, leaf.sizes(), strict=True):
                pack = named[chunk.pack]
                pack.read[step].add(chunk.offset)
                pack.chunks[chunk.offset] = (chunk.hash, chunk.length, size)
    return packs


def _spared(size: int, chunks: LiveChunks) -> int:
    """The bytes that copying `chunks` out of a pack frees; 0 if the pack stays as it is."""
    if sum(length for _, length, _ in chunks.values()) >= (1 - DEAD_SHARE) * size:
        return 0  # soon known, without an index for the copy
    spared = size - relocated_size({"": chunks})
    return spared if spared > DEAD_SHARE * size else 0
