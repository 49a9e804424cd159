"""Exports of a model, and those whose consumers need JAX, in a fork of a process that has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forked import run_forked
from perdure.convert import export
from perdure.errors import ArgumentError
from perdure.state.leaf_values import scalar_leaf
from perdure.store import Run

WORKER = Path(__file__).with_name("jax_export_worker.py")


def test_keras_jax_and_orbax_load_the_bits(tmp_path: Path) -> None:
    ((status, output, errors),) = run_forked("keras-jax", WORKER, [[str(tmp_path)]], [{}])
    assert status == 0, errors
    answer = json.loads(output.splitlines()[-1])
    model = answer["keras"]
    assert model["files"] == ["m.keras"]
    assert model["left_out"] == ["model/seed_generator/seed_generator_state"]
    assert model["variables"]
    assert model["call"]
    assert [model["misfit"], model["no function"], model["verify"]] == model["expected"]
    assert model["left"] == []
    orbax = answer["orbax"]
    assert orbax["arrays"]
    assert orbax["scalars"] == [3, "x"]
    assert orbax["left_out"] == ["raw"]
    assert orbax["back"] == [
        ["name", "py:str", []],
        ["params/b", "bfloat16", [3]],
        ["params/scale", "float64", []],
        ["params/w", "float32", [2, 3]],
        ["step", "py:int", []],
    ]
    assert orbax["changed"], "the bytes could not be held"
    assert orbax["standard"] == [["train/params/w", "bfloat16", [4, 2]]]
    assert orbax["no such"] == "DataError"


def test_a_function_that_makes_no_model_is_named(tmp_path: Path) -> None:
    with Run(tmp_path / "run", create=True) as saved:
        saved.save(1, {"model/w": scalar_leaf(1)})

    def needy(x: int) -> int:
        return x

    program = tmp_path / "k.py"
    program.write_text("def a(x): return x\ndef b(): return 3\n")
    cases: Any = (
        (f"{program}:a", f"{program}:a needs an argument"),
        (needy, "needy needs an argument"),
        (f"{program}:b", f"{program}:b returned int, expected a built Keras model"),
        (dict, "dict returned dict, expected a built Keras model"),
    )
    for model, phrase in cases:
        with pytest.raises(ArgumentError) as caught:
            export(tmp_path / "run", "jax_export", tmp_path / "out", model=model)
        assert phrase in str(caught.value)
        assert not (tmp_path / "out").exists()
