"""The examples run on small MNIST files, as a newcomer would run them, and prove what they claim.
They print the lines that their tutorials show.

Those that need nothing of an interpreter's start run in a fork of a process with their framework.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from forked import run_forked
from perdure import CheckpointManager
from shown_output import missing_lines

EXAMPLES = Path(__file__).parent.parent / "examples"
TUTORIALS = Path(__file__).parent.parent / "docs" / "tutorials"
IMAGES = 400  # 320 to train on

# The options that make each of them short, and what it prints on its way.
RUNS = {
    "estimator.py": (
        ["--batch", "64", "--steps", "8"],
        [
            "the first run: interrupted at step 5",
            "resuming after step 5",
            "the second run: at step 8",
        ],
    ),
    "keras_fit.py": (
        ["--batch", "64", "--epochs", "6"],
        ["interrupted in epoch 5\nEpoch 5/6"],
    ),
    "custom_loop.py": (
        ["--batch", "16", "--steps", "50"],
        ["interrupted in step 28", "restored from step 20", "kept: [40, 50]"],
    ),
    "replicas.py": (
        ["--batch", "64", "--epochs", "2"],
        ["1 device(s), epoch 2", "2 device(s), epoch 2", "restored without the strategy"],
    ),
    "multi_worker.py": (
        ["--batch", "64", "--epochs", "2", "--save-every", "2", "--kill-at", "7"],
        ["worker 1 is killed after step 7", "worker 0 leaves", "[[0], [1, -9], [0, 0]]"],
    ),
    "mnist.py": (
        ["--batch", "16", "--epochs", "2"],
        ["343 images to train on, 57 to test", "interrupted in step 34", "resuming after step 30"],
    ),
    "torch_loop.py": (
        ["--batch", "16", "--epochs", "3"],
        ["interrupted in step 33, epoch 2", "resuming after step 30"],
    ),
    "jax_loop.py": (
        ["--batch", "16"],
        ["interrupted in step 35", "resuming after step 30"],
    ),
}

FORKED = {
    "estimator.py": "jax",
    "keras_fit.py": "keras-jax",
    "custom_loop.py": "torch",
    "mnist.py": "torch",
    "torch_loop.py": "torch",
    "jax_loop.py": "jax",
}


@pytest.fixture(scope="module")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """IDX files as MNIST's: squares of different sizes, whose label is their size."""
    where = tmp_path_factory.mktemp("mnist")
    labels = np.random.default_rng(0).integers(0, 10, IMAGES).astype(np.uint8)
    images = np.zeros((IMAGES, 28, 28), np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[4 : 6 + 2 * label, 4 : 6 + 2 * label] = 255
    for name, array in (("images-idx3", images), ("labels-idx1", labels)):
        shape = b"".join(size.to_bytes(4, "big") for size in array.shape)
        header = bytes([0, 0, 8, array.ndim]) + shape
        (where / f"train-{name}-ubyte").write_bytes(header + array.tobytes())
    return where


def run(name: str, cache: Path, *options: str) -> tuple[int, str]:
    """Exit status and output."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    # The networks are tiny: more threads only wait, and to compile takes longer than to train.
    environment |= {"OMP_NUM_THREADS": "1", "JAX_COMPILATION_CACHE_DIR": str(cache)}
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    if engine := FORKED.get(name):
        [(status, out, err)] = run_forked(engine, EXAMPLES / name, [options], [environment])
        return status, err + out
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / name, *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("name", RUNS)
def test_an_example_ends_with_the_bits_of_an_undisturbed_run(
    name: str, mnist: Path, tmp_path: Path
) -> None:
    options, says = RUNS[name]
    directory = str(tmp_path / "runs")
    status, output = run(
        name, tmp_path / "compiled", "--data", str(mnist), "--directory", directory, *options
    )
    assert status == 0, output
    assert output.endswith("PASS: every bit is equal\n")
    assert [text for text in says if text not in output] == []
    shown = (TUTORIALS / "output" / name).with_suffix(".txt").read_text()
    printed = output.replace(directory, "runs")  # fewer steps than on the page, in another order
    assert [line for line in shown.splitlines() if missing_lines(line, printed)] == [], output


def test_every_example_is_run_here_and_in_the_table() -> None:
    files = {path.name for path in EXAMPLES.glob("*.py")} - {"common.py"}
    linked = re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text())
    assert files == set(RUNS) == set(linked)
    assert len(linked) == len(files)
    pages = "".join(path.read_text() for path in TUTORIALS.glob("*.md"))
    assert files == set(re.findall(r'^--8<-- "examples/(\w+\.py)"$', pages, re.MULTILINE))


@pytest.mark.parametrize(("value", "step"), [(1.0, 1), (2.0, 1), (1.0, 2)])
def test_the_comparison_sees_another_bit_and_another_step(
    value: float, step: int, tmp_path: Path
) -> None:
    for name, held, saved_step in (("one", 1.0, 1), ("other", value, step)):
        with CheckpointManager(tmp_path / name) as manager:
            manager.save(saved_step, {"w": np.float32(held)})
    program = (
        f"from pathlib import Path; from common import prove; prove(*map(Path, {['one', 'other']}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLES), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    same = (value, step) == (1.0, 1)
    assert done.returncode == (0 if same else 1)
    assert ("PASS" in done.stdout) == same
    assert ("FAIL: they differ" in done.stderr) != same
