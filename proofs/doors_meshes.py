"""Sharded states saved on one mesh and restored on others, and gradients of logical replicas.

The programs are those of the tests, `tests/distribute` and `tests/state`; on JAX there are more meshes
than in the tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from report import Row, row

TESTS = Path(__file__).parent.parent / "tests"
for folder in (TESTS, TESTS / "distribute"):
    sys.path.insert(0, str(folder))

from group import results  # noqa: E402

from perdure.store import Run  # noqa: E402

STEPS = 6
MESHES = ("2x4", "4x2", "8x1", "1x8", "1x1")


def rows() -> Iterator[Row]:
    """FSDP2 of two processes on others, every JAX mesh on every other, DDP by logical replicas."""
    with tempfile.TemporaryDirectory() as scratch:
        yield from fsdp(Path(scratch))
    with tempfile.TemporaryDirectory() as scratch:
        yield from jax_meshes(scratch)
    yield from logical_replicas()


def fsdp(scratch: Path) -> Iterator[Row]:
    """What two processes have saved is restored, and saved again by those that restored it."""

    def work(processes: int, directory: Path, action: str, *more: str) -> list[dict[str, Any]]:
        arguments = ("--directory", str(directory), "--action", action, *more)
        return results("sharded_torch_worker.py", processes, *arguments, forked="torch")

    saved = scratch / "saved"
    work(2, saved, "run")
    expected = Run(saved).manifest(STEPS).fingerprint
    for name, processes, action, two in (
        ("1 process", 1, "restore", 0),
        ("2 processes", 2, "restore", 0),
        ("3 processes", 3, "restore", 0),
        ("4 processes", 4, "restore", 0),
        ("4 processes, a mesh of 2x2 (FSDP2 and tensor parallelism)", 4, "restore", 1),
        ("a process without a group", 1, "alone", 0),
    ):
        link = scratch / f"{action}-{processes}-{two}"
        link.symlink_to(saved)
        more = ("--two", str(two)) if action == "restore" else ()
        reports = work(processes, link, action, *more)
        again = Run(f"{link}-again").manifest(STEPS).fingerprint
        yield row(
            f"FSDP2 saved by 2 processes, restored by {name}: leaves, and fingerprint of a save",
            [*(bool(report["equal"]) for report in reports), again == expected],
        )


def jax_meshes(scratch: str) -> Iterator[Row]:
    """Every mesh of eight devices, and one device without a mesh, on every other one."""
    program = TESTS / "state" / "jax_mesh_worker.py"
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(program), scratch, *MESHES]
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    answer = json.loads(ended.stdout.splitlines()[-1])
    for mesh in (*MESHES, "no mesh"):
        start = f"({mesh.replace('x', ', ')})" if mesh != "no mesh" else mesh
        outcomes = [same for name, same in answer["equal"].items() if name.startswith(start)]
        yield row(f"JAX {mesh} to {len(outcomes)} layouts: leaves", outcomes)
    placed = zip(answer["placed"], answer["wanted"], strict=True)
    yield row("JAX: placed as the target is", [found == wanted for found, wanted in placed])
    yield row("JAX: another state has another next step (control)", [not answer["control"]])


def logical_replicas() -> Iterator[Row]:
    """The bits of 1, 2, 3 and 4 processes with 12 logical replicas; those of plain DDP differ."""
    groups = [
        results("logical_replicas_worker.py", count, forked="torch") for count in (1, 2, 3, 4)
    ]
    first = groups[0][0]
    for key, text in (("bits", "DDP, with clipping"), ("ddp", "DDP"), ("fsdp", "FSDP2")):
        equal = [report[key] == first[key] for group in groups for report in group]
        yield row(f"LogicalReplicas(model, 12) on 1, 2, 3 and 4 processes, {text}: bits", equal)
    yield row("LogicalReplicas: FSDP2 has the bits of DDP", [first["fsdp"] == first["ddp"]])
    plain = {group[0]["plain"] for group in groups}
    yield row("plain DDP on 1, 2, 3 and 4 processes: other bits (control)", [len(plain) > 1])
