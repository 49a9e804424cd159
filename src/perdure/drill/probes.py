"""Inside a program of the drill: changes one thing that its result could depend on.

`probe_environment` gives the environment in which the probes begin before the program does;
PERDURE_DRILL_PROBE names them. These take away what makes two runs differ:

- "clock": the time that the program reads is a function of how often it asked.
- "seed": a fixed seed replaces the system's entropy (also of `secrets`, and PyTorch's first seed).
- "hash": the hashes of strings are fixed.
- "addresses": the addresses of objects are the same in each process, if the system allows that.
- "process": the number of the process and of the attempt are fixed.
- "memory": memory that nothing was written to holds a fixed pattern.
- "one thread": tasks of a thread pool run one after the other, and libraries use one thread.
- "no caches": `functools.cache` and `lru_cache` keep nothing in functions of the program.
- "no jit": JAX compiles no function.

These plant what another machine does otherwise; that they took effect is recorded as an event:

- "jumps": the clock can jump, and the timers that the program reads.
- "shuffled directories": the entries of a directory come in another order.
- "poisoned memory": memory that nothing was written to holds a pattern, not zeros.
- "late threads": the tasks of a thread pool begin later, and not in their order; so do threads.
- "fast timers": the timers that the program reads run 60 times as fast.

"resume" puts back what the process held; see `resume_probe`.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import importlib.abc
import importlib.machinery
import itertools
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

from perdure.drill.jumping_clock import count_time, install_jumps, run_faster
from perdure.drill.written_files import record
from perdure.runtime.process_group import ATTEMPT
from perdure.state.program_code import is_program_file

PROBE = "PERDURE_DRILL_PROBE"
PUT = "PERDURE_DRILL_PUT"
PLANTS = ("shuffled directories", "poisoned memory", "late threads", "fast timers")

_POISON = 0xA5
_ASK = 0xFFFFFFFF
_NO_RANDOM_ADDRESSES = 0x0040000
_LATE_S = 0.004
_LATE_THREAD_S, _LATE_THREADS = 0.3, 10
_SITE = """
import os, sys
here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
this = sys.modules.pop("sitecustomize")
try:
    import sitecustomize
except ImportError:
    sys.modules["sitecustomize"] = this  # Python expects one after the import
