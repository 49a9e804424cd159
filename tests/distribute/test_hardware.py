"""The machine in the recipe: instruction set, settings, deterministic flags on GPUs."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forked import run_forked
from perdure import ArrayDataset
from perdure.distribute.jax.xla_settings import ask_for_determinism, check_determinism
from perdure.errors import TopologyError
from perdure.runtime.environment import XLA_DETERMINISTIC as FLAG
from perdure.runtime.environment import instruction_set, variables
from perdure.runtime.process_group import SingleProcess

ZEN = """processor\t: 0
vendor_id\t: AuthenticAMD
flags\t\t: fpu sse2 sse4_2 avx fma avx2 sha_ni

processor\t: 1
vendor_id\t: AuthenticAMD
flags\t\t: fpu avx512f
"""
GRAVITON = """processor\t: 0
CPU implementer\t: 0x41
Features\t: fp asimd sve bf16 crc32
"""


def test_instruction_set_names_the_cpu_features_that_select_kernels() -> None:
    assert instruction_set(ZEN, "x86_64") == "x86_64 AuthenticAMD: avx avx2 fma sse4_2"
    assert instruction_set(GRAVITON, "aarch64") == "aarch64 0x41: asimd bf16 sve"
    assert instruction_set("", "arm64") == "arm64"
    assert instruction_set(ZEN.replace("avx2", "avx512f"), "x86_64") != instruction_set(
        ZEN, "x86_64"
    )
    assert instruction_set() == instruction_set()


def test_settings_leave_out_the_topology() -> None:
    environ = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_dump_to=/x "
        "--xla_cpu_use_xnnpack=true --xla_cpu_use_xnnpack=false --xla_gpu_autotune_level=0 --xla_b",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_CBWR": "",
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    }
    assert variables("cpu", environ) == (
        "ATEN_CPU_CAPABILITY=avx2 XLA_FLAGS=--xla_b --xla_cpu_use_xnnpack=false"
    )
    assert variables("gpu", environ) == (
        "CUBLAS_WORKSPACE_CONFIG=:16:8 XLA_FLAGS=--xla_b --xla_gpu_autotune_level=0"
    )
    assert variables("cpu", {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}) == ""


def test_the_deterministic_flag_is_set_before_jax_starts() -> None:
    environ: dict[str, str] = {}
    assert ask_for_determinism(environ, started=False, plugin=True)
    assert environ == {"XLA_FLAGS": f"{FLAG}=true"}
    environ = {"XLA_FLAGS": "--xla_b=1"}
    assert ask_for_determinism(environ, started=False, plugin=True)
    assert environ == {"XLA_FLAGS": f"--xla_b=1 {FLAG}=true"}
    assert ask_for_determinism(environ, started=True, plugin=True)
    # Only a CPU can start, so nothing is set.
    environ = {}
    assert ask_for_determinism(environ, started=False, plugin=False)
    assert environ == {}


def test_a_gpu_without_the_flag_is_a_warning_and_in_the_recipe() -> None:
    late: dict[str, str] = {}
    asked = ask_for_determinism(late, started=True, plugin=True)
    assert late == {}
    with pytest.warns(RuntimeWarning, match=f"JAX runs on gpu without {FLAG}=true"):
        assert check_determinism(asked, "gpu") is False
    refused = ask_for_determinism({"XLA_FLAGS": f"{FLAG}=false"}, started=False, plugin=True)
    with pytest.warns(RuntimeWarning, match="Make the strategy before anything else"):
        assert check_determinism(refused, "gpu") is False
    assert check_determinism(False, "cpu")
    assert check_determinism(True, "gpu")


def test_the_cublas_workspace_is_set_or_an_error() -> None:
    from perdure.distribute.torch.engine import fix_cublas

    environ: dict[str, str] = {}
    fix_cublas(environ, started=False)
    assert environ == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    fix_cublas(environ, started=True)
    fix_cublas({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, started=True)
    for environ, started, says in [
        ({}, True, "CUDA has started with no CUBLAS_WORKSPACE_CONFIG"),
        ({"CUBLAS_WORKSPACE_CONFIG": ":0:0"}, False, "with CUBLAS_WORKSPACE_CONFIG=:0:0"),
    ]:
        with pytest.raises(TopologyError) as error:
            fix_cublas(environ, started)
        assert says in str(error.value)
        assert "expected :4096:8 or :16:8" in str(error.value)


@pytest.fixture
def torch_engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine on the CPU, whose device pretends to be a GPU; PyTorch's settings are put back."""
    torch = pytest.importorskip("torch")
    from perdure.distribute.torch.engine import TorchEngine

    threads, before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    benchmark = torch.backends.cudnn.benchmark
    engine: Any = TorchEngine(None, SingleProcess(), None)
    monkeypatch.setattr(engine, "devices", (torch.device("cuda", 0),))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Pretend H100")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91700)
    yield engine
    torch.use_deterministic_algorithms(before)
    torch.backends.cudnn.benchmark = benchmark
    torch.set_num_threads(threads)


