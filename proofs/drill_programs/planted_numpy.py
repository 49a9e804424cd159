"""The planted programs in NumPy alone; see `planted`."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent, indent


@dataclass(frozen=True)
class Program:
    """A program, and the causes that a diagnosis may name: none for a right program."""

    source: str
    causes: tuple[str, ...] = ()


_HEAD = """\
import os
import random
from pathlib import Path

import numpy as np

from perdure import CheckpointManager, ManagerOptions

SEED = int(os.environ.get("SEED", "0"))
STEPS, EVERY = 12, 2
examples = np.random.default_rng(SEED).normal(size=(96, 20))


def batch_of(step):
    return examples[step % 12 * 8 :][:8]


def gradient(w, batch):
    return 0.01 * (batch.T @ (batch @ w - batch.sum(1)))

"""

OPEN = 'with CheckpointManager("runs/planted", save_interval_steps=EVERY{options}) as manager:\n'


def numpy_program(
    before: str = "",
    body: str = "",
    *causes: str,
    init: str = '{"w": np.zeros(20)}',
    restored: str = "",
    loop: str = "for step in range(start, STEPS):",
    options: str = "",
    after: str = "",
) -> Program:
    """A loop in NumPy whose `body` turns `state` into the next one."""
    lines = f"state, start = manager.restore_or_initialize({init})\n"
    lines += dedent(restored).strip("\n") + "\n" if restored else ""
    lines += loop + "\n" + indent(dedent(body).strip("\n"), "    ") + "\n"
    if "manager.save" not in body:
        lines += "    manager.save(step + 1, state)\n"
    lines += dedent(after)
    return Program(
        _HEAD
        + dedent(before).strip("\n")
        + "\n\n"
        + OPEN.format(options=options)
        + indent(lines, "    "),
        causes,
    )


SGD = 'state = {"w": state["w"] - gradient(state["w"], batch_of(step))}'
NO_RANDOM = ", options=ManagerOptions(save_random_state=False)"

WRONG: dict[str, Program] = {
    # ------------------------------------------------ state that is not saved
    "momentum": numpy_program(
        "velocity = np.zeros(20)  # wrong: not in the state",
        """
        velocity = 0.9 * velocity + gradient(state["w"], batch_of(step))
        state = {"w": state["w"] - velocity}
        """,
        "unsaved state",
    ),
    "schedule": numpy_program(
        "rate = 1.0  # wrong: not in the state",
        """
        rate *= 0.9
        state = {"w": state["w"] - rate * gradient(state["w"], batch_of(step))}
        """,
        "unsaved state",
    ),
    "schedule_object": numpy_program(
        """
        class Warmup:
            def __init__(self):
                self.calls = 0  # wrong: begins again after a resume

            def rate(self):
                self.calls += 1
                return min(1.0, self.calls / 10)


        warmup = Warmup()
        """,
        'state = {"w": state["w"] - warmup.rate() * gradient(state["w"], batch_of(step))}',
        "unsaved state",
    ),
    "adam_moments": numpy_program(
        "first, second, count = np.zeros(20), np.zeros(20), 0  # wrong: not in the state",
        """
        g = gradient(state["w"], batch_of(step))
        first, second, count = 0.9 * first + 0.1 * g, 0.99 * second + 0.01 * g * g, count + 1
        change = first / (1 - 0.9**count) / (np.sqrt(second / (1 - 0.99**count)) + 1e-8)
        state = {"w": state["w"] - 0.01 * change}
        """,
        "unsaved state",
    ),
    "average": numpy_program(
        "average = np.zeros(20)  # wrong: saved, and not continued from",
        """
        w = state["w"] - gradient(state["w"], batch_of(step))
        average = 0.9 * average + 0.1 * w
        state = {"w": w, "average": average.copy()}
        """,
        "unsaved state",
        "metric state",
        init='{"w": np.zeros(20), "average": np.zeros(20)}',
    ),
    "patience": numpy_program(
        "best, waited, rate = np.inf, 0, 1.0  # wrong: not in the state",
        """
        loss = float(np.abs(batch_of(step) @ state["w"] - batch_of(step).sum(1)).sum())
        best, waited = (loss, 0) if loss < best else (best, waited + 1)
        rate = 0.5 / (1 + waited) + 0.1 / (1 + best)
        state = {"w": state["w"] - rate * gradient(state["w"], batch_of(step))}
        """,
        "unsaved state",
    ),
    "saved_too_early": numpy_program(
        "rate = np.array(1.0)",
        """
        w = state["w"] - rate * gradient(state["w"], batch_of(step))
        state = {"w": w, "rate": rate.copy()}
        manager.save(step + 1, state)
        rate *= 0.9  # wrong: changes after the save
        """,
        "unsaved state",
        init='{"w": np.zeros(20), "rate": np.array(1.0)}',
        restored='rate[...] = state["rate"]',
    ),
    "narrowed": numpy_program(
        "w = np.zeros(20)",
        """
        w = w - gradient(w, batch_of(step))
        state = {"w": w.astype(np.float32)}  # wrong: the loop holds float64
        """,
        "unsaved state",
        init='{"w": np.zeros(20, np.float32)}',
        restored='w = state["w"].astype(np.float64)',
    ),
    "default_argument": numpy_program(
        """
        def rate(seen=[0]):  # wrong: a default value that is kept between calls
            seen[0] += 1
            return 1 / seen[0]

        """,
        'state = {"w": state["w"] - rate() * gradient(state["w"], batch_of(step))}',
        "unsaved state",
    ),
    "class_attribute": numpy_program(
        """
        class Schedule:
            calls = 0  # wrong: belongs to the class, and not to the state

            @classmethod
            def rate(cls):
                cls.calls += 1
                return 1 / cls.calls

        """,
        'state = {"w": state["w"] - Schedule.rate() * gradient(state["w"], batch_of(step))}',
        "unsaved state",
    ),
    "accumulated": numpy_program(
        "total = np.zeros(20)  # wrong: checkpoints fall between two updates",
        """
        total += gradient(state["w"], batch_of(step))
        w = state["w"].copy()
        if step % 3 == 2:
            w -= total
            total[:] = 0
        state = {"w": w}
        """,
        "unsaved state",
    ),
    "replay": numpy_program(
        """
        from collections import deque

        recent = deque(maxlen=3)  # wrong: not in the state
        """,
        """
        recent.append(batch_of(step))
        state = {"w": state["w"] - sum(gradient(state["w"], each) for each in recent)}
        """,
        "unsaved state",
    ),
    "nonlocal": numpy_program(
        """
        def make_rate():
            value = 1.0  # wrong: a closed-over variable

            def rate():
                nonlocal value
                value *= 0.9
                return value

            return rate


        rate = make_rate()
        """,
        'state = {"w": state["w"] - rate() * gradient(state["w"], batch_of(step))}',
        "unsaved state",
    ),
    # ------------------------------------------------ generators
    "generator": numpy_program(
        "noise = np.random.default_rng(SEED + 1)  # wrong: not in the state",
        """
        g = gradient(state["w"], batch_of(step))
        state = {"w": state["w"] - g * (noise.random(20) < 0.9)}
        """,
        "random generator",
    ),
    "generator_of_python": numpy_program(
        "noise = random.Random(SEED + 1)  # wrong: not in the state",
        'state = {"w": state["w"] - noise.random() * gradient(state["w"], batch_of(step))}',
        "random generator",
    ),
    "generator_legacy": numpy_program(
        "noise = np.random.RandomState(SEED + 1)  # wrong: not in the state",
        'state = {"w": state["w"] - noise.rand(20) * gradient(state["w"], batch_of(step))}',
        "random generator",
    ),
    "generator_in_object": numpy_program(
        """
        class Dropout:
            def __init__(self):
                self.noise = np.random.default_rng(SEED + 1)  # wrong: not in the state

            def __call__(self, g):
                return g * (self.noise.random(g.shape) < 0.9)


        dropout = Dropout()
        """,
        'state = {"w": state["w"] - dropout(gradient(state["w"], batch_of(step)))}',
        "random generator",
    ),
    "generator_global": numpy_program(
        "np.random.seed(SEED)  # wrong: the manager is told not to save it",
        'state = {"w": state["w"] - np.random.rand(20) * gradient(state["w"], batch_of(step))}',
        "random generator",
        options=NO_RANDOM,
    ),
    # ------------------------------------------------ the data
    "iterator": numpy_program(
        """
        def batches():
            for at in np.random.default_rng(5).permutation(12):
                yield batch_of(at)

        """,
        'state = {"w": state["w"] - gradient(state["w"], batch)}',
        "data position",
        # Wrong: the batches begin again.
        loop="for step, batch in zip(range(start, STEPS), batches()):",
    ),
    "iterator_variable": numpy_program(
        "source = iter([batch_of(at) for at in range(12)])  # wrong: begins again",
        'state = {"w": state["w"] - gradient(state["w"], next(source))}',
        "data position",
    ),
    "cursor": numpy_program(
        "cursor = 0  # wrong: not in the state",
        """
        batch, cursor = batch_of(cursor), cursor + 1
        state = {"w": state["w"] - gradient(state["w"], batch)}
        """,
        "unsaved state",
        "data position",
    ),
    "epoch": numpy_program(
        """
        EVERY = 3


        def batches():
            yield from (batch_of(at) for at in (2, 0, 3, 1))

        """,
        """
        for batch in batches():
            state = {"w": state["w"] - gradient(state["w"], batch)}
            step += 1
            manager.save(step, state)
        """,
        "data position",
        restored="step = start",
        # Wrong: an epoch begins again from its first batch.
        loop="for epoch in range(start // 4, 3):",
    ),
    "skipped": numpy_program(
        "",
        SGD,
        "skipped steps",
        # Wrong: one step too far after a resume.
        loop="for step in range(start and start + 1, STEPS):",
    ),
    # ------------------------------------------------ what is only counted
    "metric": numpy_program(
        "total = count = 0.0  # wrong: the mean is saved, its parts are not",
        """
        total, count = total + np.abs(state["w"]).sum(), count + 1
        w = state["w"] - gradient(state["w"], batch_of(step))
        state = {"w": w, "metrics": {"size": np.float64(total / count)}}
        """,
        "metric state",
        init='{"w": np.zeros(20), "metrics": {"size": np.float64(0)}}',
    ),
    # ------------------------------------------------ what is outside of the program
    "clock": numpy_program(
        "import time",
        'state = {"w": state["w"] - (time.time() % 1) * gradient(state["w"], batch_of(step))}',
        "time",
    ),
    "date": numpy_program(
        "from datetime import date",
        """
        month = date.today().toordinal() // 30  # wrong: another one in 40 days
        state = {"w": state["w"] - gradient(state["w"], batch_of(step)) / month}
        """,
        "time",
    ),
    "unseeded": numpy_program(
        "noise = np.random.default_rng()  # wrong: no seed",
        'state = {"w": state["w"] - noise.random() * gradient(state["w"], batch_of(step))}',
        "unseeded",
    ),
    "secrets": numpy_program(
        "import secrets",
        """
        part = 1 + secrets.randbelow(1000)
        state = {"w": state["w"] - gradient(state["w"], batch_of(step)) / part}
        """,
        "unseeded",
    ),
    "unseeded_after_resume": numpy_program(
        "",
        """
        # Wrong: only after a resume, without a seed.
        noise = np.random.default_rng() if start else np.random.default_rng(step)
        state = {"w": state["w"] - gradient(state["w"], batch_of(step)) * noise.random()}
        """,
        "unseeded",
    ),
    "hash": numpy_program(
        "",
        """
        part = 1 + hash(f"step {step}") % 100  # wrong: another one in each process
        state = {"w": state["w"] - gradient(state["w"], batch_of(step)) / part}
        """,
        "hash order",
    ),
    "attempt": numpy_program(
        'attempt = int(os.environ["PERDURE_ATTEMPT"])  # wrong: changes at a restart',
        'state = {"w": state["w"] - gradient(state["w"], batch_of(step)) / attempt}',
        "process",
    ),
    "directory": numpy_program(
        """
        Path("data").mkdir(exist_ok=True)
        for number in range(12):
            np.save(f"data/{number}.npy", batch_of(number))
        names = os.listdir("data")  # wrong: in the order of the file system
        """,
        """
        batch = np.load(f"data/{names[step % 12]}")
        state = {"w": state["w"] - gradient(state["w"], batch)}
        """,
        "directory order",
    ),
    "memory": numpy_program(
        "",
        """
        [object() for _ in range(200)]  # leaves addresses, which differ from run to run
        mask = np.empty(200, np.int64)
        mask[:15] = 1  # wrong: the rest is never written
        g = gradient(state["w"], batch_of(step))
        state = {"w": state["w"] - g * (mask[:20] % 7)}
        """,
        "memory",
    ),
    "threads": numpy_program(
        """
        import threading
        from concurrent.futures import ThreadPoolExecutor

        lock = threading.Lock()


        def add(total, w, row):
            part = 0.01 * row * (row @ w - row.sum())
            with lock:
                total += part  # wrong: in the order in which the threads end
        """,
        """
        total = np.zeros(20)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda row: add(total, state["w"], row), batch_of(step)))
        state = {"w": state["w"] - total}
        """,
        "threads",
    ),
}

RIGHT: dict[str, Program] = {
    "sgd": numpy_program("", SGD),
    "by_step": numpy_program(
        "",
        """
        noise = np.random.default_rng((SEED, step))
        g = gradient(state["w"], batch_of(step)) * (noise.random(20) < 0.9)
        state = {"w": state["w"] - g}
        """,
    ),
    "momentum_saved": numpy_program(
        "",
        """
        velocity = 0.9 * state["velocity"] + gradient(state["w"], batch_of(step))
        state = {"w": state["w"] - velocity, "velocity": velocity}
        """,
        init='{"w": np.zeros(20), "velocity": np.zeros(20)}',
    ),
    "generator_saved": numpy_program(
        "noise = np.random.default_rng(SEED)",
        """
        w = state["w"] - noise.random() * gradient(state["w"], batch_of(step))
        state = {"w": w, "noise": noise.bit_generator.state}
        """,
        init='{"w": np.zeros(20), "noise": noise.bit_generator.state}',
        restored='noise.bit_generator.state = state["noise"]',
    ),
    "global_generator": numpy_program(
        "np.random.seed(SEED)",
        'state = {"w": state["w"] - np.random.rand(20) * gradient(state["w"], batch_of(step))}',
    ),
    "iterator_skipped": numpy_program(
        """
        from itertools import islice


        def batches():
            yield from (batch_of(at) for at in np.random.default_rng(5).permutation(12))

        """,
        'state = {"w": state["w"] - gradient(state["w"], batch)}',
        loop="for step, batch in zip(range(start, STEPS), islice(batches(), start, None)):",
    ),
    "sums_saved": numpy_program(
        "",
        """
        total, count = state["total"] + np.abs(state["w"]).sum(), state["count"] + 1
        w = state["w"] - gradient(state["w"], batch_of(step))
        state = {"w": w, "total": total, "count": count, "mean": np.float64(total / count)}
        """,
        init='{"w": np.zeros(20), "total": np.float64(0), "count": 0, "mean": np.float64(0)}',
    ),
    "directory_sorted": numpy_program(
        """
        Path("data").mkdir(exist_ok=True)
        for number in range(12):
            np.save(f"data/{number}.npy", batch_of(number))
        names = sorted(os.listdir("data"))
        """,
        """
        batch = np.load(f"data/{names[step % 12]}")
        state = {"w": state["w"] - gradient(state["w"], batch)}
        """,
    ),
    "threads_in_order": numpy_program(
        "from concurrent.futures import ThreadPoolExecutor",
        """
        with ThreadPoolExecutor(4) as pool:
            parts = list(pool.map(lambda row: 0.01 * row * (row @ state["w"]), batch_of(step)))
        buffer = np.empty(20)
        buffer[:] = np.sum(parts, axis=0)
        state = {"w": state["w"] - buffer + 0.01}
        """,
    ),
}
