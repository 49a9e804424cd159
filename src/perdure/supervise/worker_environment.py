"""The variables that describe a group of workers to JAX, PyTorch and TensorFlow.

Invariants: the three agree on index and number of workers; their ports differ. The default cache of
compiled programs is used only on CPUs, where it was shown not to change bits, and each kind of CPU
has its own, because the key of JAX does not distinguish all instruction sets.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from perdure.errors import LaunchError
from perdure.runtime.excluded_devices import EXCLUDED, excluded_devices
from perdure.runtime.ports import HOST

# These are removed from the environment first; another description would contradict this one.
DESCRIPTIONS = (
    "JAX_COORDINATOR_ADDRESS",
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PERDURE_CLUSTER",
    "RANK",
    "TF_CONFIG",
    "TORCHELASTIC_USE_AGENT_STORE",
    "WORLD_SIZE",
)


@dataclass(frozen=True)
class Nodes:
    """The machines that run one command together, seen from number `index`; LaunchError for no such
    one.

    Each has a supervisor with the same number of workers, and restarts its own; processes wait for
    each other at the coordinator, a host:port on machine 0.
    """

    count: int
    index: int
    coordinator: str

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise LaunchError(
                f"nodes: expected a number from 0 to {self.count - 1}, found {self.index}"
            )


def tf_config(ports: list[int], index: int) -> str:
    """TF_CONFIG of worker `index`; there are as many workers as `ports`."""
    addresses = [f"{HOST}:{port}" for port in ports]
    return json.dumps(
        {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    )


def worker_variables(
    index: int, workers: int, ports: list[int], nodes: Nodes | None = None
) -> dict[str, str]:
    """The variables of worker `index` of the `workers` of this machine; `ports` are two more.

    Without `nodes`, a single worker gets no coordinator of JAX or TensorFlow.
    """
    if nodes is None:
        rank, size = index, workers
        host, port, coordinator = HOST, str(ports[0]), f"{HOST}:{ports[1]}"
    else:
        rank, size = nodes.index * workers + index, nodes.count * workers
        host, _, port = nodes.coordinator.rpartition(":")
        coordinator = nodes.coordinator
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(index),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": host.strip("[]"),
        "MASTER_PORT": port,
    }
    if nodes is not None or workers > 1:
        variables |= {
            "JAX_COORDINATOR_ADDRESS": coordinator,
            "JAX_NUM_PROCESSES": str(size),
            "JAX_PROCESS_ID": str(rank),
        }
    if nodes is None and workers > 1:
        variables["TF_CONFIG"] = tf_config(ports[2:], index)
    return variables


def device_variables(
    slot: int, devices: int | None, slots: Sequence[int], workers: int
) -> dict[str, str]:
    """The variables that give a worker its devices; LaunchError if there are too few GPUs.

    Without `devices` the program takes the GPU LOCAL_RANK, so the GPUs of slots without a worker
    are hidden if each slot has one.
    """
    gpus = accelerators()
    if devices is None:
        if len(slots) == workers or len(gpus) != workers:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[slot] for slot in slots)}
    variables = {"JAX_NUM_CPU_DEVICES": str(devices)}
    if gpus:
        share = gpus[slot * devices : (slot + 1) * devices]
        if len(share) < devices:
            raise LaunchError(
                f"worker {slot} needs {devices} GPUs from number {slot * devices} on, found "
                f"{len(gpus)} in all; start fewer workers, or give each fewer devices"
            )
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(share)
    return variables


def accelerators() -> tuple[str, ...]:
    """The GPUs of the machine, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(part for part in visible.split(",") if part.strip() not in ("", "-1"))
    if os.environ.get("JAX_PLATFORMS") == "cpu" or sys.platform != "linux":
        return ()
    # CUDA numbers the present GPUs from 0; the device files may have other numbers.
    names = [name.removeprefix("nvidia") for name in _devices() if name.startswith("nvidia")]
    return tuple(map(str, range(sum(name.isdigit() for name in names))))


def excluded_variables(devices: Collection[int]) -> dict[str, str]:
    """The variable by which a worker leaves out these devices and those that the environment names."""
    numbers = sorted({*devices, *excluded_devices()}) if devices else []
    return {EXCLUDED: ",".join(map(str, numbers))} if numbers else {}


def default_cache(environ: Mapping[str, str] | None = None) -> Path | None:
    """A directory of this user for this CPU; None if one is set, or for accelerators."""
    environ = os.environ if environ is None else environ
    if "JAX_COMPILATION_CACHE_DIR" in environ:
        return None
    platforms = environ.get("JAX_PLATFORMS")
    has_accelerators = any(name.startswith(("nvidia", "kfd", "accel")) for name in _devices())
    if platforms != "cpu" and (platforms or has_accelerators):
        return None
    home = environ.get("XDG_CACHE_HOME")
    base = Path(home) if home else Path(environ.get("HOME", "/nonexistent")) / ".cache"
    existing = next(path for path in (base, *base.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        return None
    return base / "perdure" / f"xla-{_cpu()}"


def cache_variables(directory: Path) -> dict[str, str]:
    """Variables that make every process of a group keep every compiled program in `directory`."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(directory),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PERDURE_SHARED_CACHE": "1",
    }


def drop_recent(directory: Path, seconds: float = 0.5) -> None:
    """Remove the entries of the last `seconds`, after a worker was killed.

    JAX never replaces an entry: one that was cut off would be compiled again at each start.
    """
    since = time.time() - seconds
    with suppress(OSError):
        for entry in os.scandir(directory):
            with suppress(OSError):
                is_cache = entry.name.endswith(("-cache", "-atime")) and entry.is_file()
                if is_cache and entry.stat().st_mtime >= since:
                    os.unlink(entry.path)


def _devices() -> list[str]:
    return os.listdir("/dev") if os.path.isdir("/dev") else []


def _cpu() -> str:
    text = platform.machine()
    path = Path("/proc/cpuinfo")
    if path.exists():
        lines = path.read_text(errors="replace").split("\n\n")[0].splitlines()
        wanted = ("vendor_id", "model name", "flags", "features", "cpu implementer", "cpu part")
        text += "".join(line for line in lines if line.lower().startswith(wanted))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