def test_the_recipe_of_pytorch_on_a_gpu(torch_engine: Any) -> None:
    import torch

    recipe = torch_engine.recipe()
    assert recipe["platform"] == "cuda"
    assert recipe["instruction_set"] == "Pretend H100"
    assert recipe["engine_version"] == f"torch {torch.__version__}, CUDA 13.0, cuDNN 91700"
    assert recipe["deterministic"] is True
    assert recipe["cudnn_tf32"] is True  # PyTorch's default
    assert recipe["matmul_precision"] == "highest"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("use_deterministic_algorithms(False)", "torch.use_deterministic_algorithms(False)"),
        ("use_deterministic_algorithms(True, warn_only=True)", "warn_only=True"),
        ("backends.cudnn.benchmark = True", "torch.backends.cudnn.benchmark = True"),
    ],
)
def test_nondeterministic_pytorch_warns_once(torch_engine: Any, change: str, says: str) -> None:
    import torch

    assert torch_engine.recipe()["deterministic"] is True
    torch_engine._check_determinism()  # no warning, which would be an error here
    exec(f"torch.{change}", {"torch": torch})
    assert torch_engine.recipe()["deterministic"] is False
    with pytest.warns(RuntimeWarning, match="two runs may give different bits") as caught:
        torch_engine._check_determinism()
    assert says in str(caught[0].message)
    torch_engine._check_determinism()


def test_a_step_warns_if_pytorch_is_no_longer_deterministic() -> None:
    torch = pytest.importorskip("torch")
    from perdure.torch import MirroredStrategy

    def grad(state: Any, batch: Any, key: Any) -> Any:
        return batch["x"].sum() + 0 * state

    def update(state: Any, total: Any) -> Any:
        return total, {}

    strategy = MirroredStrategy(replicas=2)
    data = ArrayDataset({"x": np.ones(8, np.float32)}, 4)
    step = strategy.step(grad, update)
    state, _ = step(torch.zeros(()), strategy.batch(data, 0))
    torch.use_deterministic_algorithms(False)
    try:
        with pytest.warns(RuntimeWarning, match=r"torch.use_deterministic_algorithms\(False\)"):
            step(state, strategy.batch(data, 1))
    finally:
        torch.use_deterministic_algorithms(True)


# In a new process, because PyTorch cannot unset its newer precision settings.
PRECISIONS = """
import sys
import torch
from perdure.runtime.process_group import SingleProcess
from perdure.runtime import environment as e
from perdure.distribute.torch.engine import TorchEngine
engine = TorchEngine(None, SingleProcess(), None)
def told(kind):
    return [e.torch_matmul_precision(kind), e.torch_other_precisions(kind), e.torch_cudnn_tf32()]
assert told("cpu") == ["highest", "", True], told("cpu")
assert told("cuda") == ["highest", "", True], told("cuda")
torch.set_float32_matmul_precision("high")
assert told("cuda") == ["high", "", True], told("cuda")
torch.set_float32_matmul_precision("highest")
torch.backends.cudnn.allow_tf32 = False
assert told("cuda")[2] is False
torch.backends.cudnn.allow_tf32 = True
if hasattr(torch.backends, "fp32_precision"):
    before = engine.recipe()
    torch.backends.mkldnn.conv.fp32_precision = "bf16"
    assert engine.recipe() == {**before, "settings": f"{before['settings']} mkldnn.conv=bf16".strip()}
    torch.backends.mkldnn.conv.fp32_precision = "ieee"
    torch.backends.cudnn.rnn.fp32_precision = "ieee"
    assert told("cuda") == ["highest", "cudnn.rnn=ieee", True], told("cuda")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        torch.get_float32_matmul_precision()
    except RuntimeError:  # which is why both families are read
        print("the older name raises")
    assert told("cuda")[0] == "high", told("cuda")
    assert engine.recipe()["matmul_precision"] == "medium", engine.recipe()
"""


def test_both_families_of_precision_settings_are_in_the_recipe(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    program = tmp_path / "precisions.py"
    program.write_text(PRECISIONS)
    ((status, out, err),) = run_forked("torch", program, [[]], [os.environ])
    assert status == 0, err
    if hasattr(torch.backends, "fp32_precision"):
        assert out == "the older name raises\n"


def test_the_recipe_of_jax_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax")
    from perdure.distribute.jax.engine import JaxEngine

    engine = JaxEngine(1, SingleProcess(), 8)
    on_cpu = engine.recipe()
    assert "cuda" not in str(on_cpu["engine_version"])
    device: Any = SimpleNamespace(
        platform="gpu",
        device_kind="Pretend H100",
        client=SimpleNamespace(platform_version="PJRT C API\ncuda 13000"),
    )
    monkeypatch.setattr(engine, "devices", [device])
    monkeypatch.setattr(engine, "_deterministic", check_determinism(True, device.platform))
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}=true".strip()
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    recipe = engine.recipe()
    assert recipe["engine_version"] == f"{on_cpu['engine_version']}, PJRT C API cuda 13000"
    assert (recipe["platform"], recipe["instruction_set"]) == ("gpu", "Pretend H100")
    assert recipe["deterministic"] is True
    assert "NVIDIA_TF32_OVERRIDE=0" in str(recipe["settings"])
    assert f"{FLAG}=true" in str(recipe["settings"])
