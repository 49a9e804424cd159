"""Proves the same bits on any topology, for many models. About 15 minutes on two cores.

Run by `make proof-distribute`; ARGS='--data PATH' adds the tutorials' training on MNIST,
ARGS='--only matrix --engine torch' runs a part.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module, util
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from proof_foundation import fingerprint

from perdure.demo.driver import run_group
from perdure.supervise.worker import Worker
from report import Row, finish, row

HERE = Path(__file__).parent
MATRIX = HERE.parent / "tests" / "distribute" / "matrix_worker.py"
EXPLAINED = MATRIX.with_name("explained_worker.py")
ENGINES = ("jax", "torch")
PARTS = (
    *("figures", "functions", "matrix", "compiled", "changes", "controls", "refused"),
    *("data", "mnist"),
)

# (processes, devices of each; separated by commas if one process runs several topologies)
TOPOLOGIES = {
    "jax": [(1, "1,2,3,4,5,8,reversed"), (2, "1"), (3, "1"), (4, "1"), (2, "2")],
    "torch": [(1, "1,2,3,8"), (2, "1"), (3, "1"), (4, "1"), (2, "2")],
}
# (processes, devices) of every ten steps.
CHANGES = {
    "jax": [(1, 1), (1, 4), (2, 1), (1, 3), (2, 2), (1, 8)],
    "torch": [(1, 1), (2, 1), (3, 1), (4, 1), (2, 1), (1, 1)],
}
CHANGE_STEPS = 10
EPOCHS = 10
# Of the matrix on PyTorch, what is trained with torch.compile too.
COMPILED = ["--models", "MLP, dropout;CNN, BatchNorm;transformer, clipping, EMA"]
COMPILED += ["--optimizers", "adam", "--compile", "inductor"]
# For each way to run a step, the tests in which something else is computed: it is refused, and would
# change the bits.
REFUSED = {
    "jax": {
        "one program, and programs in turns": "test_jax_self_check.py::test_the_comparison_refuses",
        "a platform that was not measured": "test_jax_self_check.py::test_a_program_that_computes",
        "several devices": "test_jax_invariance.py::test_control_programs_that_differ",
    },
    "torch": {
        "one after another": "test_torch_devices.py::test_control_with_a_copy_of_the_state",
        "torch.compile": "test_torch_compiled.py::test_the_program_does_not_depend",
    },
}


def script(name: str) -> list[str]:
    """The command of a program in this folder, with these options."""
    return [str(HERE / f"{name}.py")]


def run(
    program: list[str], arguments: list[str], processes: int = 1, devices: int = 1, kill_at: int = 0
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The (worker, event) pairs of a group; all workers get SIGKILL after step `kill_at`."""
    environment = {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, *program, *arguments]
    events: list[tuple[int, dict[str, Any]]] = []

    def on_event(worker: int, event: dict[str, Any], group: Sequence[Worker]) -> None:
        events.append((worker, event))
        for each in group if kill_at and event.get("step") == kill_at else ():
            each.kill()

    run_group(command, processes, environment, on_event).require([-9] if kill_at else [0])
    yield from events


def functions() -> Iterator[bool]:
    """200 random functions on JAX, in a process of their own."""
    for _, event in run(script("distribute_functions"), []):
        yield from event["equal"]


def explained() -> Iterator[Row]:
    """Functions that people train, on 1 and 4 devices: their bits, and their explanations."""
    ((_, told),) = run([str(EXPLAINED)], ["--devices", "1,4"], devices=4)
    found = told["rows"]
    for one in found:
        if not (one["equal"] and one["explained"]):
            print(f"       {one}")
    names = {one["name"] for one in found}
    yield row(
        f"jax: topologies of {len(names)} functions with the bits of single programs",
        (one["equal"] for one in found),
    )
    yield row("jax: of these, fast or refused as expected", (one["explained"] for one in found))


