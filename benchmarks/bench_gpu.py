"""What perdure costs on one NVIDIA GPU, in a few minutes.

    python benchmarks/bench_gpu.py --out build/bench-gpu.json     with an interpreter whose torch and
                                                                  jax find the GPU

A save of 8 GiB on the GPU: how long the loop stops, until it is durable, and how much host memory it
takes, beside a copy of the same arrays to the host. Deterministic settings: the time of a training step
of three models (a perceptron, convolutions, attention), as the framework comes and as a strategy sets
it, each in a process of its own, in turn. Without a GPU it refuses; `--platform cpu` with `--mib 64`
tries this program itself.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).absolute().parent.parent / "proofs"))
from gpu_platform import engines
from store_probe import MIB, fresh, middle, spread
from table import Row, compared, finish, row

ARRAYS = 32
MODELS = ("perceptron", "convolutions", "attention")
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "XLA_FLAGS": "--xla_gpu_deterministic_ops=true",
}


class Resident:
    """The most memory of this process above that of the start, while the block runs, in bytes."""

    def __enter__(self) -> Resident:
        self._start = self.most = self._now()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.most -= self._start

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self.most = max(self.most, self._now())

    def _now(self) -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()


def arrays_of(engine: str, size: int) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """A state of `size` bytes of float32 on the device, and what copies it to the host."""
    rows = size // ARRAYS // 4 // 1024
    if engine == "torch":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        state = {f"w{n}": torch.rand(rows, 1024, device=device) for n in range(ARRAYS)}
        return state, lambda each: each.to("cpu", copy=True)
    import jax
    import numpy as np

    keys = jax.random.split(jax.random.key(0), ARRAYS)
    drawn = {f"w{n}": jax.random.uniform(key, (rows, 1024)) for n, key in enumerate(keys)}
    return jax.block_until_ready(drawn), lambda each: np.array(each)


def save_rows(engine: str, size: int, rounds: int, scratch: Path) -> Iterator[Row]:
    from perdure import CheckpointManager

    state, to_host = arrays_of(engine, size)
    copies: list[float] = []
    stalls: list[float] = []
    writes: list[float] = []
    with CheckpointManager(fresh(scratch / "run"), max_to_keep=1) as manager, Resident() as memory:
        for step in range(1, rounds + 2):
            state = {name: value + 1 for name, value in state.items()}
            if engine == "jax":
                import jax

                jax.block_until_ready(state)
            else:
                import torch

                if torch.cuda.is_available():
                    torch.cuda.synchronize()
            start = time.perf_counter()
            manager.save(step, state)
            stalls.append(time.perf_counter() - start)
            manager.wait_until_finished()
            writes.append(time.perf_counter() - start)
    for _ in range(rounds + 1):
        start = time.perf_counter()
        held = [to_host(each) for each in state.values()]
        copies.append(time.perf_counter() - start)
        del held
    what = f"{engine}: save of {size / 2**30:.3g} GiB"
    copied = [1e3 * each for each in copies[1:]]
    limit = middle(copied)
    yield row(f"{engine}: copy of the same arrays to the host", limit, "ms", spread(copied))
    stalled = [1e3 * each for each in stalls[1:]]
    stall = row(f"{what}: the loop stops", middle(stalled), "ms", spread(stalled))
    yield compared(stall, "the copy to the host", limit, most=1.1)
    rates = [size / 1e9 / each for each in writes[1:]]
    yield row(f"{what}: until it is durable", middle(rates), "GB/s", spread(rates))
    host = row(f"{what}: host memory above that before", memory.most / MIB, "MiB")
    yield compared(host, "the state", size / MIB, most=1.25)


def step_rows(engine: str, rounds: int) -> Iterator[Row]:
    """The step time under deterministic settings over that without, in processes that take turns."""
    for model in MODELS:
        times: dict[str, list[float]] = {"plain": [], "deterministic": []}
        for _ in range(rounds):
            for name, found in times.items():
                environment = {**os.environ, **(DETERMINISTIC if name == "deterministic" else {})}
                command = [sys.executable, __file__, "--step", f"{engine} {model} {name}"]
                out = subprocess.check_output(command, env=environment, text=True)
                found.append(json.loads(out.splitlines()[-1]))
        plain, mine = middle(times["plain"]), middle(times["deterministic"])
        what = f"{engine}: step of {model}, deterministic"
        more = {"against": "as the framework comes", "limit": plain, "ratio": mine / plain}
        yield row(what, mine, "ms", spread(times["deterministic"]), **more)


def measure_step(engine: str, model: str, settings: str) -> float:
    """Milliseconds of a training step in this process: the median of five blocks of ten."""
    is_deterministic = settings == "deterministic"  # JAX is, by its environment
    step = _torch_step(model, is_deterministic) if engine == "torch" else _jax_step(model)
    step(10)
    blocks = []
    for _ in range(5):
        start = time.perf_counter()
        step(10)
        blocks.append((time.perf_counter() - start) * 100)
    return middle(blocks)


def _torch_step(model: str, is_deterministic: bool) -> Callable[[int], None]:
    import torch
    from torch import nn

    torch.use_deterministic_algorithms(is_deterministic)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    if model == "perceptron":
        net: Any = nn.Sequential(
            *(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(8))
        )
        x = torch.randn(512, 1024)
    elif model == "convolutions":
        layers = [
            nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU())
            for _ in range(4)
        ]
        net, x = nn.Sequential(nn.Conv2d(3, 64, 3), *layers), torch.randn(32, 3, 32, 32)
    else:
        layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, dropout=0.0)
        net, x = (
            nn.TransformerEncoder(layer, 4, enable_nested_tensor=False),
            torch.randn(8, 128, 512),
        )
    net, x = net.to(device), x.to(device)
    optimizer = torch.optim.AdamW(net.parameters())

    def step(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def _jax_step(model: str) -> Callable[[int], None]:
    import jax
    import jax.numpy as jnp

    key = jax.random.key(0)
    if model == "perceptron":
        params: Any = jax.random.normal(key, (8, 1024, 1024)) * 0.03
        x = jax.random.normal(key, (512, 1024))

        def apply(params: Any, x: Any) -> Any:
            return jax.lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), x, params)[0]

    elif model == "convolutions":
        params = jax.random.normal(key, (4, 3, 3, 64, 64)) * 0.05
        x = jax.random.normal(key, (32, 32, 32, 64))

        def apply(params: Any, x: Any) -> Any:
            for w in params:
                numbers = ("NHWC", "HWIO", "NHWC")
                x = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)
                x = jax.nn.relu(x)
            return x

    else:
        params = jax.random.normal(key, (4, 512, 1536)) * 0.05
        x = jax.random.normal(key, (8, 128, 512))

        def apply(params: Any, x: Any) -> Any:
            for w in params:
                q, k, v = jnp.split((x @ w).reshape(8, 128, 8, -1), 3, -1)
                x = x + jax.nn.dot_product_attention(q, k, v).reshape(x.shape)
            return x

    @jax.jit
    def update(params: Any) -> Any:
        return params - 1e-3 * jax.grad(lambda p: jnp.square(apply(p, x)).mean())(params)

    def step(count: int) -> None:
        nonlocal params
        for _ in range(count):
            params = update(params)
        jax.block_until_ready(params)

    return step


def rows(given: argparse.Namespace, found: list[str]) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(dir=given.out.parent.absolute()) as scratch:
        for engine in found:
            yield from save_rows(engine, given.mib * MIB, given.rounds, Path(scratch))
            yield from step_rows(engine, given.rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/bench-gpu.json"))
    parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--mib", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step", help=argparse.SUPPRESS)  # one measurement, in its own process
    given = parser.parse_args()
    if given.step:
        print(json.dumps(measure_step(*given.step.split())))
        return 0
    # Both engines are in this process: JAX may not take all memory of the GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    found = engines(parser, given.platform)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    return finish(rows(given, found), given.out)


if __name__ == "__main__":
    sys.exit(main())
