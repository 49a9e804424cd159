"""The notebooks of the tutorials run, resume after their kernel has restarted, and after a kill.

Each run is a new process, as a restarted kernel is. The code cells run in order in one namespace. A
small module takes the place of IPython's display, and the value of the last line of a cell is shown.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from test_docs import ROOT, Block, newest, run_python

NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
DRIVE = "/content/drive/MyDrive"  # what a reader replaces

# Name of the run directory, its last step, what a notebook prints at each start, and how the HTML
# outputs begin that perdure makes: pages, tables, trees, the bar of a Trainer.
RUNS = {
    "first-run": ("first", 200, "starting at step {}", ["<table", "<progr", "<ifram"]),
    "keras-fit": ("fit", 48, "epochs trained by this call: {}", ["<table", "<table"]),
    "torch-loop": ("torch", 39, "starting at step {}", ["<pre>d"]),
}

# As a notebook shows a value: its HTML, if it has some.
DISPLAY = """
import sys, types
class HTML:
    def __init__(self, data):
        self._repr_html_ = lambda: data
def display(value, raw=False, display_id=None):
    html = value["text/html"] if raw else value._repr_html_()
    print("HTML", html[:6] if html.startswith("<") else "text")
    return types.SimpleNamespace(update=lambda *values, **options: display(*values, **options) and None)
def show(value):
    if hasattr(value, "_repr_html_"):
        display(value)
    elif value is not None:
        print("text")
sys.modules["IPython"] = types.ModuleType("IPython")
sys.modules["IPython"].version_info = (9, 0)  # matplotlib asks for it
sys.modules["IPython"].get_ipython = lambda: types.SimpleNamespace(kernel=None)
sys.modules["IPython.display"] = types.ModuleType("IPython.display")
sys.modules["IPython.display"].__dict__.update(HTML=HTML, display=display)
"""

# Ends the process at the third commit, before the link that makes the manifest.
KILL = """
import os, sys
commits = []
def kill(event, args):
    if event == "os.link" and os.path.basename(os.path.dirname(args[1])) == "checkpoints":
        commits.append(args)
        if len(commits) == 3:
            os._exit(43)
sys.addaudithook(kill)
"""


def cells(path: Path, **replaced: str) -> list[Block]:
    """The code cells, in which the drive is the directory `drive`, and with `replaced` texts."""
    notebook = json.loads(path.read_text())
    assert notebook["nbformat"] == 4
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all((cell["outputs"], cell["execution_count"]) == ([], None) for cell in code)
    found = []
    for cell in code:
        text = "".join(cell["source"]).replace(DRIVE, "drive")
        for old, new in replaced.items():
            text = text.replace(old, new)
        tree = ast.parse(text)
        if isinstance(last := tree.body[-1], ast.Expr):
            last.value = ast.Call(ast.Name("show", ast.Load()), [last.value], [])
        found.append(Block(0, "python", ast.unparse(ast.fix_missing_locations(tree)), None))
    assert sum("'drive'" in block.code for block in found) == 1
    return found


def run(directory: Path, path: Path, code: list[Block], before: str = "", status: int = 0) -> str:
    (directory / "drive").mkdir(parents=True, exist_ok=True)
    done = run_python(directory, path, code, DISPLAY + before)
    assert done.returncode == status, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_resumes_after_a_restart_and_after_a_kill(tmp_path: Path, path: Path) -> None:
    name, last, printed, outputs = RUNS[path.stem]
    at, code, whole, killed = f"drive/runs/{name}", cells(path), tmp_path / "a", tmp_path / "b"
    first = run(whole, path, code)
    assert "text" not in first.split()
    assert first.count("HTML") > 5, "progress and a table"
    shown = iter(re.findall("^HTML (.*)$", first, re.MULTILINE))
    assert all(output in shown for output in outputs), "in this order"
    expected = newest(whole)[at]
    assert expected[0] == last

    again = run(whole, path, code)  # the kernel restarts: nothing is trained
    keras = path.stem == "keras-fit"
    assert printed.format(6 if keras else 0) in first
    assert printed.format(0 if keras else last) in again
    assert newest(whole)[at] == expected

    run(killed, path, code, KILL, 43)
    middle = newest(killed)[at][0]
    assert 0 < middle < last
    resumed = run(killed, path, code)
    assert printed.format((last - middle) // 8 if keras else middle) in resumed
    assert newest(killed)[at] == expected


def test_a_notebook_that_does_not_resume_is_seen(tmp_path: Path) -> None:
    path = ROOT / "docs" / "tutorials" / "first-run.ipynb"
    wrong = {"np.random.default_rng(step)": "GENERATOR", "STEPS = 200": "STEPS = 40"}
    code = cells(path, **wrong)
    before = "import numpy\nGENERATOR = numpy.random.default_rng(1)\n"
    run(tmp_path / "a", path, code, before)
    run(tmp_path / "b", path, code, before + KILL, 43)
    run(tmp_path / "b", path, code, before)
    whole, resumed = (newest(tmp_path / name)["drive/runs/first"] for name in "ab")
    assert whole[0] == resumed[0] == 40
    assert whole[1] != resumed[1]
