"""The constants, the scenarios and the tables of proofs/SCALE.md."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from scale_model import (
    Cluster,
    Constants,
    best_interval,
    durable_s,
    goodput,
    intervals,
    plan,
    renewals_of,
    save_parts,
    simulate,
    solve,
    young_s,
)

from perdure.train.interval import optimum_interval

TB = 1e12
DAY_S = 86400.0
MEASURED = Constants(
    stall_s=0.54e-3,
    write_bps=3.38e9,
    read_bps=2.54e9,
    commit_s=4.56e-3,
    message_s=30e-6,
    messages=(0, 8),
    restart_s=2.36,
)
SOURCES = {
    "stall_s": "the loop waits for an asynchronous save of 2 GiB of JAX arrays: `make bench-store`",
    "write_bps": "durable write of one process, 2 GiB: `make bench-store`",
    "read_bps": "cold, verified load of one process, 2 GiB: `make bench-store`",
    "commit_s": "a whole durable save of 5 MB, as an upper bound: `make bench-store`",
    "message_s": "a request to the key-value store in process 0: this proof, which prints it",
    "messages": "requests of one save with W = 2, 4, 8 workers: this proof",
    "restart_s": "SIGKILL to the first new step, two PyTorch workers: `make bench-recovery`",
}
# 466 interruptions in 54 days on 16,384 GPUs (the Llama 3 report).
GPU_FAILURES_S = 54 * DAY_S * 16384 / 466
STEP_S = 5.0
OUTSIDE_S = 180.0


def message_s(clients: int = 4, requests: int = 2000, rounds: int = 5) -> float:
    """Seconds for which a request occupies PyTorch's store; the fastest of some rounds."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set("key", "value")
    connections = [TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(clients)]

    def ask(connection: TCPStore) -> None:
        for _ in range(requests):
            connection.get("key")

    fastest = float("inf")
    for _ in range(rounds):
        threads = [threading.Thread(target=ask, args=(one,)) for one in connections]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        fastest = min(fastest, (time.monotonic() - began) / (clients * requests))
    return fastest


# ---------------------------------------------------------------- tables


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in rows) + "\n"


def constants_table(constants: Constants) -> str:
    none, each = constants.messages
    shown = {
        "stall_s": f"{1000 * constants.stall_s:.2f} ms",
        "write_bps": f"{constants.write_bps / 1e9:.2f} GB/s",
        "read_bps": f"{constants.read_bps / 1e9:.2f} GB/s",
        "commit_s": f"{1000 * constants.commit_s:.2f} ms",
        "message_s": f"{1e6 * constants.message_s:.0f} µs",
        "messages": f"{each:g} W" + (f" + {none:g}" if none else ""),
        "restart_s": f"{constants.restart_s:.2f} s",
    }
    lines = [[f"`{name}`", value, SOURCES[name]] for name, value in shown.items()]
    return table(["constant", "value", "what was measured, and by which command"], lines)


def grid() -> Iterator[Cluster]:
    """Clusters of several sizes, with fast and slow storage."""
    sizes = [
        (100, 0.1, 0.1, 1.0),
        (1000, 1, 0.1, 1.0),
        (1000, 10, 0.1, 1.0),
        (10000, 1, 1, 1.0),
        (10000, 10, 0.1, 1.0),
        (10000, 10, 1, 1.0),
        (10000, 10, 1, 0.7),
    ]
    for workers, state, storage, shape in sizes:
        bandwidth = storage * TB
        yield Cluster(
            workers=workers,
            state=state * TB,
            storage_write_bps=bandwidth,
            storage_read_bps=bandwidth,
            failures_s=GPU_FAILURES_S,
            outside_s=OUTSIDE_S,
            shape=shape,
        )


def grid_table(constants: Constants) -> str:
    head = ["workers", "state, TB", "storage, TB/s", "law", "durable after", "Young", "Daly"]
    head += ["best", "goodput", "first saturated"]
    return table(head, [grid_line(constants, cluster) for cluster in grid()])


def grid_line(constants: Constants, cluster: Cluster) -> list[str]:
    """The answers for one cluster: intervals, goodput, and the part that saturates first."""
    parts = save_parts(constants, cluster)
    durable = durable_s(parts)
    cost = constants.stall_s + cluster.slowed * durable
    mean = cluster.between_failures_s
    young, daly = young_s(cost, mean), optimum_interval(cost, mean)
    most = int(min(8 * max(young, durable, STEP_S), 3 * mean) / STEP_S)
    best, share = best_interval(constants, cluster, STEP_S, most)
    largest = max(parts, key=lambda name: parts[name])
    law = "exponential" if cluster.shape == 1 else f"Weibull {cluster.shape:g}"
    return [
        f"{cluster.workers:,}",
        f"{cluster.state / TB:g}",
        f"{cluster.storage_write_bps / TB:g}",
        law,
        seconds(durable),
        seconds(young),
        seconds(daly),
        seconds(best * STEP_S),
        f"{share:.4f}",
        f"{largest}, below {seconds(parts[largest])}",
    ]


def seconds(value: float) -> str:
    """A duration for people."""
    if value < 0.1:
        return f"{1000 * value:.0f} ms"
    if value < 120:
        return f"{value:.2g} s" if value < 10 else f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


