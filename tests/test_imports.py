"""The core knows no ML framework: importing the store or listing a run loads none.

Proved in processes of their own, because this one has loaded several. `lint-imports` proves the
same of the source; this proves it of what runs, imports of other packages included.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.store import Leaf, Run

FRAMEWORKS = ("flax", "jax", "jaxlib", "keras", "optax", "tensorflow", "torch")

PROBE = """
import json, sys
program, arguments, frameworks, answer = json.loads(sys.argv[1])
sys.argv = ["perdure", *arguments]
status = 0
try:
    exec(program, {"__name__": "probed"})
except SystemExit as exit:
    status = exit.code or 0
with open(answer, "w") as file:
    json.dump([status, sorted(set(frameworks) & sys.modules.keys())], file)
"""

MAIN = "from perdure.cli import main; main()"


def probe(tmp_path: Path, program: str, *arguments: str) -> tuple[list[str], int, str]:
    """Run `program` in a process of its own: frameworks loaded at its end, status, output."""
    answer = tmp_path / "answer.json"
    task = json.dumps([program, arguments, FRAMEWORKS, str(answer)])
    done = subprocess.run(
        [sys.executable, "-c", PROBE, task],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    status, loaded = json.loads(answer.read_text())
    return loaded, status, done.stdout + done.stderr


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    """A run directory with one checkpoint, of step 7."""
    where = tmp_path / "run"
    with Run(where, create=True) as run:
        run.save(7, {"w": Leaf("float32", (2,), memoryview(bytes(8)))})
    return where


@pytest.mark.parametrize(
    "module", ["perdure", "perdure.errors", "perdure.store", "perdure.look", "perdure.cli"]
)
def test_importing_the_core_loads_no_framework(tmp_path: Path, module: str) -> None:
    loaded, _, _ = probe(tmp_path, f"import {module}")
    assert loaded == []


def test_importing_every_module_of_the_store_loads_no_framework(tmp_path: Path) -> None:
    everything = (
        "import importlib, pkgutil, perdure.store\n"
        "found = pkgutil.walk_packages(perdure.store.__path__, 'perdure.store.')\n"
        "names = [module.name for module in found]\n"
        "assert names\n"
        "for name in names: importlib.import_module(name)\n"
    )
    loaded, _, _ = probe(tmp_path, everything)
    assert loaded == []


def test_listing_a_run_loads_no_framework(tmp_path: Path, run_directory: Path) -> None:
    loaded, status, output = probe(tmp_path, MAIN, "ls", str(run_directory))
    assert status == 0, output
    assert "7" in output
    assert loaded == []


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_the_check_sees_a_framework(tmp_path: Path, run_directory: Path, framework: str) -> None:
    """Negative control: the same check finds a framework that something imports first.

    An empty module stands for it.
    """
    (tmp_path / f"{framework}.py").touch()
    loaded, _, output = probe(tmp_path, f"import {framework}; {MAIN}", "ls", str(run_directory))
    assert framework in loaded, output
