"""The time of an exact step, compared with TensorFlow, torch's DDP and plain JAX.

    make bench-distribute     one table, and the same as JSON in build/bench-distribute.json

All subjects have the same model (that of TensorFlow's tutorial unless named), Adam, the global batch,
which is in memory, and a step that ends when its loss is a Python number. All subjects of a block run
at the same time and take turns, a few steps each, round by round. Figures are medians; `spread` is the
lowest and highest median of a round. XLA's thread pool is pinned for the plain steps as well. The row
of a plain step beside itself shows what a ratio is worth on this machine, now.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from distribute_case import WIDE
from table import Row, compared, finish, installed, row

HERE = Path(__file__).parent
T = TypeVar("T")


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


def alone(
    framework: str, order: str, subjects: dict[T, str], rounds: int, **env: str
) -> dict[T, list[float]]:
    """The answers of subjects that take turns, each time in a process of its own."""
    answers: dict[T, list[float]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, what in subjects.items():
            subject = Subject(framework, env=env)
            answers[name].append(subject.ask({order: what}))
            subject.close()
    return {name: series for name, series in answers.items() if None not in series}


def take_turns(
    subjects: dict[str, tuple[Subject, str]], rounds: int, steps: int
) -> dict[str, list[float]]:
    """The median of every round, by subject; more rounds than asked for if steps are short."""
    medians: dict[str, list[float]] = {}
    turn, end = 0, 0.0
    while turn < rounds or time.monotonic() < end:
        for name, (subject, what) in subjects.items():
            if turn and name not in medians:
                continue
            times = subject.ask({"subject": what, "steps": steps})
            if times is not None:
                medians.setdefault(name, []).append(statistics.median(times))
        turn += 1
        end = end or time.monotonic() + SECONDS  # the first round compiles
    return medians


def middle(text: str, series: list[float], unit: str) -> Row:
    return row(text, statistics.median(series), unit, f"{min(series):.3g} .. {max(series):.3g}")


def against(
    text: str,
    mine: list[float],
    name: str,
    peer: list[float],
    most: float | None,
    unit: str = "ms/step",
) -> Row:
    """A row whose ratio is the median of the rounds' ratios, because the machine's speed varies."""
    ratio = statistics.median(a / b for a, b in zip(mine, peer, strict=True))
    mine_row = middle(text, mine, unit)
    compared_row = compared(mine_row, name, statistics.median(peer), most=most or 1e9)
    met = None if most is None else ratio <= most
    return {
        **compared_row,
        "ratio": ratio,
        "reach": f"<= {most:g}x" if most else "report",
        "met": met,
    }


def peers(rounds: int) -> list[Row]:
    """Compare with TensorFlow and DDP, on the tutorial's network at a global batch of 128."""
    torch2, ddp = Subject("torch", 2), Subject("torch", 2)
    subjects = {
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
    two = "exact V=2, PyTorch, 2 worker processes"
    groups = [n for n in ("TF MultiWorkerMirroredStrategy", "DDP, gloo") if n in medians]
    if "exact, 2 workers" in medians:
        mine = medians["exact, 2 workers"]
        if (name := "TF MirroredStrategy") in medians:
            rows.append(against(two, mine, name, medians[name], 1.0))
        rows += [against(two, mine, name, medians[name], None) for name in groups]
        if groups:
            best = min(groups, key=lambda name: statistics.median(medians[name]))
            rows.append(against(two, mine, f"better: {best}", medians[best], 1.0))
        if "DDP, gloo" in medians:
            text = "exact, torch, V=D=2 processes, cnn 128"
            rows.append(against(text, mine, "plain: DDP", medians["DDP, gloo"], 1.05))
    return rows


SECONDS = 6.0
"""Subjects take turns for at least so long: seven rounds of a step of 3 ms would be over in 0.3 s."""

# (model, global batch) of the rows of one engine.
SMALL = (("mlp", 128), ("cnn", 128), ("transformer", 32))
LOOPED = (("gru", 128), ("scan8", 128))
LARGE = (("mlp", 4096), ("cnn", 512), ("transformer", 256))


def same_topology(rounds: int) -> list[Row]:
    """Compare V=D with plain data parallelism of the same engine."""
    jax = Subject("jax", env={"JAX_NUM_CPU_DEVICES": "4"})
    torch = Subject("torch")
    itself = (jax, "plain mlp 128 1")
    pair: dict[str, tuple[Subject, str]] = {"exact": itself, "plain": itself}
    rows = _pair("plain, jax, mlp 128, beside itself", "plain", pair, rounds, None)
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
                if engine == "torch":
                    name = "the same calls without a strategy"
                    pair[name] = (subject, f"split {model} {batch} 8")
                text = f"exact, {engine}, V=8 on D=1, {model} {batch}"
                rows += _pair(text, "one full-batch step", pair, max(rounds // 2, 2), most)
        if engine == "torch":
            pair = {
                "exact": (subject, "compiled mlp 128 8"),
                "plain": (subject, "plain_compiled mlp 128"),
                "plain: eager": (subject, "plain mlp 128"),
            }
            text = "exact, torch, compile=inductor, V=8 on D=1, mlp 128"
            rows += _pair(text, "one full-batch step, compiled", pair, max(rounds // 2, 2), 1.5)
        subject.close()
    return rows


def first_step(rounds: int) -> list[Row]:
    """Compare the first call of a step, which compiles, with that of the plain one."""
    rows, count = [], max(rounds // 2, 2)
    for engine, most in (("jax", 2.5), ("torch", None)):
        last = " 1" if engine == "jax" else ""
        for model, batch in SMALL + LOOPED:
            subjects = {
                "plain": f"plain {model} {batch}{last}",
                "V=D=1": f"exact {model} {batch} 1 1",
                "V=8 on D=1": f"exact {model} {batch} 8 1",
            }
            # No cache on a disk: whoever compiles a program first would pay for the others.
            seconds = alone(engine, "first", subjects, count, JAX_ENABLE_COMPILATION_CACHE="false")
            plain = seconds.pop("plain", None)
            rows += [
                against(
                    f"first step, {engine}, {v}, {model} {batch}", mine, "plain", plain, most, "s"
                )
                for v, mine in seconds.items()
                if plain
            ]
    return rows


def memory(rounds: int) -> list[Row]:
    """Compare the peak memory of a step that is given its state with that of the plain one."""
    gradient = 4 * sum((a + 1) * b for a, b in itertools.pairwise(WIDE))
    rows = []
    for engine in ("jax", "torch"):
        last = " 1 donate" if engine == "jax" else ""
        subjects = {0: f"plain wide 64{last}"}
        subjects |= {v: f"exact wide 64 {v}{last or ' 1'}" for v in (1, 2, 8)}
        # Blocks of this size or more go back to the system when they are freed.
        peaks = alone(
            engine, "peak", subjects, max(rounds // 2, 2), MALLOC_MMAP_THRESHOLD_="1000000"
        )
        plain = peaks.pop(0, [])
        for v, mine in peaks.items():
            # To a tenth: what else a process holds varies by a few MB.
            more = [round((a - b) / gradient, 1) for a, b in zip(mine, plain, strict=False)]
            if more:
                text = (
                    f"memory of a step beyond plain, {engine}, V={v} on D=1, {gradient >> 20} MiB"
                )
                figure = middle(text, more, "gradients")
                rows.append(compared(figure, "log2(V)+1", math.log2(v) + 1, most=1.0))
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
        parts, most = "grad, add, update and the step", float(max(counts.values()))
        rows.append(compared(row(text, most, "programs"), parts, 4.0, most=1.0))
        rows += [
            row(f"compile time, V={v}", seconds, "s", f"{count} programs")
            for v, (count, seconds) in compilations.items()
        ]
    return rows


def loader() -> Iterator[Row]:
    import distribute_loader  # and with it perdure's step on PyTorch

    return distribute_loader.rows()


BLOCKS = {block.__name__: block for block in (peers, same_topology, one_device, first_step, memory)}


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