from perdure.drill.probes import install_probes
install_probes()
"""
_VARIABLES = {
    "hash": {"PYTHONHASHSEED": "0"},
    "addresses": {"PYTHONHASHSEED": "0"},
    "no jit": {"JAX_DISABLE_JIT": "1"},
    "process": {ATTEMPT: "1"},
    "memory": {"MALLOC_PERTURB_": str(_POISON)},
    "poisoned memory": {"MALLOC_PERTURB_": str(_POISON)},
    "one thread": dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
    ),
}


def probe_environment(
    directory: Path,
    probes: Sequence[str],
    environment: Mapping[str, str] | None = None,
    put: Sequence[str] = (),
) -> Mapping[str, str]:
    """The variables under which a Python program begins with `probes`; a file goes into
    `directory`.

    `environment` are its own, whose PYTHONPATH comes after that of the probes; `put` is what
    "resume" puts back.
    """
    site = directory / "site"
    site.mkdir(parents=True, exist_ok=True)
    (site / "sitecustomize.py").write_text(_SITE)
    inherited = {**os.environ, **(environment or {})}
    path = os.pathsep.join(filter(None, [str(site), inherited.get("PYTHONPATH", "")]))
    variables = {PROBE: ",".join(probes), PUT: json.dumps(list(put)), "PYTHONPATH": path}
    for probe in probes:
        variables |= _VARIABLES.get(probe, {})
    if "one thread" in probes:
        from perdure.checkpoint.recipe import ALLOW  # which a program with probes must not load

        # The program resumes from a checkpoint of a run that had more threads.
        variables[ALLOW] = ",".join(filter(None, [inherited.get(ALLOW, ""), "threads"]))
    return variables


def install_probes() -> None:
    """Called before the first line of the program."""
    installers: Mapping[str, Callable[[], None]] = {
        "clock": count_time,
        "seed": _fix_entropy,
        "addresses": _fix_addresses,
        "no caches": _keep_nothing,
        "process": _fix_process,
        "memory": _poison,
        "one thread": _one_thread,
        "jumps": install_jumps,
        "shuffled directories": _shuffle_directories,
        "poisoned memory": _poison,
        "late threads": _delay_threads,
        "fast timers": lambda: run_faster(lambda: _took_effect("fast timers")),
        "resume": _resume,
    }
    for probe in os.environ.get(PROBE, "").split(","):
        if probe in installers:
            installers[probe]()


def _resume() -> None:
    from perdure.drill.fault_injection import fault_injector
    from perdure.drill.resume_probe import ResumeProbe
    from perdure.store.drill_hook import DRILL

    if directory := os.environ.get(DRILL):
        injector = fault_injector(directory)
        put = json.loads(os.environ.get(PUT) or "[]")
        attempt, worker = injector.attempt, injector.worker
        injector.probe = ResumeProbe(injector.directory, attempt, worker, put)


# ---------------------------------------------------------------- entropy and the process


def _fix_entropy() -> None:
    sources = threading.local()  # a thread that saves must not take numbers from the loop
    numbers = itertools.count()

    def urandom(size: int) -> bytes:
        if not hasattr(sources, "random"):
            sources.random = random.Random(threading.current_thread().name)
        return sources.random.randbytes(size)

    os.urandom = urandom
    random._urandom = os.urandom  # type: ignore[attr-defined]  # of `secrets`, and so of NumPy
    random.seed(0)
    seeded, reseeded = random.Random.seed, random.seed
    # type.__setattr__ so that instances made without a seed get a number, too.
    random.Random.seed = lambda self, a=None, version=2: seeded(  # type: ignore[method-assign]
        self, next(numbers) if a is None else a, version
    )
    random.seed = lambda a=None, version=2: reseeded(next(numbers) if a is None else a, version)

    def torch_imported(torch: ModuleType) -> None:
        torch.manual_seed(0)
        torch.seed = lambda: torch.manual_seed(next(numbers)).initial_seed()  # type: ignore[attr-defined]

    after_import("torch", torch_imported)
    import numpy as np

    np.random.seed(0)  # noqa: NPY002 (the global generator is the one to seed)


def _fix_addresses() -> None:
    """Begin this process again where the system gives out the same addresses each time."""
    personality = ctypes.CDLL(None).personality
    now = personality(_ASK)
    if now >= 0 and not now & _NO_RANDOM_ADDRESSES:
        if personality(now | _NO_RANDOM_ADDRESSES) < 0:
            sys.exit("the system does not allow the same addresses in each process")
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606 (the same command once more)


def _keep_nothing() -> None:
    def caching(maxsize: Any = 128, typed: bool = False) -> Callable[..., Any]:
        def decorate(function: Any) -> Callable[..., Any]:
            file = getattr(getattr(function, "__code__", None), "co_filename", "")
            return _uncached(function) if is_program_file(file) else keep(function)

        if callable(maxsize):  # a decorator without parentheses
            return caching()(maxsize)
        keep = real(maxsize, typed)
        return decorate

    real = functools.lru_cache
    functools.lru_cache = caching  # type: ignore[assignment]
    functools.cache = lambda function: caching(None)(function)  # type: ignore[assignment]


def _uncached(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    called.cache_clear = lambda: None  # type: ignore[attr-defined]
    called.cache_info = lambda: (0, 0, None, 0)  # type: ignore[attr-defined]
    return called


def _fix_process() -> None:
    real = os.getpid
    os.getpid = lambda: 4242 if is_program_file(sys._getframe(1).f_code.co_filename) else real()


def after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call `then` with a module once it has been imported."""

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
            if fullname != name:
                return None
            sys.meta_path.remove(self)
            spec = importlib.machinery.PathFinder.find_spec(fullname, path)
            if spec is None or spec.loader is None:
                return spec
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
            return spec

    sys.meta_path.insert(0, Finder())


# ---------------------------------------------------------------- another machine


def _took_effect(plant: str) -> None:
    """Record once that a plant has changed something that the program has read."""
    if plant in _seen:
        return
    _seen.add(plant)
    if directory := os.environ.get("PERDURE_DRILL"):
        record(directory, "planted", what=plant)


_seen: set[str] = set()


