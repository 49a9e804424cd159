"""Small computations whose bits may depend on order, thread, device or process.

Inputs are made by NumPy from a fixed seed, so that every framework, device and process has the same.
The kernels of a framework are computed in processes of their own. Invariant: a framework that crashes,
hangs or cannot be imported is a row of the result; the others are still checked.

What the module of a framework offers (`jax_kernels`, `torch_kernels`):

- `FUNCTIONS`: by the name of a kernel, its function of the placed inputs; returns an array, or a
  dictionary of arrays.
- `with_gradients(function, inputs)`: its result, and its gradients by all inputs under weights that
  differ.
- `prepare(condition)`: brings this process into a condition, before anything is computed.
- `describe()`: the devices, and what a recipe says of the framework.
- `devices()`: the local devices by name: their kind, and the device. Only equal kinds are compared.
- `place(array, dtype, device)`: a NumPy array on a device; floats are converted to `dtype`.
- `program(compute)`: what is called with the placed inputs. May raise `Refused`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from perdure.digests import leaf_digests
from perdure.doctor import Computed, FrameworkResult, ResultComparison, compare

FRAMEWORKS = {"jax": "perdure.doctor.jax_kernels", "torch": "perdure.doctor.torch_kernels"}
"""The module of the kernels of each framework, by the name under which the framework is imported."""

AS_IT_IS, DETERMINISTIC, ONE_THREAD = "as it is", "deterministic", "one thread"
"""The conditions of a process: the environment unchanged; what a strategy of perdure sets; as it is,
with one thread."""

CONDITIONS = (AS_IT_IS, AS_IT_IS, DETERMINISTIC, DETERMINISTIC, ONE_THREAD)
"""The processes of a framework. Two of one condition, because compilers may choose by their speed."""

LIMIT_S = 300.0
_SEED = 20
_TAIL = 2000
# Not by its path, because the working directory may have a file with the name of a module.
_PROCESS = (sys.executable, "-P", "-c", "from perdure.doctor.kernels import main; main()")


class Refused(Exception):
    """The framework has no deterministic form of this computation, and says so."""


Inputs = Callable[[np.random.Generator], tuple[Any, ...]]


class Kernel(NamedTuple):
    """A computation but for its function, which a framework has; `inputs` are NumPy's."""

    inputs: Inputs
    dtypes: tuple[str, ...] = ("float32",)
    has_gradients: bool = False


def _floats(*shapes: tuple[int, ...]) -> Inputs:
    return lambda random: tuple(random.normal(size=shape).astype(np.float32) for shape in shapes)


def _wide(length: int) -> Inputs:
    """Numbers of many magnitudes: every order of their additions gives other bits."""

    def make(random: np.random.Generator) -> tuple[Any, ...]:
        values = random.normal(size=length) * np.exp(random.uniform(-8, 8, size=length))
        return (values.astype(np.float32),)

    return make


def _rows_to_places(rows: int, places: int, width: int) -> Inputs:
    def make(random: np.random.Generator) -> tuple[Any, ...]:
        values = random.normal(size=(rows, width)).astype(np.float32)
        start = random.normal(size=(places, width)).astype(np.float32)
        return start, random.integers(0, places, size=rows).astype(np.int32), values

    return make


def _ties(length: int) -> Inputs:
    return lambda random: (random.integers(0, 16, size=length).astype(np.float32),)


_BOTH = ("float32", "bfloat16")
_ONE = ("float32",)
_SCATTER = Kernel(_rows_to_places(60_001, 17, 3))