def matrix(engine: str, arguments: list[str], how: str = "") -> Iterator[Row]:
    """Models x optimizers x topologies: one fingerprint for each model and optimizer."""
    fingerprints: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for processes, devices in TOPOLOGIES[engine]:
        most = 8 if "8" in devices else int(devices)
        options = ["--engine", engine, "--devices", devices, *arguments]

        def events(*more: str, p: int = processes, d: int = most, o: list[str] = options) -> Any:
            return list(run([str(MATRIX)], [*o, *more], p, d))

        # A single process keeps one core busy, mostly with compilation.
        halves = [("--half", "0"), ("--half", "1")] if processes == 1 else [()]
        with ThreadPoolExecutor(len(halves)) as pool:
            parts = list(pool.map(lambda more, events=events: events(*more), halves))
        for worker, event in itertools.chain(*parts):
            name = f"P{processes} D{event['devices']} worker {worker}"
            fingerprints[event["model"], event["optimizer"]].append((name, event["fingerprint"]))
    # The fingerprint of the first topology is the reference, so it is not counted as a case.
    for (model, optimizer), cells in fingerprints.items():
        (_, first), *others = cells
        outcome = row(
            f"{engine}{how}, {model}, {optimizer}: {first} in every process of every topology",
            (fingerprint == first for _, fingerprint in others),
        )
        for name, digest in cells:
            if digest != first:
                print(f"       {name}: {digest}")
        yield outcome
    prints = {cells[0][1] for cells in fingerprints.values()}
    yield row(
        f"{engine}{how}: fingerprints of models and optimizers that tell them apart",
        [len(prints) == len(fingerprints)] * len(fingerprints),
    )


def changes(engine: str) -> Iterator[bool]:
    """60 steps, killed and continued on another topology after every ten steps."""
    steps = CHANGE_STEPS * len(CHANGES[engine])
    program = ["-m", f"perdure.demo.train_{engine}"]
    with tempfile.TemporaryDirectory(prefix="perdure-proof-") as work:

        def stretch(directory: str, processes: int, devices: int, kill_at: int = 0) -> None:
            options = ["--run", f"{work}/{directory}", "--steps", str(steps)]
            options += ["--devices", str(devices)]
            for _ in run(program, options, processes, devices, kill_at):
                pass

        stretch("plain", 1, 1)
        *changed, last = CHANGES[engine]
        for turn, (processes, devices) in enumerate(changed, 1):
            stretch("changed", processes, devices, kill_at=turn * CHANGE_STEPS)
        stretch("changed", *last)
        same = fingerprint(Path(work, "changed"), steps) == fingerprint(Path(work, "plain"), steps)
    # A kill that does not fire raises in `run`.
    yield from [same] * len(changed)


def controls(engine: str) -> Iterator[Row]:
    """Negative controls: changes that give other bits, so that the matrix could have failed."""
    program = script("distribute_controls")
    options = ["--engine", engine]
    fingerprints: dict[str, set[str]] = defaultdict(set)

    def collect(*arguments: str, processes: int = 1, devices: int = 1) -> None:
        for worker, event in run(program, [*options, *arguments], processes, devices):
            if worker == 0:
                fingerprints[event["name"]].add(event["fingerprint"])
                print(f"       {event['name']}, {event['devices']} devices: {event['fingerprint']}")

    if engine == "jax":
        collect("--devices", "1,2,4", devices=4)
        collect("--threads", "1")
    else:
        for processes in (1, 2, 4):
            collect(processes=processes)
        collect("--threads", "2")
    real = fingerprints.pop("the real thing")
    yield row(
        f"{engine}: the real thing under the controls' data has one fingerprint", [len(real) == 1]
    )
    for name, prints in fingerprints.items():
        # How often the bits differ depends on the control; each must differ at least once.
        yield row(f"{engine}, control that must differ: {name}", [bool(prints - real)])