def _shuffle_directories() -> None:
    """The entries of each directory come in an order of their own, as on another file system."""
    listed, scanned = os.listdir, os.scandir

    def shuffled(entries: list[Any]) -> list[Any]:
        other = sorted(entries, key=lambda entry: random.Random(_name(entry)).random())
        if other == entries:
            other = entries[::-1]
        if len(entries) > 1 and is_program_file(_caller()):
            _took_effect("shuffled directories")
            return other
        return entries

    class Scanned(AbstractContextManager[Any], Iterator[Any]):
        """As what `os.scandir` returns: an iterator that is closed by `with`."""

        def __init__(self, path: Any) -> None:
            with scanned(path) as found:
                self._entries = iter(shuffled(list(found)))

        def __next__(self) -> Any:
            return next(self._entries)

        def __exit__(self, *_: object) -> None:
            self.close()

        def close(self) -> None:
            self._entries = iter(())

    os.listdir = lambda path=".": shuffled(listed(path))  # type: ignore[assignment]
    os.scandir = lambda path=".": Scanned(path)  # type: ignore[assignment]


def _name(entry: Any) -> str:
    return os.fspath(getattr(entry, "name", entry)) if not isinstance(entry, bytes) else repr(entry)


def _caller() -> str:
    """The file of the code that asked; helpers of the standard library are skipped."""
    frame = sys._getframe(2)
    helpers = ("glob", "pathlib", "os", "fnmatch", "shutil", "concurrent")
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "")
        if name != __name__ and name.partition(".")[0] not in helpers:
            break
        frame = frame.f_back
    return frame.f_code.co_filename


def _poison() -> None:
    """Fill what `np.empty` and `torch.empty` return; MALLOC_PERTURB_ does so for smaller blocks."""
    import numpy as np

    def fill(array: Any) -> None:
        if array.flags.c_contiguous and not array.dtype.hasobject:
            array.reshape(-1).view(np.uint8)[...] = _POISON

    np.empty, np.empty_like = _filled(np.empty, fill), _filled(np.empty_like, fill)

    def torch_imported(torch: ModuleType) -> None:
        def fill(tensor: Any) -> None:
            if tensor.is_contiguous():
                with torch.no_grad():
                    tensor.detach().view(-1).view(torch.uint8).fill_(_POISON)

        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            setattr(owner, name, _filled(getattr(owner, name), fill))

    after_import("torch", torch_imported)


def _filled(make: Callable[..., Any], fill: Callable[[Any], None]) -> Callable[..., Any]:
    def made(*arguments: Any, **named: Any) -> Any:
        array = make(*arguments, **named)
        if is_program_file(sys._getframe(1).f_code.co_filename):
            _took_effect("poisoned memory")
            fill(array)
        return array

    return made


def _delay_threads() -> None:
    """Tasks of a pool begin after waits of different lengths, so they end in another order; the first
    threads that the program starts begin late."""
    submit = concurrent.futures.ThreadPoolExecutor.submit
    numbers = itertools.count()

    def late(pool: Any, task: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        if not is_program_file(_caller()):
            return submit(pool, task, *arguments, **named)
        _took_effect("late threads")
        task = _after(_LATE_S * (3 - next(numbers) % 4), task)
        return submit(pool, task, *arguments, **named)

    concurrent.futures.ThreadPoolExecutor.submit = late  # type: ignore[method-assign]
    start = threading.Thread.start
    waits = iter([_LATE_THREAD_S] * _LATE_THREADS)

    def start_late(thread: threading.Thread) -> None:
        wait = next(waits, 0.0) if is_program_file(sys._getframe(1).f_code.co_filename) else 0.0
        if wait:
            _took_effect("late threads")
            thread.run = _after(wait, thread.run)  # type: ignore[method-assign]
        start(thread)

    threading.Thread.start = start_late  # type: ignore[method-assign]


def _after(seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
    def called(*arguments: Any, **named: Any) -> Any:
        time.sleep(seconds)
        return call(*arguments, **named)

    return called


def _one_thread() -> None:
    begin = concurrent.futures.ThreadPoolExecutor.__init__

    def alone(pool: Any, max_workers: int | None = None, *arguments: Any, **named: Any) -> None:
        own = is_program_file(sys._getframe(1).f_code.co_filename)
        begin(pool, 1 if own else max_workers, *arguments, **named)

    concurrent.futures.ThreadPoolExecutor.__init__ = alone  # type: ignore[method-assign]
    after_import("torch", lambda torch: torch.set_num_threads(1))
