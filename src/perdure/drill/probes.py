"""Inside a program that is being diagnosed: removes one thing that could make runs differ.

If the difference disappears with it, that was the cause. `probe_environment` gives the environment in
which the probes begin before the program does; PERDURE_DRILL_PROBE names them:

- "clock": the time that the program reads is a function of how often it asked.
- "seed": a fixed seed replaces the system's entropy.
- "hash": the order of sets of strings is fixed.
- "rng": at a resume, every random generator gets the state that it had at the checkpoint.
- "iterators": at a resume, every iterator that the program holds is advanced by the steps done.
"""

from __future__ import annotations

import datetime as dt
import io
import itertools
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

PROBE = "PERDURE_DRILL_PROBE"
NAMES = ("clock", "seed", "hash", "rng", "iterators")
ITERATORS = "iterators.json"

_STATES = "generators"
_SITE = """
import os, sys
here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
del sys.modules["sitecustomize"]
try:
    import sitecustomize
except ImportError:
    pass
from perdure.drill.probes import install_probes
install_probes()
"""


def probe_environment(
    directory: Path, probes: tuple[str, ...], environment: Mapping[str, str] | None = None
) -> Mapping[str, str]:
    """The variables under which a Python program begins with `probes`.

    Args:
        directory: A small file is written there.
        probes: Some of `NAMES`.
        environment: The program's own variables; its PYTHONPATH is kept after that of the probes.
    """
    site = directory / "site"
    site.mkdir(parents=True, exist_ok=True)
    (site / "sitecustomize.py").write_text(_SITE)
    inherited = {**os.environ, **(environment or {})}
    path = os.pathsep.join(filter(None, [str(site), inherited.get("PYTHONPATH", "")]))
    hashed = {"PYTHONHASHSEED": "0"} if "hash" in probes else {}
    return {PROBE: ",".join(probes), "PYTHONPATH": path, **hashed}


def install_probes() -> None:
    """Called before the first line of the program."""
    probes = os.environ.get(PROBE, "").split(",")
    if "clock" in probes:
        _count_time()
    if "seed" in probes:
        _fix_entropy()
    if "rng" in probes or "iterators" in probes:
        from perdure.drill.fault_injection import fault_injector
        from perdure.store.drill_hook import DRILL

        if directory := os.environ.get(DRILL):
            injector = fault_injector(directory)
            resume = _Resume(injector.directory, injector.attempt, injector.worker, probes)
            injector.listeners.append(resume)


# ---------------------------------------------------------------- undisturbed runs that differ


def _count_time() -> None:
    """Give each thread a clock that advances by a millisecond whenever it is read."""
    reads = threading.local()

    def ticks() -> int:
        reads.count = getattr(reads, "count", 0) + 1
        return reads.count

    start = 1_700_000_000
    time.time = lambda: start + ticks() / 1000
    time.time_ns = lambda: start * 10**9 + ticks() * 10**6
    time.perf_counter = lambda: ticks() / 1000
    time.perf_counter_ns = lambda: ticks() * 10**6

    class Counted(dt.datetime):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> Counted:
            return cls.fromtimestamp(time.time(), tz)

        @classmethod
        def utcnow(cls) -> Counted:
            return cls.fromtimestamp(time.time(), dt.UTC).replace(tzinfo=None)

        @classmethod
        def today(cls) -> Counted:
            return cls.fromtimestamp(time.time())

    dt.datetime = Counted  # type: ignore[misc]


def _fix_entropy() -> None:
    source = random.Random(0)
    os.urandom = lambda size: source.randbytes(size)
    random.seed(0)
    import numpy as np

    np.random.seed(0)  # noqa: NPY002 (the global generator is the one to seed)
    numbers = itertools.count()
    _wrap_default_rng(lambda make, seed: make(next(numbers) if seed is None else seed))


def _wrap_default_rng(wrapped: Callable[[Callable[..., Any], Any], Any]) -> None:
    import numpy as np

    make = np.random.default_rng

    def default_rng(seed: Any = None) -> Any:
        return wrapped(make, seed)

    np.random.default_rng = default_rng


# ---------------------------------------------------------------- runs that differ after a resume


class _Resume:
    """A listener of the fault injector: keeps the states of generators, and restores them."""

    def __init__(self, directory: Path, attempt: int, worker: int, probes: list[str]) -> None:
        self._directory = directory
        self._first = attempt == 1
        self._worker = worker
        self._probes = probes
        self._made: list[Any] = []
        self._kept: list[Any] = []
        self._listed = False
        if "rng" in probes:
            _wrap_default_rng(self._register)
            if not self._first:
                self._guard_seeds()

    def __call__(self, point: str, step: int | None) -> None:
        if point == "step" and not self._listed:
            self._listed = True
            self._list_iterators()
        if "rng" in self._probes and step is not None:
            if point == "step" and self._first:
                self._path(step).parent.mkdir(exist_ok=True)
                self._path(step).write_text(json.dumps(self._states(), default=_plain))
            elif point == "restored" and not self._first and self._path(step).exists():
                self._restore(json.loads(self._path(step).read_text()))
        if "iterators" in self._probes and point == "restored" and step and not self._first:
            for _, iterator in _iterators(sys._getframe(1)):
                for _ in itertools.islice(iterator, step):
                    pass

    def _path(self, step: int) -> Path:
        return self._directory / _STATES / f"{self._worker}-{step}.json"

    def _register(self, make: Callable[..., Any], seed: Any) -> Any:
        generator = make(seed)
        if len(self._made) < len(self._kept):  # made after the resume: its state is known already
            generator.bit_generator.state = self._kept[len(self._made)]
        self._made.append(generator)
        return generator

    def _states(self) -> dict[str, Any]:
        import numpy as np

        states: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),  # noqa: NPY002
            "made": [generator.bit_generator.state for generator in self._made],
        }
        if (torch := sys.modules.get("torch")) is not None:
            states["torch"] = torch.get_rng_state().tolist()
        return states

    def _restore(self, states: dict[str, Any]) -> None:
        import numpy as np

        version, numbers, gauss = states["python"]
        random.setstate((version, tuple(numbers), gauss))
        np.random.set_state(states["numpy"])  # noqa: NPY002
        self._kept = states["made"]
        for generator, state in zip(self._made, self._kept, strict=False):
            generator.bit_generator.state = state
        if (torch := sys.modules.get("torch")) is not None and "torch" in states:
            torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
        self._restored = True

    _restored = False

    def _guard_seeds(self) -> None:
        """Ignore seeds that the program sets after the restore; they would undo it."""
        import numpy as np

        for owner in (random, np.random):
            setattr(owner, "seed", self._guarded(owner.seed))  # noqa: B010

    def _guarded(self, seed: Callable[..., Any]) -> Callable[..., None]:
        def guarded(*arguments: Any, **named: Any) -> None:
            if not self._restored:
                seed(*arguments, **named)

        return guarded

    def _list_iterators(self) -> None:
        names = [
            f"{name} ({type(iterator).__name__})" for name, iterator in _iterators(sys._getframe(2))
        ]
        (self._directory / ITERATORS).write_text(json.dumps(sorted(set(names))))


def _plain(value: Any) -> Any:
    return value.tolist()


def _iterators(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """The iterators in the variables of the program, in `frame` and its callers."""
    seen: set[int] = set()
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith("perdure."):
            for name, value in {**frame.f_globals, **frame.f_locals}.items():
                if id(value) in seen or isinstance(value, io.IOBase):
                    continue
                if hasattr(type(value), "__next__"):
                    seen.add(id(value))
                    yield name, value
        frame = frame.f_back
