"""The process that computes the kernels of one framework: `python -m perdure.doctor.kernel_process`.

It writes a line of JSON before and after each computation, so that a crash leaves what was found before
and names the kernel that was under way.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Collection
from importlib import import_module
from typing import Any, cast

import numpy as np

from perdure.digests import leaf_digests
from perdure.doctor.kernel import Framework, Kernel, Refused

_SEED = 20


def check_kernels(
    framework: Framework,
    repeats: int,
    note: Callable[[dict[str, Any]], None],
    only: Collection[str] = (),
) -> None:
    """Compute each kernel `repeats` times on each device, and `note` the digests.

    Args:
        framework: The module of the framework.
        repeats: How often a kernel is computed on a device.
        note: Takes an event: "begin", "computed", "refused" or "failed".
        only: Names of kernels; empty for all.
    """
    for name, kernel in framework.KERNELS.items():
        if only and name not in only:
            continue
        for dtype in kernel.dtypes:
            event = {"what": f"{name} {dtype}"}
            note({"e": "begin", **event})
            for device, (kind, place) in framework.devices().items():
                for ended in _computed(framework, kernel, dtype, place, repeats):
                    note({**event, "device": device, "kind": kind, **ended})


def _computed(
    framework: Framework, kernel: Kernel, dtype: str, device: Any, repeats: int
) -> list[dict[str, Any]]:
    arrays = kernel.inputs(np.random.default_rng(_SEED))
    try:
        inputs = [framework.place(array, dtype, device) for array in arrays]
        program = framework.program(kernel.compute)
        # All before the first is looked at: a device may then compute several at once.
        results = [program(*inputs) for _ in range(repeats)]
        digests = [leaf_digests(result) for result in results]
    except Refused as error:
        return [{"e": "refused", "text": _first_line(error)}]
    except Exception as error:  # noqa: BLE001 - reported as a row; the other kernels are still computed
        return [{"e": "failed", "text": f"{type(error).__name__}: {_first_line(error)}"}]
    return [
        {"e": "computed", "leaves": {path: digest.hex for path, digest in leaves.items()}}
        for leaves in digests
    ]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def main(request: str) -> None:
    """Do what the JSON of a request says: module, condition, repeats, only, and the file to write."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    asked = json.loads(request)
    framework = cast(Framework, import_module(asked["module"]))
    with open(asked["file"], "w", encoding="utf-8") as file:

        def note(event: dict[str, Any]) -> None:
            file.write(json.dumps(event) + "\n")
            file.flush()

        framework.prepare(asked["condition"])
        note({"e": "described", "settings": dict(framework.describe())})
        check_kernels(framework, asked["repeats"], note, asked["only"])
        note({"e": "end"})


def _end_with_parent() -> None:
    """Wait for the end of the standard input, which the doctor holds open as long as it lives."""
    while os.read(0, 1):  # not `sys.stdin`, whose lock would be held as Python ends
        pass
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
