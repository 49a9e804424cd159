"""Planted programs in NumPy that keep a value where it is easily overlooked; see `planted`."""

from __future__ import annotations

from drill_programs.planted_numpy import SGD, Program, numpy_program

RATED = 'state = {"w": state["w"] - rate * gradient(state["w"], batch_of(step))}'

WRONG: dict[str, Program] = {
    # ------------------------------------------------ seen only at some places
    "window": numpy_program(
        """
        STEPS, EVERY = 60, 1
        hot = np.zeros(20)  # wrong: carried in four steps of sixty, and not in the state
        """,
        """
        g = gradient(state["w"], batch_of(step))
        if 40 <= step < 44:
            hot = 0.9 * hot + g
            g = hot
        state = {"w": state["w"] - g}
        """,
        "unsaved state",
    ),
    "export": numpy_program(
        "average = np.zeros(20)  # wrong: written at the end, and not in the state",
        SGD + '\naverage = 0.9 * average + 0.1 * state["w"]',
        "metric state",
        "unsaved state",
        after='\nnp.savez("final.npz", w=average)\n',
    ),
    "timing": numpy_program(
        """
        import threading
        import time
        """,
        """
        parts = []
        worker = threading.Thread(
            target=lambda: parts.append(gradient(state["w"], batch_of(step)))
        )
        worker.start()
        time.sleep(0.1)  # wrong: no join
        state = {"w": state["w"] - sum(parts)}
        """,
        "threads",
    ),
    # ------------------------------------------------ what another run or process has
    "cache_outside": numpy_program(
        """
        cache = Path(os.environ["PLANTED_CACHE"])  # wrong: the first run has other values
        known = np.load(cache) if cache.exists() else np.zeros(20)
        """,
        """
        w = state["w"] - gradient(state["w"], batch_of(step)) + 0.001 * known
        if not cache.exists():
            np.save(cache, w)
        state = {"w": w}
        """,
        "left over",
    ),
    "cache_rewritten": numpy_program(
        """
        cache = Path(os.environ["PLANTED_CACHE"])  # wrong: each run has the values of the last one
        known = np.load(cache) if cache.exists() else np.zeros(20)
        """,
        """
        w = state["w"] - gradient(state["w"], batch_of(step)) + 0.001 * known
        np.save(cache, w)
        state = {"w": w}
        """,
        "left over",
    ),
    "set_of_objects": numpy_program(
        """
        class Part:
            def __init__(self, size):
                self.size = size


        parts = {Part(size) for size in range(1, 40)}
        """,
        """
        total = np.zeros(20)
        for part in parts:  # wrong: in the order of their addresses
            total = total * 0.9 + part.size * gradient(state["w"], batch_of(step)) / 100
        state = {"w": state["w"] - total}
        """,
        "addresses",
    ),
    "other_seed": numpy_program(
        "",
        'state = {"w": state["w"] - noise.random() * gradient(state["w"], batch_of(step))}',
        "other seed",
        restored="noise = np.random.default_rng(SEED + start)  # wrong: another seed after a resume",
    ),
    "other_seed_legacy": numpy_program(
        "",
        'state = {"w": state["w"] - np.random.rand(20) * gradient(state["w"], batch_of(step))}',
        "other seed",
        restored="np.random.seed(SEED + start)  # wrong: another seed after a resume",
    ),
    # ------------------------------------------------ iterators that give no data
    "count": numpy_program(
        """
        from itertools import count

        calls = count(1)  # wrong: begins again
        """,
        "rate = 1 / next(calls)\n" + RATED,
        "iterator",
    ),
    "random_rates": numpy_program(
        """
        draws = np.random.default_rng(SEED + 1)
        rates = iter([draws.uniform() for _ in range(STEPS)])  # wrong: begins again
        """,
        "rate = next(rates)\n" + RATED,
        "iterator",
    ),
    # ------------------------------------------------ places that are easily overlooked
    "environ": numpy_program(
        'os.environ["RATE"] = "1.0"  # wrong: not in the state',
        f"""
        rate = float(os.environ["RATE"]) * 0.9
        os.environ["RATE"] = str(rate)
        {RATED}
        """,
        "unsaved state",
    ),
    "slots": numpy_program(
        """
        class Schedule:
            __slots__ = ("calls",)

            def __init__(self):
                self.calls = 0  # wrong: not in the state


        schedule = Schedule()
        """,
        "schedule.calls += 1\nrate = 1 / schedule.calls\n" + RATED,
        "unsaved state",
    ),
    "context": numpy_program(
        """
        from contextvars import ContextVar

        factor = ContextVar("factor")
        factor.set(1.0)  # wrong: not in the state
        """,
        "rate = factor.get() * 0.9\nfactor.set(rate)\n" + RATED,
        "unsaved state",
    ),
    "cached": numpy_program(
        """
        from functools import lru_cache

        current = {}


        @lru_cache
        def scale():
            return 1 / (1 + np.abs(current["w"]).sum())  # wrong: of the first call in each process

        """,
        f"""
        current["w"] = state["w"]
        rate = scale()
        {RATED}
        """,
        "stale value",
    ),
    "bound_method": numpy_program(
        "draw = np.random.default_rng(SEED + 1).random  # wrong: its generator is not in the state",
        "rate = draw()\n" + RATED,
        "random generator",
    ),
    "thread_generator": numpy_program(
        """
        import queue
        import threading

        asked, given = queue.Queue(), queue.Queue()


        def produce():
            noise = np.random.default_rng(SEED + 1)  # wrong: not in the state
            while asked.get():
                given.put(noise.random())


        threading.Thread(target=produce, daemon=True).start()
        """,
        "asked.put(True)\nrate = given.get()\n" + RATED,
        "random generator",
    ),
    "lines_of_a_log": numpy_program(
        'log = Path("log.txt")',
        f"""
        with log.open("a") as file:
            print(step, file=file)
        # Wrong: a step that is done again has two lines.
        rate = 1 / len(log.read_text().splitlines())
        {RATED}
        """,
        "file",
    ),
}

RIGHT: dict[str, Program] = {
    "exported": numpy_program(
        """
        import json
        import time

        began = time.time()
        """,
        SGD
        + """
with open("log.txt", "a") as file:
    print(step, file=file)
""",
        after="""
np.savez("final.npz", w=state["w"])
Path("seconds.json").write_text(json.dumps(time.time() - began))
Path("made.json").write_text(json.dumps(int(time.time()) // 20))
""",
    ),
    "phases": numpy_program(
        "STEPS, EVERY = 30, 1",
        """
        g = gradient(state["w"], batch_of(step))
        if 10 <= step < 13:
            g = 0.5 * g
        if step % 7 == 0:
            print(step)
        state = {"w": state["w"] - g}
        """,
    ),
}
