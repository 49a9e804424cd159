"""The variables by which JAX, PyTorch and TensorFlow learn who they are, and the ports in them.

Invariant: the three descriptions agree on the number of a worker and on how many there are; they
differ in the port, because the services behind it are not the same one.
"""

from __future__ import annotations

import json

from perdure.errors import LaunchError
from perdure.ports import HOST

ATTEMPT = "PERDURE_ATTEMPT"
# Whatever else describes a group would contradict what is said here.
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


def tf_config(ports: list[int], index: int) -> str:
    """TF_CONFIG of worker `index` of as many as there are ports."""
    addresses = [f"{HOST}:{port}" for port in ports]
    return json.dumps(
        {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    )


def worker_variables(index: int, workers: int, ports: list[int]) -> dict[str, str]:
    """What worker `index` of `workers` gets; `ports` are two more than there are workers.

    One alone gets the numbers and no coordinator of JAX or TensorFlow: it needs nobody to meet.
    """
    variables = {
        "RANK": str(index),
        "WORLD_SIZE": str(workers),
        "LOCAL_RANK": str(index),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(ports[0]),
    }
    if workers > 1:
        variables |= {
            "JAX_COORDINATOR_ADDRESS": f"{HOST}:{ports[1]}",
            "JAX_NUM_PROCESSES": str(workers),
            "JAX_PROCESS_ID": str(index),
            "TF_CONFIG": tf_config(ports[2:], index),
        }
    return variables


def device_variables(
    index: int, devices: int | None, accelerators: tuple[str, ...] | None = None
) -> dict[str, str]:
    """`devices` devices for the worker in place `index`: its own share of the GPUs, else of the CPU.

    `accelerators` are the GPUs that the machine lends, as in CUDA_VISIBLE_DEVICES. None: nothing said.
    """
    if devices is None:
        return {}
    variables = {"JAX_NUM_CPU_DEVICES": str(devices)}
    if accelerators:
        own = accelerators[index * devices : (index + 1) * devices]
        if len(own) < devices:
            raise LaunchError(
                f"worker {index} needs {devices} GPUs from number {index * devices} on, found "
                f"{len(accelerators)} in all; start fewer workers, or give each fewer devices"
            )
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    return variables
