"""Planted programs in NumPy whose fault lies in a file, at the end, or in a timer; see `planted`."""

from __future__ import annotations

from drill_programs.planted_numpy import SGD, Program, numpy_program

WRONG: dict[str, Program] = {
    "file_at_end": numpy_program(
        """
        import atexit

        known = dict(np.load("v.npz")) if os.path.exists("v.npz") else {}
        atexit.register(lambda: np.savez("v.npz", **known))  # wrong: not if it is killed
        """,
        """
        velocity = 0.9 * velocity + gradient(state["w"], batch_of(step))
        known[str(step + 1)] = velocity
        state = {"w": state["w"] - velocity}
        """,
        "unsaved state",
        restored="velocity = known.get(str(start), np.zeros(20))",
    ),
    "best_of_mean": numpy_program(
        """
        from perdure import Retention

        sizes = []  # wrong: the mean of a resumed run begins again
        """,
        """
        state = {"w": state["w"] - gradient(state["w"], batch_of(step))}
        sizes.append(float(np.abs(state["w"]).sum()))
        manager.save(step + 1, state, {"size": sum(sizes) / len(sizes)})
        """,
        "metric state",
        "unsaved state",
        options=", max_to_keep=1, options=ManagerOptions(retention=Retention(best_metric='size'))",
    ),
    "end_name": numpy_program(
        "",
        SGD + "\nloss = np.abs(state['w']).sum()",
        "end",
        after="assert loss > 0  # wrong: has no value after the last checkpoint\n",
    ),
    "end_stop": numpy_program(
        "EVERY = 1",
        """
        loss = abs(step - 6.0)
        bad = state["bad"] + (loss >= state["best"])
        w = state["w"] - gradient(state["w"], batch_of(step))
        state = {"w": w, "best": min(loss, state["best"]), "bad": bad}
        manager.save(step + 1, state)
        if bad >= 3:  # wrong: is asked only after another step
            break
        """,
        "end",
        init='{"w": np.zeros(20), "best": 9.0, "bad": 0}',
        loop="for step in range(start, 40):",
    ),
    "counted_again": numpy_program(
        "",
        f"""
        {SGD}
        manager.save(step + 1, state)
        """,
        "counted again",
        "end",
        loop="for step in range(start, start + 40):  # wrong: 40 more after each restart",
    ),
    "own_sigterm": numpy_program(
        """
        import signal
        import sys

        asked = []
        """,
        f"""
        {SGD}
        manager.save(step + 1, state)
        if asked:
            sys.exit(0)  # wrong: says that the training is over
        """,
        "early exit",
        restored="signal.signal(signal.SIGTERM, lambda *_: asked.append(1))",
    ),
    "elapsed": numpy_program(
        """
        import time

        began = time.monotonic()
        """,
        """
        rate = 1.0 if time.monotonic() - began < 60 else 0.1  # wrong: another one after a minute
        state = {"w": state["w"] - rate * gradient(state["w"], batch_of(step))}
        """,
        "time",
    ),
}

RIGHT: dict[str, Program] = {
    "own_directory": numpy_program(
        """
        import shutil

        is_resumed = os.path.isdir("runs/planted")
        """,
        SGD,
        init='{"w": np.zeros(20)}) if is_resumed else ({"w": np.zeros(20)}, 0',
        # Without the wait, a copy meets the temporary files of a save: wrong, and found.
        after="""
        manager.wait_until_finished()
        shutil.copytree("runs/planted", "archive", dirs_exist_ok=True)
        """,
    ),
    "timings": numpy_program(
        "import time",
        """
        began = time.perf_counter()
        state = {"w": state["w"] - gradient(state["w"], batch_of(step))}
        manager.save(step + 1, state, {"seconds": time.perf_counter() - began})
        """,
    ),
}
