"""Kernels on NumPy, each wrong in its own way, on two devices of one kind and one of another."""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

import numpy as np

from perdure.doctor.kernels import KERNELS, ONE_THREAD, Kernel, Refused

_now: dict[str, Any] = {"condition": "", "device": ""}
_calls = itertools.count()


def prepare(condition: str) -> None:
    _now["condition"] = condition


def describe() -> dict[str, str]:
    return {"version": "planted 1"}


def devices() -> dict[str, tuple[str, Any]]:
    return {"a": ("plain", "a"), "b": ("plain", "b"), "c": ("other", "c")}


def place(array: Any, dtype: str, device: Any) -> Any:
    _now["device"] = device
    return array.astype(dtype)


def program(compute: Any) -> Any:
    return compute


def _plus(number: Any) -> Any:
    return lambda x: {"result": x + np.float32(number())}


def _leaf(x: Any) -> dict[str, Any]:
    return {"result": x, "gradient": {"x": x * (1 - (_now["device"] == "b"))}}


def _refuse(x: Any) -> Any:
    raise Refused("it has no deterministic form")


def _fail(x: Any) -> Any:
    raise ValueError("not on this device\nand more")


def _kill(x: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang(x: Any) -> Any:
    while True:
        signal.pause()


FUNCTIONS = {
    "right": _plus(lambda: 0),
    "kind": _plus(lambda: _now["device"] == "c"),
    "again": _plus(lambda: next(_calls) % 2),
    "process": _plus(os.getpid),
    "threads": _plus(lambda: _now["condition"] == ONE_THREAD),
    "leaf": _leaf,
    "refuses": _refuse,
    "fails": _fail,
    "killed": _kill,
    "hangs": _hang,
}
KERNELS |= dict.fromkeys(FUNCTIONS, Kernel(lambda random: (random.normal(size=9),)))