# ---------------------------------------------------------------- what others report


def llama(outside_s: float) -> Cluster:
    """Llama 3 405B: 14 bytes for each parameter, and a storage of 2 TB/s."""
    return Cluster(16384, 405e9 * 14, 2 * TB, 2 * TB, GPU_FAILURES_S, outside_s)


def byterobust(outside_s: float) -> Cluster:
    """9,600 GPUs that fail as often as those of Llama 3; 1 TB, whose saves slow no step."""
    return Cluster(9600, 1 * TB, 1 * TB, 1 * TB, GPU_FAILURES_S, outside_s, slowed=0.0)


def hsdp(stall_s: float, failures_s: float) -> Cluster:
    """100,000 GPUs, of which each failure stops all for `stall_s`."""
    return Cluster(100_000, 10 * TB, 2 * TB, 2 * TB, failures_s, stall_s)


class Reported:
    """The runs of others: what has to be assumed so that the model gives what they report."""

    def __init__(self, constants: Constants) -> None:
        self.constants = constants
        self.llama_10_minutes = goodput(constants, llama(600), 60, STEP_S)
        self.llama_outside_s = solve(
            lambda outside: goodput(constants, llama(outside), 60, STEP_S), 0.90, 60, 7200
        )
        self.byterobust_outside_s = solve(
            lambda outside: goodput(constants, byterobust(outside), 1, STEP_S, range(2), 100),
            0.97, 20, 7200,
        )  # fmt: skip
        # The more seldom a GPU fails the higher the goodput: `solve` wants a falling function.
        rate = solve(
            lambda rate: goodput(constants, hsdp(600, 1 / rate), 60, STEP_S), 0.44, 1e-10, 1e-7
        )
        self.hsdp_failures_s = 1 / rate
        self.hsdp_80 = self._without_repeats(180.0)

    def _without_repeats(self, stall_s: float) -> float:
        """Goodput if a failure stops all workers and no step is repeated, as replicas continue."""
        cluster = hsdp(stall_s, self.hsdp_failures_s)
        steps = int(300 * cluster.between_failures_s)
        job = replace(
            plan(self.constants, cluster, steps, 1.0, 1), durable_s=0.0, stall_s=0.0, end_s=0.0
        )
        return simulate(job, renewals_of(cluster, 0)).goodput

    def table(self) -> str:
        minutes = self.hsdp_failures_s / 100_000 / 60
        more = GPU_FAILURES_S / self.hsdp_failures_s
        llama = (
            "5.7 TB at 2 TB/s, a save every 5 minutes, and 10 minutes outside of perdure for each "
            f"failure; 0.90 would be {self.llama_outside_s / 60:.0f} minutes"
        )
        byterobust = (
            "failures of each GPU as in Llama 3, a save every step of 5 s without any cost (theirs are "
            f"in memory), and {self.byterobust_outside_s / 60:.1f} minutes outside of perdure for each "
            "failure (fitted)"
        )
        synchronous = (
            f"a save every 5 minutes, and a failure every {minutes:.0f} minutes: {more:.1f} times as "
            "many for each GPU as in Llama 3 (fitted)"
        )
        hsdp = "the same failures, and no step is repeated (nothing fitted)"
        lines = [
            [
                "Llama 3: 16,384 GPUs, 466 interruptions in 54 days",
                "more than 0.90",
                f"{self.llama_10_minutes:.3f}",
                llama,
            ],
            ["ByteRobust: 9,600 GPUs", "0.97", "0.970", byterobust],
            ["100,000 GPUs, all stop for 10 minutes", "0.44", "0.440", synchronous],
            ["FT-HSDP: all stop for 3 minutes", "0.80", f"{self.hsdp_80:.3f}", hsdp],
        ]
        return table(["run", "reported", "model", "assumed"], lines)


# ---------------------------------------------------------------- the plot


def plot(constants: Constants, path: Path) -> None:
    """Goodput by interval, and the parts of a save by number of workers."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "scale", "font.size": 9})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    base = Cluster(1, 10 * TB, TB, TB, GPU_FAILURES_S, OUTSIDE_S)
    for workers in (1000, 3000, 10000, 30000):
        cluster = replace(base, workers=workers)
        tried = list(intervals(2000, 1.6))
        (line,) = left.plot(
            [steps * STEP_S for steps in tried],
            [goodput(constants, cluster, steps, STEP_S, range(2), 100) for steps in tried],
            label=f"{workers:,} workers",
        )
        cost = constants.stall_s + cluster.slowed * durable_s(save_parts(constants, cluster))
        left.axvline(
            optimum_interval(cost, cluster.between_failures_s), color=line.get_color(), ls=":", lw=1
        )
    left.set(xscale="log", xlabel="seconds between saves (dotted: Daly)", ylabel="goodput")
    left.legend(fontsize=8)
    counts = [round(10 ** (exponent / 8)) for exponent in range(8, 41)]
    for name, part in (
        ("each process writes its part", "processes"),
        ("the storage, 1 TB/s", "storage"),
        ("commit in process 0", "chief"),
    ):
        times = [save_parts(constants, replace(base, workers=count))[part] for count in counts]
        right.plot(counts, times, label=name)
    right.set(xscale="log", yscale="log", xlabel="workers", ylabel="seconds of a save of 10 TB")
    right.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
