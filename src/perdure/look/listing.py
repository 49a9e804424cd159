"""`ls` and `tree`: the checkpoints of a run, and the leaves of one; from manifests alone."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from perdure.checkpoint.address import Where, open_checkpoint, open_run, read_manifests
from perdure.checkpoint.arguments import integer
from perdure.checkpoint.retention import candidates, decide, recorded_retention
from perdure.look.leaf_reader import select_leaves, value_text
from perdure.look.tables import Shown, Table, share_text, size_text
from perdure.store import Run
from perdure.store.format import Metric, seconds_of
from perdure.store.manifest import Manifest
from perdure.text import counted, few, printable

if TYPE_CHECKING:
    from perdure.store.rollback import AsideCheckpoint

NOT_RECORDED = "not recorded"
"""Why a checkpoint is kept, if no manager has recorded its rules: it was imported, for instance."""

_MOST_METRICS = 4
_VALUE = 40


@dataclass(frozen=True)
class ListedCheckpoint:
    """One committed checkpoint.

    `kept`: why, by the rules that its last manager recorded.
    """

    step: int
    created: str
    age_s: float
    leaf_count: int
    nbytes: int
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
        header = ["step", "created", "age", "leaves", "size", "fingerprint", "kept"]
        optional = ["created", "leaves", "fingerprint"]
        has_metrics = any(row.metrics for row in self.checkpoints)
        rows: list[list[object]] = [
            [
                row.step,
                row.created,
                age_text(row.age_s),
                row.leaf_count,
                size_text(row.nbytes),
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
    reasons = _reasons(run, manifests, pinned)
    return [
        ListedCheckpoint(
            step,
            manifest.created,
            now - seconds_of(manifest.created),
            len(manifest.leaves),
            manifest.nbytes,
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
    texts = (f"{printable(name)}={float(value):g}" for name, value in sorted(metrics.items()))
    return few(texts, _MOST_METRICS, " ")


@dataclass(frozen=True)
class LeafTreeNode:
    """A leaf, or a branch ("" is the state) with everything below it."""

    path: str
    depth: int
    leaf_count: int
    nbytes: int
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    value: str | None = None

    def describe(self) -> str:
        """`float32[3,4]`, `int 7`, or the number of leaves of a branch."""
        if self.dtype is None:
            return counted(self.leaf_count, "leaf", "leaves")
        return value_text(self.dtype, self.shape, self.value, _VALUE)


@dataclass(frozen=True, repr=False)
class LeafTree(Shown):
    """The leaves of a checkpoint as a tree, each branch before what is below it."""

    checkpoint: str
    nodes: tuple[LeafTreeNode, ...]

    def _blocks(self) -> list[str | Table]:
        whole = self.nodes[0].nbytes if self.nodes else 0
        rows = [
            (
                "  " * node.depth
                + (printable(node.path.rpartition("/")[2]) if node.path else "(state)"),
                node.describe(),
                size_text(node.nbytes),
                share_text(node.nbytes, whole),
            )
            for node in self.nodes
        ]
        return [self.checkpoint, Table(("leaf", "value", "size", "share"), rows, ["share", "size"])]


def tree(
    where: Where, *, leaves: str | Iterable[str] | None = None, depth: int | None = None
) -> LeafTree:
    """The leaves of a checkpoint as a tree; reads the manifest and no chunk.

    Args:
        where: The checkpoint, as for `open_checkpoint`.
        leaves: Only the leaves that these patterns select; shares are those of the selection.
        depth: Show branches of so many parts and nothing below them.

    Raises:
        ArgumentError: A pattern selects nothing, or `depth` is negative.
        StoreError: As `open_checkpoint`.
    """
    integer("depth", depth, 0, optional=True)
    checkpoint = open_checkpoint(where)
    entries = select_leaves(checkpoint, leaves)
    totals: dict[str, list[int]] = {}
    for entry in entries:
        parts = entry.path.split("/") if entry.path else []
        for level in range(len(parts) + 1):
            if depth is None or level <= depth:
                total = totals.setdefault("/".join(parts[:level]), [0, 0])
                total[0] += 1
                total[1] += entry.nbytes
    kinds: dict[str, Any] = {e.path: (e.dtype, e.shape, e.text) for e in entries}
    nodes = (
        LeafTreeNode(path, path.count("/") + 1 if path else 0, count, nbytes, *kinds.get(path, ()))
        for path, (count, nbytes) in totals.items()
    )
    return LeafTree(checkpoint.name, tuple(nodes))
