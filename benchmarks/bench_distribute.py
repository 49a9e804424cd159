"""The time of an exact step, compared with TensorFlow, torch's DDP and plain JAX.

    make bench-distribute     one table, and the same as JSON in build/bench-distribute.json

All subjects have the same model (that of TensorFlow's tutorial unless named), Adam, the global batch,
which is in memory, and a step that ends when its loss is a Python number. All subjects of a block run
at the same time and take turns, a few steps each, round by round. Figures are medians; `spread` is the
lowest and highest median of a round. XLA's thread pool is pinned for the plain steps as well.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from table import Row, compared, finish, installed, row

HERE = Path(__file__).parent


def port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


class Subject:
    """The processes of one way to train: one, or a group."""

    def __init__(self, framework: str, processes: int = 1, env: dict[str, str] | None = None):
        self.label = f"{framework}, {processes} processes" if processes > 1 else framework
        coordinator = f"127.0.0.1:{port()}"
        self._children = [
            subprocess.Popen(
                [
                    *(sys.executable, str(HERE / "distribute_case.py"), framework),
                    *((str(p), str(processes), coordinator) if processes > 1 else ()),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if not os.environ.get("SHOW") else None,
                text=True,
                env=os.environ | (env or {}),
            )
            for p in range(processes)
        ]

    def ask(self, order: dict[str, Any]) -> Any:
        """The answer of the first process; None, after printing the error, if a process fails."""
        for child in self._children:
            if child.poll() is None:
                _pipe(child.stdin).write(json.dumps(order) + "\n")
                _pipe(child.stdin).flush()
        answers = [_pipe(child.stdout).readline() for child in self._children]
        if all(answers):
            return json.loads(answers[0])
        self.close()
        return None

    def close(self) -> None:
        for child in self._children:
            _pipe(child.stdin).close()
        for child in self._children:
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
            text = child.stderr.read() if child.stderr else ""
            if child.wait():
                print(f"{self.label} failed:\n{text[-1500:]}", file=sys.stderr)


def take_turns(
    subjects: dict[str, tuple[Subject, str]], rounds: int, steps: int
) -> dict[str, list[float]]:
    """The median of every round, by subject."""
    medians: dict[str, list[float]] = {}
    for turn in range(rounds):
        for name, (subject, what) in subjects.items():
            if turn and name not in medians:
                continue
            times = subject.ask({"subject": what, "steps": steps})
            if times is not None:
                medians.setdefault(name, []).append(statistics.median(times))
    return medians


def timed(text: str, series: list[float]) -> Row:
    spread = f"{min(series):.3g} .. {max(series):.3g}"
    return row(text, statistics.median(series), "ms/step", spread)


def against(text: str, mine: list[float], name: str, peer: list[float], most: float | None) -> Row:
    """A row whose ratio is the median of the rounds' ratios, because the machine's speed varies."""
    ratio = statistics.median(a / b for a, b in zip(mine, peer, strict=True))
    compared_row = compared(timed(text, mine), name, statistics.median(peer), most=most or 1e9)
    met = None if most is None else ratio <= most
    return {
        **compared_row,
        "ratio": ratio,
        "reach": f"<= {most:g}x" if most else "report",
        "met": met,
    }


def peers(rounds: int) -> list[Row]:
    """Compare with TensorFlow and DDP, on the tutorial's network at a global batch of 128."""
    torch1, torch2, ddp = Subject("torch"), Subject("torch", 2), Subject("torch", 2)
    subjects = {
        "exact": (torch1, "exact cnn 128 2 2"),
        "exact, 2 workers": (torch2, "exact cnn 128 2"),
        "DDP, gloo": (ddp, "ddp cnn 128"),
    }
    if installed(("tensorflow",)):
        subjects["TF MirroredStrategy"] = (Subject("tf"), "mirrored 128 2")
        subjects["TF MultiWorkerMirroredStrategy"] = (Subject("tf", 2), "workers 128")
    medians = take_turns(subjects, rounds, 6)
    for subject, _ in subjects.values():
        subject.close()
    rows = []
    one, two = (
        "exact V=2, PyTorch, 2 threads of 1 process",
        "exact V=2, PyTorch, 2 worker processes",
    )
    if "exact" in medians and "TF MirroredStrategy" in medians:
        name = "TF MirroredStrategy"
        rows.append(against(one, medians["exact"], name, medians[name], 1.0))
    groups = [n for n in ("TF MultiWorkerMirroredStrategy", "DDP, gloo") if n in medians]
    if "exact, 2 workers" in medians:
        mine = medians["exact, 2 workers"]
        rows += [against(two, mine, name, medians[name], None) for name in groups]
        if groups:
            best = min(groups, key=lambda name: statistics.median(medians[name]))
            rows.append(against(two, mine, f"better: {best}", medians[best], 1.0))
        if "DDP, gloo" in medians:
            text = "exact, torch, V=D=2 processes, cnn 128"
            rows.append(against(text, mine, "plain: DDP", medians["DDP, gloo"], 1.05))
    return rows