KERNELS: dict[str, Kernel] = {
    "matmul": Kernel(_floats((127, 513), (513, 255)), _BOTH, has_gradients=True),
    "matmul of one row": Kernel(_floats((1, 1021), (1021, 769)), _BOTH),
    "convolution": Kernel(_floats((4, 3, 29, 29), (16, 3, 3, 3)), _BOTH, has_gradients=True),
    "max pooling": Kernel(_ties(4 * 8 * 30 * 30), _ONE, has_gradients=True),
    "sum": Kernel(_wide(1_000_003)),
    "cumulative sum": Kernel(_wide(100_003)),
    "scatter-add": _SCATTER,
    "index_add": _SCATTER,
    "index_put": _SCATTER,
    "embedding": Kernel(_rows_to_places(4_099, 31, 64), _BOTH),
    "attention": Kernel(_floats(*[(2, 65, 3, 32)] * 3), _BOTH, has_gradients=True),
    "layer norm": Kernel(_floats((257, 129), (129,), (129,)), _ONE, has_gradients=True),
    "sort with ties": Kernel(_ties(100_003)),
    "exp, tanh, erf": Kernel(_floats((10_007,))),
}


# ---------------------------------------------------------------- in the process of a framework


def main() -> None:
    """Do what the JSON in the first argument says: module, condition, repeats, only, file.

    A line of JSON is written before and after each computation, so that a crash names its kernel.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    asked = json.loads(sys.argv[1])
    framework = import_module(asked["module"])
    with open(asked["file"], "w", encoding="utf-8") as file:

        def note(event: dict[str, Any]) -> None:
            file.write(json.dumps(event) + "\n")
            file.flush()

        framework.prepare(asked["condition"])
        settings = {name: str(value) for name, value in framework.describe().items()}
        note({"e": "described", "settings": settings})
        compute_kernels(framework, asked["repeats"], note, asked["only"])


def _end_with_parent() -> None:
    """Wait for the end of the standard input, which the doctor holds open as long as it lives."""
    while os.read(0, 1):  # not `sys.stdin`, whose lock would be held as Python ends
        pass
    os._exit(1)


def compute_kernels(
    framework: Any,
    repeats: int,
    note: Callable[[dict[str, Any]], None],
    only: Collection[str] = (),
) -> None:
    """Compute each kernel `repeats` times on each device, and `note` the digests and events."""
    for name in framework.FUNCTIONS:
        for dtype in KERNELS[name].dtypes if name in (only or [name]) else ():
            event = {"what": f"{name} {dtype}"}
            note({"e": "begin", **event})
            for device, (kind, place) in framework.devices().items():
                for ended in _computed(framework, name, dtype, place, repeats):
                    note({**event, "device": device, "kind": kind, **ended})


def program_of(framework: Any, name: str) -> Callable[..., Any]:
    """What computes a kernel from its placed inputs; returns a dictionary of arrays."""
    function = framework.FUNCTIONS[name]

    def compute(*inputs: Any) -> dict[str, Any]:
        if KERNELS[name].has_gradients:
            result, gradients = framework.with_gradients(function, inputs)
            return {"result": result, "gradient": dict(enumerate(gradients))}
        result = function(*inputs)
        return result if isinstance(result, dict) else {"result": result}

    return framework.program(compute)


def _computed(
    framework: Any, name: str, dtype: str, device: Any, repeats: int
) -> list[dict[str, Any]]:
    arrays = KERNELS[name].inputs(np.random.default_rng(_SEED))
    try:
        inputs = [framework.place(array, dtype, device) for array in arrays]
        program = program_of(framework, name)
        # All before the first is looked at: a device may then compute several at once.
        results = [program(*inputs) for _ in range(repeats)]
        digests = [leaf_digests(result) for result in results]
    except Exception as error:  # noqa: BLE001 - reported as a row; the other kernels are still computed
        text = str(error).strip().partition("\n")[0]
        if isinstance(error, Refused):
            return [{"e": "refused", "text": text}]
        return [{"e": "failed", "text": f"{type(error).__name__}: {text}"}]
    return [
        {"e": "computed", "leaves": {path: digest.hex for path, digest in leaves.items()}}
        for leaves in digests
    ]


# ---------------------------------------------------------------- in the process of the doctor


def installed_frameworks() -> list[str]:
    """The names of the frameworks that can be imported here."""
    return [name for name in FRAMEWORKS if importlib.util.find_spec(name) is not None]


def check_framework(
    name: str,
    repeats: int,
    *,
    progress: Callable[[str], None] = lambda _: None,
    only: Collection[str] = (),
    conditions: Sequence[str] | None = None,
    limit_s: float = LIMIT_S,
) -> FrameworkResult:
    """Compute the kernels of a framework in several processes, one for each condition, and compare.

    `only` are names of kernels, empty for all; a process counts as hung after `limit_s` seconds.
    """
    conditions = CONDITIONS if conditions is None else conditions
    result = FrameworkResult(name)
    computed: list[Computed] = []
    problems: list[ResultComparison] = []
    for number, condition in enumerate(conditions, 1):
        progress(f"{name}, {condition} (process {number} of {len(conditions)})")
        request = {"module": FRAMEWORKS[name], "condition": condition, "repeats": repeats}
        events, problem = _run({**request, "only": list(only)}, limit_s)
        for event in events:
            group = f"{name} on {event.get('kind')}, {condition}"
            if event["e"] == "described":
                result.settings = result.settings or event["settings"]
            elif event["e"] == "computed":
                what, device = event["what"], event["device"]
                computed.append(Computed(group, what, device, number, event["leaves"]))
            elif event["e"] in ("refused", "failed"):
                text = f"{event['e']}: {event['text']}"
                is_refusal = event["e"] == "refused"
                row = ResultComparison(group, event["what"], problem=text, is_refusal=is_refusal)
                problems += [row] if row not in problems else []
        if problem:
            problems.append(
                ResultComparison(f"{name}, {condition}", "the process", problem=problem)
            )
    result.comparisons = [*compare(computed), *problems]
    result.by_threads = _by_threads(computed)
    return result


def _run(request: Mapping[str, Any], limit_s: float) -> tuple[list[dict[str, Any]], str]:
    """The events of a process, and what went wrong with it; empty if nothing did."""
    with tempfile.TemporaryDirectory(prefix="perdure-doctor-") as directory:
        file, log = Path(directory, "events.jsonl"), Path(directory, "log")
        asked = json.dumps({**request, "file": str(file)})
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*_PROCESS, asked],
                stdin=subprocess.PIPE,  # ends with this process
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(limit_s)
                name = signal.Signals(-status).name if status < 0 else f"status {status}"
                problem = f"ended {'by' if status < 0 else 'with'} {name}" if status else ""
            except subprocess.TimeoutExpired:
                problem = f"no result after {limit_s:g} s"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # also what it has started
                process.communicate()
        lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
        events = [json.loads(line) for line in lines if line.endswith(b"\n")]
        tail = log.read_bytes()[-_TAIL:].decode(errors="replace").strip().splitlines()
    if not problem:
        return events, ""
    begun = [event["what"] for event in events if event["e"] == "begin"]
    where = f" in {begun[-1]}" if begun else " before the first kernel"
    said = f": {tail[-1]}" if tail else ""
    return events, f"{problem}{where}{said}"


def _by_threads(computed: list[Computed]) -> tuple[str, ...] | None:
    """The computations with another result on one thread, but for those that give several."""
    by_key: dict[tuple[str, str], dict[str, set[Any]]] = {}
    for result in computed:
        framework, _, condition = result.group.rpartition(", ")
        found = by_key.setdefault((framework, result.what), {})
        found.setdefault(condition, set()).add(result.bits())
    pairs = [
        (what, found[AS_IT_IS], found[ONE_THREAD])
        for (_, what), found in by_key.items()
        if AS_IT_IS in found and ONE_THREAD in found
    ]
    if not pairs:
        return None
    differ = [what for what, one, other in pairs if len(one) == 1 and one != other]
    return tuple(dict.fromkeys(differ))


def listed(devices: Mapping[str, tuple[str, Any]]) -> str:
    """The devices for people: `cuda:0 (NVIDIA H100), cpu`."""
    return ", ".join(
        name if kind == name else f"{name} ({kind})" for name, (kind, _) in devices.items()
    )
