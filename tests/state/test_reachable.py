"""What a program reaches, by name."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perdure.state.bits import same
from perdure.state.reachable import Reachable, reachable_values

PROGRAM = """
import functools, os, random, sys, threading
from contextvars import ContextVar
import numpy as np
from perdure.state.reachable import frames_of_threads, reachable_values, program_frames

class Slotted:
    __slots__ = ("__hidden", "rate")
    def __init__(self):
        self.rate, self.__hidden = 1.0, 2

slotted = Slotted()
factor = ContextVar("factor")
factor.set(3.0)
draw = np.random.default_rng(0).normal
halved = functools.partial(random.Random(1).uniform, 0)
local = threading.local()
local.count = 4
os.environ["RATE"] = "0.5"
begun, ended = threading.Event(), threading.Event()

def produce():
    noise = np.random.default_rng(5)
    begun.set()
    ended.wait()

thread = threading.Thread(target=produce)
thread.start()
begun.wait()
reached = reachable_values([*program_frames(sys._getframe()), *frames_of_threads()])
reached["factor.get()"].bind(7.0)
reached["os.environ"].bind({"RATE": "0.1"})
print(sorted(reached))
print(factor.get(), os.environ["RATE"])
ended.set()
"""


def test_values_have_names_wherever_a_program_keeps_them(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    line = [sys.executable, "program.py"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    names, values = done.stdout.splitlines() or ("", done.stderr)
    for name in (
        *("slotted.rate", "slotted._Slotted__hidden", "factor.get()", "draw.__self__"),
        *("halved.func.__self__", "local.count", "produce.noise", "os.environ"),
        *("generator of numpy", "generator of python"),
    ):
        assert f"'{name}'" in names, name
    assert values == "7.0 0.1"
    assert "site-packages" not in names


class Module:
    """As a module of a framework: training changes a number, a buffer and a list in place."""

    def __init__(self) -> None:
        self.pointer = 0
        self.weights = np.zeros(3)
        self.sizes = [1, 2]
        self.noise = np.random.default_rng(0)
        self.constant = {"rate": 0.1, "name": "a"}
        self.backend: Any = None
        self.backends: list[Any] = []


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    """A variable of this file, which counts as a program."""
    made = Module()
    monkeypatch.setattr(sys.modules[__name__], "MODULE", made, raising=False)
    return made


def held_here() -> dict[str, Reachable]:
    """What the variable reaches, by name."""
    prefix = f"{__name__}.MODULE"
    reached = reachable_values([], unnamed=False)
    return {name.replace(prefix, "module"): reached[name] for name in reached if prefix in name}


class Missing(type):
    """As Transformers has it for a class whose library is not installed."""

    def __getattribute__(cls, name: str) -> Any:
        if name.startswith("_"):
            return super().__getattribute__(name)
        raise ImportError(f"{cls.__name__} requires a library that is not installed")


def test_a_value_that_refuses_to_be_asked_hides_no_other(module: Module) -> None:
    """Nor does one in a container or an attribute."""
    missing = Missing("Backend", (), {})
    module.backend, module.backends = missing, [missing]
    names = held_here().keys()
    assert {"module.pointer", "module.weights", "module.noise"} <= names
    assert "module.backend" not in names


def test_bits_and_not_values_are_compared() -> None:
    assert same([0.0, "a", np.float32(1)], [0.0, "a", np.float32(1)])
    assert same(float("nan"), float("nan"))
    assert not same(0.0, -0.0)
    assert not same(1, 1.0)
    assert not same(1, True)
    assert not same(["ab", "c"], ["a", "bc"])
    assert not same(np.zeros(2), np.zeros((2, 1)))
    assert not same(random.Random(1).getstate(), random.Random(2).getstate())
