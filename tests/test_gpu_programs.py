"""The proof and the benchmark of a GPU find one, or refuse in a sentence. They run where one is."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import torch

sys.path.append(str(Path(__file__).absolute().parent.parent / "proofs"))
import gpu_platform


@pytest.mark.parametrize(
    ("asked", "has_torch", "jax_finds", "expected"),
    [
        ("gpu", True, "gpu", ["torch", "jax"]),
        ("gpu", True, "cpu", ["torch"]),
        ("gpu", False, "gpu", ["jax"]),
        ("cpu", False, "cpu", ["torch", "jax"]),
    ],
)
def test_the_engines_that_find_a_gpu_are_tried(
    monkeypatch: pytest.MonkeyPatch, asked: str, has_torch: bool, jax_finds: str, expected: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_torch)
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform=jax_finds)])
    assert gpu_platform.engines(argparse.ArgumentParser(), asked) == expected


def test_without_a_gpu_there_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform="cpu")])
    with pytest.raises(SystemExit) as ended:
        gpu_platform.engines(argparse.ArgumentParser("proof_gpu.py"), "gpu")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("proof_gpu.py: expected an NVIDIA GPU, found none (torch ")
    assert said.count("\n") == 1
