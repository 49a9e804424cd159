"""The same training state saved and loaded by two processes: perdure beside what they have already.

    make bench-doors          one table, and the same as JSON in build/bench-doors.json

Two processes (gloo; Orbax: two of JAX) hold a transformer of 17 million parameters with AdamW, 288
tensors and 200 MB of float32: in full in each of them (DDP), or half in each (FSDP2). They save it, and
load it into new objects. A write ends when the files and directories are synced: if the program itself
does not do that, it is done afterwards, and there is a row without it. The stall is the time until the
training loop continues. A load begins with files that are not in the page cache, and ends when model
and optimizer hold the values; the processes have no freed memory to use again. Before each, memory of
the machine is touched and freed, because the host of a virtual machine takes back what is long free.
All take turns, with other values before each save. Ratios are medians of those of the turns; CPU times
are sums over both processes. Under FSDP2, `torch.save` writes one file for each process, which only as
many processes can load.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from doors_measure import Figures, state_bytes
from local_group import reports_of
from store_probe import fresh, middle, spread
from table import Row, compared, finish, installed, row

HERE = Path(__file__).parent
TORCH, JAX = "doors_torch.py", "doors_orbax.py"
LAYOUTS = ("DDP", "FSDP2")
SUBJECTS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "torch.save": (TORCH, LAYOUTS, ("torch",)),
    "Lightning": (TORCH, ("DDP",), ("lightning",)),
    "DCP": (TORCH, LAYOUTS, ("torch",)),
    "DCP async": (TORCH, LAYOUTS, ("torch",)),
    "Orbax": (JAX, LAYOUTS, ("orbax.checkpoint",)),
    "perdure": (TORCH, LAYOUTS, ("torch",)),
    "perdure.plugins.dcp": (TORCH, LAYOUTS, ("torch",)),
    "perdure.plugins.dcp async": (TORCH, LAYOUTS, ("torch",)),
    "perdure.plugins.lightning": (TORCH, ("DDP",), ("lightning",)),
    "perdure on JAX": (JAX, LAYOUTS, ("jax",)),
}
"""The program of each subject, its layouts, and the modules without which it is not installed."""

PLUG_INS = {
    "perdure.plugins.dcp": "DCP",
    "perdure.plugins.dcp async": "DCP async",
    "perdure.plugins.lightning": "Lightning",
    "perdure on JAX": "Orbax",
}
"""What each of these takes the place of."""


def group(program: str, processes: int, *arguments: object) -> dict[str, Figures] | None:
    """Run a program as a group: for each subject the longest time of a process, and all CPU time.

    None, after printing the error, if one fails.
    """
    try:
        reports = reports_of(program, processes, *arguments)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return None
    return {
        name: {
            key: [
                sum(values) if key.endswith("cpu") else max(values)
                for values in zip(*(report[name][key] for report in reports), strict=True)
            ]
            for key in figures
        }
        for name, figures in reports[0].items()
    }


def take_turns(given: argparse.Namespace, layout: str, scratch: Path) -> dict[str, list[Figures]]:
    """The figures of each turn of each subject that is installed."""
    wanted = [
        name
        for name, (_, layouts, modules) in SUBJECTS.items()
        if layout in layouts and installed(modules) and name not in given.without.split(",")
    ]
    turns: dict[str, list[Figures]] = {name: [] for name in wanted}
    for number in range(given.rounds):
        for program in (TORCH, JAX):
            print(f"  {layout} {number + 1}: {program} ...", file=sys.stderr, flush=True)
            names = [name for name in wanted if SUBJECTS[name][0] == program]
            if not names:
                continue
            # Nobody is always the first, on an empty disk.
            first = number % max(1, len(names))
            names = [*names[first:], *names[:first]]
            found = group(program, 2, layout, scratch / "files", given.saves, *names)
            for name, figures in (found or {}).items():
                turns[name].append(figures)
    fresh(scratch / "files")
    return {name: figures for name, figures in turns.items() if figures}


def figure(turns: Sequence[Figures], key: str) -> list[float]:
    """One value for each turn: the middle one of its saves or loads."""
    return [middle(turn[key]) for turn in turns]


def layout_rows(turns: Mapping[str, Sequence[Figures]], layout: str) -> Iterator[Row]:
    peers = [name for name in turns if not name.startswith("perdure")]
    for key, text, is_rate in (
        ("write", "durable write", True),
        ("stall", "stall", False),
        ("load", "load", True),
    ):
        for name in turns:
            mine = figure(turns[name], key)
            what = f"{name}: {text}, {layout}"
            this = _row(what, mine, is_rate)
            if name in peers:
                yield this
                continue
            best = min(peers, key=lambda peer: middle(figure(turns[peer], key)), default=None)
            for peer in dict.fromkeys((PLUG_INS.get(name), best)):
                if peer is not None and peer in turns:
                    yield _against(this, mine, peer, figure(turns[peer], key), is_rate)
    for name in turns:
        mine = figure(turns[name], "unsynced")
        if name in peers:
            yield _row(f"{name}: write that is not synced, {layout}", mine, is_rate=True)
        for key in ("write cpu", "load cpu"):
            values = [1e3 * value for value in figure(turns[name], key)]
            text = f"{name}: CPU time of a {key.removesuffix(' cpu')}, {layout}"
            yield row(text, middle(values), "ms", spread(values))


def _row(what: str, seconds: Sequence[float], is_rate: bool) -> Row:
    values = [state_bytes() / 1e6 / s if is_rate else 1e3 * s for s in seconds]
    return row(what, middle(values), "MB/s" if is_rate else "ms", spread(values))


def _against(
    this: Row, mine: Sequence[float], peer: str, theirs: Sequence[float], is_rate: bool
) -> Row:
    """The row compared with a peer: how many times faster, as the median of the turns."""
    ratio = middle([other / own for own, other in zip(mine, theirs, strict=True)])
    limit = _row("", theirs, is_rate)["value"]
    return {**compared(this, peer, limit, least=1.0), "ratio": ratio, "met": ratio >= 1.0}


def replica_rows(given: argparse.Namespace) -> Iterator[Row]:
    for processes in (1, 2):
        found = group("doors_replicas.py", processes, 10 * given.rounds)
        for key, text in ("", "wall time"), (" cpu", "CPU time of all processes"):
            if found is None:
                continue
            mine = [1e3 * value for value in found["LogicalReplicas"][f"step{key}"]]
            plain = [1e3 * value for value in found["DDP"][f"step{key}"]]
            what = f"a step of 12 replicas with LogicalReplicas on {processes}: {text}"
            ratio = middle([a / b for a, b in zip(mine, plain, strict=True)])
            yield row(
                what,
                middle(mine),
                "ms",
                spread(mine),
                against="plain DDP",
                limit=middle(plain),
                ratio=ratio,
            )


def rows(given: argparse.Namespace) -> Iterable[Row]:
    with tempfile.TemporaryDirectory(dir=given.out.parent.absolute()) as scratch:
        for layout in given.layouts.split(","):
            yield from layout_rows(take_turns(given, layout, Path(scratch)), layout)
    if not given.without_replicas:
        yield from replica_rows(given)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/bench-doors.json"))
    parser.add_argument("--rounds", type=int, default=5, help="turns of every subject")
    parser.add_argument("--saves", type=int, default=2, help="saves and loads in each turn")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="with commas between")
    parser.add_argument("--without", default="", help="subjects to leave out, with commas between")
    parser.add_argument(
        "--without-replicas", action="store_true", help="no rows of LogicalReplicas"
    )
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    return finish(rows(given), given.out)


if __name__ == "__main__":
    sys.exit(main())
