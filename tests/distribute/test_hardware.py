"""What the recipe says of the machine: instruction set, settings, deterministic flags on GPU."""

from __future__ import annotations

import pytest

from perdure.distribute.hardware import instruction_set, settings
from perdure.distribute.jax.flags import FLAG, ask_for_determinism, check_determinism
from perdure.errors import TopologyError

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


def test_instruction_set_names_what_kernels_are_chosen_by() -> None:
    assert instruction_set(ZEN, "x86_64") == "x86_64 AuthenticAMD: avx avx2 fma sse4_2"
    assert instruction_set(GRAVITON, "aarch64") == "aarch64 0x41: asimd bf16 sve"
    assert instruction_set("", "arm64") == "arm64"
    assert instruction_set(ZEN.replace("avx2", "avx512f"), "x86_64") != instruction_set(
        ZEN, "x86_64"
    )
    assert instruction_set() == instruction_set()


def test_settings_without_topology() -> None:
    environ = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_dump_to=/x "
        "--xla_cpu_use_xnnpack=true --xla_cpu_use_xnnpack=false --xla_gpu_autotune_level=0 --xla_b",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_CBWR": "",
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    }
    assert settings("cpu", environ) == (
        "ATEN_CPU_CAPABILITY=avx2 XLA_FLAGS=--xla_b --xla_cpu_use_xnnpack=false"
    )
    assert settings("gpu", environ) == (
        "CUBLAS_WORKSPACE_CONFIG=:16:8 XLA_FLAGS=--xla_b --xla_gpu_autotune_level=0"
    )
    assert settings("cpu", {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}) == ""


def test_the_deterministic_flag_is_set_while_there_is_time() -> None:
    environ: dict[str, str] = {}
    assert ask_for_determinism(environ, started=False, plugin=True)
    assert environ == {"XLA_FLAGS": f"{FLAG}=true"}
    environ = {"XLA_FLAGS": "--xla_b=1"}
    assert ask_for_determinism(environ, started=False, plugin=True)
    assert environ == {"XLA_FLAGS": f"--xla_b=1 {FLAG}=true"}
    assert ask_for_determinism(environ, started=True, plugin=True)
    # Nothing but a CPU can start: nothing is touched.
    environ = {}
    assert ask_for_determinism(environ, started=False, plugin=False)
    assert environ == {}


def test_a_gpu_without_the_flag_is_told_and_in_the_recipe() -> None:
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


def test_workspaces_of_cublas() -> None:
    from perdure.distribute.torch.engine import fix_cublas

    environ: dict[str, str] = {}
    fix_cublas(environ, started=False)
    assert environ == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    fix_cublas(environ, started=True)
    fix_cublas({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, started=True)
    for found, started, says in [
        ({}, True, "CUDA has started with no CUBLAS_WORKSPACE_CONFIG"),
        ({"CUBLAS_WORKSPACE_CONFIG": ":0:0"}, False, "with CUBLAS_WORKSPACE_CONFIG=:0:0"),
    ]:
        with pytest.raises(TopologyError) as error:
            fix_cublas(found, started)
        assert says in str(error.value)
        assert "expected :4096:8 or :16:8" in str(error.value)
