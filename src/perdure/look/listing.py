"""`ls`: the checkpoints of a run, with sizes, age and why each is kept. Reads manifests, not packs."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from perdure.checkpoint.address import Where, open_run, read_manifests
from perdure.checkpoint.retention import candidates, decide, recorded_retention
from perdure.errors import StoreError
from perdure.look.freed_bytes import freed_bytes
from perdure.look.tables import Shown, Table, printable, size_text
from perdure.store import Run
from perdure.store.format import seconds_of
from perdure.store.manifest import Manifest
from perdure.store.manifest_json import decode_manifest

NOT_RECORDED = "not recorded"
"""Why a checkpoint is kept, if no manager has recorded its rules: an import, or an earlier release."""

_MOST_METRICS = 4


@dataclass(frozen=True)
class ListedCheckpoint:
    """One committed checkpoint.

    Attributes:
        step: Its step.
        created: When it was saved, in UTC.
        age_s: Seconds since then by this machine's clock.
        leaf_count: Number of leaves.
        nbytes: Bytes of its leaves.
        own_nbytes: Bytes of packs that deleting this checkpoint alone frees, as `perdure prune` does
            and counts it: without the manifest.
        shared_nbytes: Bytes of its chunks that stay then, because other checkpoints read them, or
            others in the same pack.
        fingerprint: Equal fingerprints are equal bits.
        metrics: Numbers by name; None stands for NaN and infinities.
        pinned: Whether it is pinned, which is recorded in the run directory.
        kept: Why it is kept by the rules that its last manager recorded, or that the next save deletes
            it; "pinned", "the newest" or `NOT_RECORDED` if there are no such rules.
    """

    step: int
    created: str
    age_s: float
    leaf_count: int
    nbytes: int
    own_nbytes: int
    shared_nbytes: int
    fingerprint: str
    metrics: Mapping[str, float | None]
    pinned: bool
    kept: str


@dataclass(frozen=True, repr=False)
class RunListing(Shown):
    """The checkpoints of a run.

    Attributes:
        where: Path or URL of the run directory.
        checkpoints: Those whose manifest can be read, oldest first.
        damaged: The error of each damaged manifest, by step.
        unread: The error of each manifest that cannot be read for another reason, by step.
        set_aside: Sentences on the checkpoints that rollbacks set aside.
    """

    where: str
    checkpoints: tuple[ListedCheckpoint, ...]
    damaged: Mapping[int, str] = field(default_factory=dict)
    unread: Mapping[int, str] = field(default_factory=dict)
    set_aside: tuple[str, ...] = ()

    def _blocks(self) -> list[str | Table]:
        return [
            listing_table(self.checkpoints),
            *self.set_aside,
            *(f"step {step} is damaged: {error}" for step, error in self.damaged.items()),
            *self.unread.values(),
        ]


def list_run(where: Where, *, now: float | None = None) -> RunListing:
    """List the checkpoints of a run; reads every manifest and no pack.

    Args:
        where: The run directory.
        now: Seconds since 1970 to count ages from; by default those of the clock.

    Raises:
        NotARunError: There is no run directory.
        UnreachableError: Its checkpoints cannot be listed.
    """
    run = open_run(where)
    manifests, damaged, unread = read_manifests(run)
    set_aside = [
        f"step {aside.manifest.step} is set aside: {aside.why.reason}"
        for aside in run.rolled_back()
    ]
    return RunListing(
        run.where, tuple(listed(run, manifests, now)), damaged, unread, tuple(set_aside)
    )


def listed(
    run: Run, manifests: Mapping[int, Manifest], now: float | None = None
) -> list[ListedCheckpoint]:
    """What `list_run` has on each of `manifests`, which are all readable ones of `run`."""
    now = time.time() if now is None else now
    pinned = run.pinned()
    sizes = freed_bytes(manifests, _set_aside(run))
    reasons = _reasons(run, manifests, pinned)
    rows = []
    for step, manifest in sorted(manifests.items()):
        rows.append(
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
        )
    return rows


def _reasons(
    run: Run, manifests: Mapping[int, Manifest], pinned: Collection[int]
) -> dict[int, str]:
    newest = max(manifests, default=None)
    rules = recorded_retention(run)
    if rules is None:
        named = {step: ["pinned"] if step in pinned else [] for step in manifests}
        if newest is not None:
            named[newest].append("the newest")
        return {step: ", ".join(reasons) or NOT_RECORDED for step, reasons in named.items()}
    verdicts = decide(candidates(manifests, pinned), rules.max_to_keep, rules.retention)
    return {
        verdict.step: verdict.reason if verdict.keep else f"until the next save: {verdict.reason}"
        for verdict in verdicts
    }


def listing_table(checkpoints: tuple[ListedCheckpoint, ...]) -> Table:
    """The checkpoints as a table, with a column for metrics if there are any."""
    header = ["step", "created", "age", "leaves", "size", "own", "shared", "fingerprint", "kept"]
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
        ]
        for row in checkpoints
    ]
    if any(row.metrics for row in checkpoints):
        header.append("metrics")
        for line, row in zip(rows, checkpoints, strict=True):
            line.append(_metrics_text(row.metrics))
    optional = [
        name for name in ("created", "leaves", "fingerprint", "shared", "metrics") if name in header
    ]
    return Table(header, rows, optional)


def age_text(seconds: float) -> str:
    """A time as text, such as `3 h`; `in the future` if a clock was set."""
    if seconds < -60:
        return "in the future"
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length or (seconds >= length and unit == "min"):
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def _set_aside(run: Run) -> list[Manifest]:
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


def _metrics_text(metrics: Mapping[str, float | None]) -> str:
    """Text such as `accuracy=0.91 loss=0.25`: the first few metrics by name."""
    texts = [
        f"{printable(name)}={'not-finite' if value is None else format(value, 'g')}"
        for name, value in sorted(metrics.items())
    ]
    more = [f"(and {len(texts) - _MOST_METRICS} more)"] if len(texts) > _MOST_METRICS else []
    return " ".join([*texts[:_MOST_METRICS], *more])