def refused(name: str, work: str) -> Iterator[bool]:
    """The outcomes of the tests whose names begin with this one."""
    file, _, start = name.partition("::")
    report = Path(work, "report.xml")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-o",
        "faulthandler_timeout=0",
        "-k",
        start,
        f"--junitxml={report}",
    ]
    subprocess.run([*command, str(MATRIX.with_name(file))], stdout=subprocess.DEVNULL)
    for case in ET.parse(report).iter("testcase"):
        yield case.get("name", "").startswith(start) and len(case) == 0


def figures(engine: str) -> Iterator[bool]:
    """The worked figures of TensorFlow's custom-training tutorial."""
    for _, event in run(script("distribute_figures"), ["--engine", engine]):
        yield event["losses"] == [1.25, 2.25]
        yield event["sum"] == 3.5


def mnist(engine: str, data: str) -> Iterator[Row]:
    """The training of the tutorials on MNIST digits."""
    with tempfile.TemporaryDirectory(prefix="perdure-proof-") as work:
        accuracy = []
        for processes in (1, 4):
            # 8,000 digits in batches of 128: an epoch has 63 steps.
            options = ["--run", f"{work}/{processes}", "--steps", str(63 * EPOCHS), "--data", data]
            for worker, event in run(["-m", f"perdure.demo.train_{engine}"], options, processes):
                if worker == 0 and event["event"] == "done":
                    accuracy.append((event["accuracy"], event["examples"]))
        print(f"       test accuracy on 1 device and on 4 workers: {accuracy}")
        yield row(
            f"{engine}: the same test accuracy on 1 device and on 4 workers",
            [len(accuracy) == 2 and accuracy[0] == accuracy[1]],
        )
    for worker, event in run(script("distribute_mnist"), ["--engine", engine, "--data", data], 2):
        if worker == 0:
            print(f"       training accuracy by epoch on 2 workers: {event['training']}")
            print(f"       then on the test part: {event['test']}")
            yield row(f"{engine}: epochs of the multi-worker training reported", [True] * 3)


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """The rows of the chosen parts."""
    parts = options.only.split(",") if options.only else PARTS
    engines = [options.engine] if options.engine else ENGINES
    chosen = []
    for name in ("models", "optimizers"):
        if getattr(options, name):
            chosen += [f"--{name}", getattr(options, name)]
    for engine in engines:
        if "figures" in parts:
            yield row(f"{engine}: TensorFlow's worked figures 1.25, 2.25 and 3.5", figures(engine))
        if "functions" in parts and engine == "jax":
            yield row(
                "jax: outputs of 200 random functions with the bits of plain jit", functions()
            )
            yield from explained()
        if "matrix" in parts:
            yield from matrix(engine, chosen)
        if "compiled" in parts and engine == "torch":
            yield from matrix(engine, COMPILED, ", torch.compile")
        if "changes" in parts:
            yield row(
                f"{engine}: changes of topology with SIGKILL after which the bits are the same",
                changes(engine),
            )
        if "controls" in parts:
            yield from controls(engine)
        if "refused" in parts:
            for way, name in REFUSED[engine].items():
                with tempfile.TemporaryDirectory(prefix="perdure-proof-") as work:
                    yield row(
                        f"{engine}, {way}: what computes something else is refused",
                        refused(name, work),
                    )
        if "mnist" in parts and options.data is not None:
            yield from mnist(engine, options.data)
    if "data" in parts and util.find_spec("data_rows") is not None:
        yield from import_module("data_rows").rows()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="MNIST files, for the tutorials' training")
    parser.add_argument("--engine", choices=ENGINES, help="one of the engines; by default both")
    parser.add_argument("--only", help=f"parts of the proof, by comma: {', '.join(PARTS)}")
    parser.add_argument("--models", help="a part of the matrix: models by semicolon")
    parser.add_argument("--optimizers", help="a part of the matrix: optimizers by comma")
    finish("distribute", rows(parser.parse_args()))