# (model, global batch) of the rows of one engine.
SMALL = (("mlp", 128), ("cnn", 128), ("transformer", 32))
LOOPED = (("gru", 128), ("scan8", 128))
LARGE = (("mlp", 4096), ("cnn", 512), ("transformer", 256))


def same_topology(rounds: int) -> list[Row]:
    """Compare V=D with plain data parallelism of the same engine."""
    jax = Subject("jax", env={"JAX_NUM_CPU_DEVICES": "4"})
    torch = Subject("torch")
    rows = []
    for model, batch in SMALL + LOOPED:
        for devices in (1, 2, 4):
            pair = {
                "exact": (jax, f"exact {model} {batch} {devices} {devices}"),
                "plain": (jax, f"plain {model} {batch} {devices}"),
            }
            if devices > 1:
                pair["plain: shard_map, psum"] = (jax, f"mapped {model} {batch} {devices}")
            text = f"exact, jax, V=D={devices}, {model} {batch}"
            rows += _pair(text, "plain: jit, sharded", pair, rounds, 1.05)
        pair = {
            "exact": (torch, f"exact {model} {batch} 1"),
            "plain": (torch, f"plain {model} {batch}"),
        }
        rows += _pair(f"exact, torch, V=D=1, {model} {batch}", "plain: eager", pair, rounds, 1.05)
    jax.close()
    torch.close()
    return rows


def _pair(
    text: str, name: str, pair: dict[str, tuple[Subject, str]], rounds: int, most: float | None
) -> list[Row]:
    """A row against "plain", and a report for each other subject."""
    medians = take_turns(pair, rounds, 8)
    if "exact" not in medians or "plain" not in medians:
        return []
    exact_row = against(text, medians["exact"], name, medians["plain"], most)
    others = [other for other in medians if other not in ("exact", "plain")]
    return [
        exact_row,
        *(against(text, medians["exact"], other, medians[other], None) for other in others),
    ]


def one_device(rounds: int) -> list[Row]:
    """Compare eight replicas on one device with the whole batch at once."""
    rows = []
    for engine in ("jax", "torch"):
        subject = Subject(engine)
        for sizes, most in ((SMALL, 1.5), (LARGE, 1.05)):
            for model, batch in sizes:
                last = " 1" if engine == "jax" else ""
                pair = {
                    "exact": (subject, f"exact {model} {batch} 8 1"),
                    "plain": (subject, f"plain {model} {batch}{last}"),
                }
                text = f"exact, {engine}, V=8 on D=1, {model} {batch}"
                rows += _pair(text, "one full-batch step", pair, max(rounds // 2, 2), most)
        subject.close()
    return rows


def counted() -> list[Row]:
    rows = []
    torch = Subject("torch")
    for replicas, copies in (torch.ask({"ask": "live_contributions"}) or {}).items():
        text = f"gradients alive at once, V={replicas}"
        limit = float(math.ceil(math.log2(int(replicas))) + 2)
        rows.append(compared(row(text, copies, "copies"), "log2(V)+2", limit, most=1.0))
    torch.close()
    jax = Subject("jax")
    compilations = jax.ask({"ask": "compilations"}) or {}
    jax.close()
    if compilations:
        counts = {int(v): count for v, (count, _) in compilations.items() if int(v) > 1}
        text = f"programs compiled, V={min(counts)} .. {max(counts)}"
        most, least = max(counts.values()), min(counts.values())
        rows.append(compared(row(text, most, "programs"), "the fewest", float(least), most=1.0))
        rows += [
            row(f"compile time, V={v}", seconds, "s", f"{count} programs")
            for v, (count, seconds) in compilations.items()
        ]
    return rows


def loader() -> Iterator[Row]:
    import distribute_loader  # and with it perdure's step on PyTorch

    return distribute_loader.rows()


BLOCKS = {"peers": peers, "same_topology": same_topology, "one_device": one_device}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/bench-distribute.json"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="blocks to run, with commas between")
    given = parser.parse_args()
    wanted = given.only.split(",") if given.only else [*BLOCKS, "counted", "loader"]
    return finish(rows(wanted, given.rounds), given.out)


def rows(wanted: list[str], rounds: int) -> Iterator[Row]:
    """The rows of the chosen blocks."""
    for name in wanted:
        print(f"{name} ...", file=sys.stderr, flush=True)
        yield from BLOCKS[name](rounds) if name in BLOCKS else globals()[name]()


if __name__ == "__main__":
    sys.exit(main())
