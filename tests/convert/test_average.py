"""`average`: its bits against exact references, what is taken from where, and what it refuses."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from fractions import Fraction
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

from perdure import CheckpointManager, load_checkpoint
from perdure.cli.main import main
from perdure.convert import average
from perdure.convert.averaging import round_once
from perdure.errors import (
    ArgumentError,
    CorruptionError,
    MismatchError,
    SaveError,
    StepExistsError,
    StepNotFoundError,
    StoreError,
)
from perdure.look import origin
from perdure.state import flatten
from perdure.store import Run

BIG = 1_049_400  # elements of a float32 leaf of more than one chunk


@cache
def state(step: int) -> dict[str, Any]:
    random = np.random.default_rng(step)
    return {
        "model": {
            "kernel": random.normal(size=(11, BIG // 11)).astype(np.float32),
            "half": random.normal(size=700).astype(np.float16),
            "brain": random.normal(size=701).astype(ml_dtypes.bfloat16),
            "double": random.normal(size=(3, 5)),
            "phase": (random.normal(size=9) + 1j * random.normal(size=9)).astype(np.complex64),
            "frozen": np.full(10, 0.1),
            "empty": np.zeros((0, 4), np.float32),
        },
        "optimizer": {"step": np.int64(step), "mask": random.random(8) < 0.5},
        "rate": 0.1 * step,
        "name": f"step {step}",
    }


def save(directory: Path, *steps: int) -> str:
    with Run(directory, create=True) as run:
        for step in steps:
            run.save(step, flatten(state(step)), {"seed": 1}, {"loss": 1.0 / step})
    return str(directory)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("average") / "run", 10, 20, 30)


def reference(values: list[np.ndarray], weights: list[float]) -> np.ndarray:
    """NumPy's sum in float64 from the first to the last, divided by the sum of the weights."""
    wide = np.complex128 if values[0].dtype.kind == "c" else np.float64
    added = values[0].astype(wide) * weights[0]
    for value, weight in zip(values[1:], weights[1:], strict=True):
        added = added + value.astype(wide) * weight
    return added / math.fsum(weights)


def nearest_brain(value: float) -> float:
    """The bfloat16 nearest to 0 or to a positive normal number, ties to even, computed exactly."""
    if not value:
        return 0.0
    exact = Fraction(value)
    unit = Fraction(2) ** (math.floor(math.log2(value)) - 7)
    return float(round(exact / unit) * unit)  # `round` of a Fraction takes the even of two


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, [1.0, 1.0, 1.0]),
        ({"weights": [0.5, 2, 0.25]}, [0.5, 2.0, 0.25]),
    ],
)
def test_bits_are_those_of_float64_rounded_once(
    run: str, tmp_path: Path, options: dict[str, Any], weights: list[float]
) -> None:
    made = average([f"{run}@10,20,30"], tmp_path / "out", **options)
    assert [weight for _, weight in made.sources] == weights
    states = [state(step) for step in (10, 20, 30)]
    mean = load_checkpoint(tmp_path / "out")
    for name in ("kernel", "half", "double", "phase"):
        values = [one["model"][name] for one in states]
        expected = reference(values, weights).astype(values[0].dtype)
        np.testing.assert_array_equal(
            mean["model"][name].view(np.uint8), expected.view(np.uint8), err_msg=name
        )
    exact = [float(x) for x in reference([one["model"]["brain"] for one in states], weights)]
    brain = mean["model"]["brain"].astype(np.float64)
    assert mean["model"]["brain"].dtype == ml_dtypes.bfloat16
    assert brain.tolist() == [math.copysign(nearest_brain(abs(x)), x) for x in exact]
    # Equal in all: as it is, though the mean of a float64 in float64 may be another number.
    np.testing.assert_array_equal(mean["model"]["frozen"], states[0]["model"]["frozen"])
    assert mean["model"]["empty"].shape == (0, 4)
    assert set(made.averaged) == {
        f"model/{name}" for name in ("kernel", "half", "brain", "double", "phase")
    }
    assert set(made.equal) == {"model/frozen", "model/empty"}


def test_uniform_is_the_mean_of_numpy(run: str, tmp_path: Path) -> None:
    average([f"{run}@10,20,30"], tmp_path / "out")
    kernels = np.stack([state(step)["model"]["kernel"] for step in (10, 20, 30)])
    expected = kernels.mean(axis=0, dtype=np.float64).astype(np.float32)
    got = load_checkpoint(tmp_path / "out", leaves="model/kernel")["model"]["kernel"]
    assert got.tobytes() == expected.tobytes()
    # Negative control: a mean in float32 has other bits.
    assert got.tobytes() != kernels.mean(axis=0, dtype=np.float32).tobytes()


def test_other_leaves_are_those_of_like(run: str, tmp_path: Path) -> None:
    made = average([f"{run}@10", f"{run}@20"], tmp_path / "newest")
    stored = load_checkpoint(tmp_path / "newest")
    assert (made.manifest.step, stored["rate"], stored["name"]) == (20, 2.0, "step 20")
    assert stored["optimizer"]["step"] == 20
    assert set(made.taken) == {"optimizer/step", "optimizer/mask", "rate", "name"}
    assert made.manifest.recipe == {"seed": 1}
    assert made.manifest.metrics == {}, "no metric was computed with this model"
    other = average(
        [f"{run}@10", f"{run}@20"], tmp_path / "out", leaves="model/kernel", like=f"{run}@30"
    )
    stored, like = load_checkpoint(tmp_path / "out"), state(30)
    assert (other.manifest.step, stored["rate"]) == (30, like["rate"])
    np.testing.assert_array_equal(stored["model"]["half"], like["model"]["half"])
    expected = reference([state(step)["model"]["kernel"] for step in (10, 20)], [1.0, 1.0])
    np.testing.assert_array_equal(stored["model"]["kernel"], expected.astype(np.float32))
    noted = origin(Run(tmp_path / "out").manifest(30))
    assert noted is not None
    assert noted["like"]["step"] == 30
    assert noted["leaves"] == ["model/kernel"]
    assert [source["step"] for source in noted["sources"]] == [10, 20]
    assert noted["sources"][0]["fingerprint"] == Run(run).manifest(10).fingerprint
    assert origin(Run(run).manifest(10)) is None


def test_one_fingerprint_in_any_order_and_anywhere(run: str, tmp_path: Path) -> None:
    copy = tmp_path / "a copy"
    shutil.copytree(run, copy)
    made = set()
    weights = {10: 0.1, 20: 0.7, 30: 1e-9}
    for number, steps in enumerate(list(permutations(weights))[::2]):
        place = run if number % 2 else copy
        out = tmp_path / str(number)
        named = [f"{place}@{step}" for step in steps]
        made.add(
            average(named, out, weights=[weights[step] for step in steps]).manifest.fingerprint
        )
        assert Run(out).load(30).leaves, "every chunk is verified"
    assert len(made) == 1
    # Negative control: the weights belong to their checkpoints.
    swapped = average([f"{run}@10,20,30"], tmp_path / "x", weights=[0.7, 0.1, 1e-9])
    assert swapped.manifest.fingerprint not in made


def test_one_fingerprint_on_one_and_four_threads(run: str, tmp_path: Path) -> None:
    program = (
        "import sys; from perdure.convert import average; "
        "made = average([sys.argv[1] + '@10,20,30'], sys.argv[2], weights=[.1, .9, 7]); "
        "print(made.manifest.fingerprint)"
    )
    found = set()
    for threads in ("1", "4"):
        names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        environment = {**os.environ, **dict.fromkeys(names, threads)}
        command = [sys.executable, "-c", program, run, str(tmp_path / threads)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found.add(done.stdout)
    assert len(found) == 1


def test_training_resumes_from_an_average(run: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    average([f"{run}@20,30"], out)
    with CheckpointManager(out, recipe={"seed": 1}) as manager:
        restored, _ = manager.restore(like=state(30))
        assert restored["name"] == "step 30"
        manager.save(31, state(31))
    assert Run(out).steps() == [30, 31]


def test_rounding_of_special_values() -> None:
    tie = 1 + 2.0**-8
    values = np.array([tie + 2.0**-40, tie - 2.0**-40, tie, -tie - 2.0**-40, 1e300, -np.inf, 1e-60])
    rounded = round_once(values, np.dtype(ml_dtypes.bfloat16)).astype(np.float64)
    assert rounded.tolist() == [1 + 2.0**-7, 1.0, 1.0, -1 - 2.0**-7, np.inf, -np.inf, 0.0]
    # Negative control: ml_dtypes rounds twice, so the first one would be a tie.
    assert values[:1].astype(ml_dtypes.bfloat16)[0] == 1.0
    negative_nan = -np.array([np.nan])
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        bits = round_once(negative_nan, np.dtype(dtype)).tobytes()
        assert bits == np.array([np.nan]).astype(dtype).tobytes()
        assert not bits[-1] & 0x80


def test_what_is_refused(run: str, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def refused(kind: type[Exception], *named: str, **options: Any) -> str:
        with pytest.raises(kind) as caught:
            average(named, out, **options)
        assert not out.exists() or not Run(out, create=True).steps()
        return str(caught.value)

    assert "found 1" in refused(ArgumentError, f"{run}@10")
    assert "step 25" in refused(StepNotFoundError, f"{run}@10", f"{run}@25")
    assert "'modle'" in refused(ArgumentError, f"{run}@10,20", leaves="modle")
    assert "nothing to average" in refused(ArgumentError, f"{run}@10,20", leaves="optimizer")
    assert "found 3" in refused(ArgumentError, f"{run}@10,20", weights=[1, 2, 3])
    assert "above 0" in refused(ArgumentError, f"{run}@10,20", weights=[1, -1])
    assert "above 0" in refused(ArgumentError, f"{run}@10,20", weights=[1, math.nan])
    with pytest.raises(StoreError, match="inside the other"):
        average([f"{run}@10,20"], Path(run) / "inside")
    assert not (Path(run) / "inside").exists()
    other = tmp_path / "other"
    changed = {"model": {**state(10)["model"], "half": state(10)["model"]["half"][:-1]}}
    with Run(other, create=True) as opened:
        opened.save(40, flatten(changed))
    message = refused(MismatchError, f"{run}@10", f"{other}@40")
    assert "'model/half'" in message
    assert "float16[699]" in message
    assert "float16[700]" in message
    with Run(out, create=True) as opened:
        opened.save(1, flatten({"x": 1}))
    with pytest.raises(StepExistsError, match="Nothing was changed"):
        average([f"{run}@10,20"], out)
    assert Run(out).steps() == [1]


def small(directory: Path, *values: list[float]) -> str:
    with Run(directory, create=True) as run:
        for step, value in enumerate(values, 1):
            run.save(step, flatten({"w": np.array(value), "z": np.array(value) * (1 + 1j)}))
    return f"{directory}@{','.join(map(str, range(1, len(values) + 1)))}"


def test_sums_above_the_largest_float64_have_finite_means(tmp_path: Path) -> None:
    several = small(
        tmp_path / "run", [1.7e308, 1.0, np.inf, -1.7e308], [1.6e308, 2.0, 1.0, 1.7e308]
    )
    average([several], tmp_path / "out")
    mean = load_checkpoint(tmp_path / "out")
    expected = [float((Fraction(1.7e308) + Fraction(1.6e308)) / 2), 1.5, math.inf, 0.0]
    assert mean["w"].tolist() == expected
    assert mean["z"].imag.tolist() == expected
    apart = average([several], tmp_path / "apart", weights=[3, -2])  # a mean that no float64 is
    assert load_checkpoint(tmp_path / "apart")["w"][3] == -math.inf
    assert apart.manifest.step == 2


def test_a_mean_of_negative_zeros_keeps_its_sign(tmp_path: Path) -> None:
    several = small(tmp_path / "run", [-0.0, -0.0, 1.0], [-0.0, 0.0, 2.0])
    average([several], tmp_path / "out")
    mean = load_checkpoint(tmp_path / "out")["w"]
    assert [str(value) for value in mean.tolist()] == ["-0.0", "0.0", "1.5"]


def test_very_large_and_very_small_weights(tmp_path: Path) -> None:
    several = small(tmp_path / "run", [1.0, 1e300], [2.0, 1e300])
    bits = {
        average([several], tmp_path / str(n), weights=weights).manifest.fingerprint
        for n, weights in enumerate(([1, 1], [1e307, 1e307], [1e-310, 1e-310]))
    }
    assert len(bits) == 1
    done = CliRunner().invoke(
        main, ["average", several, "-o", str(tmp_path / "cli"), "--weights", "1e307,1e307"]
    )
    assert (done.exit_code, "1e+307" in done.output) == (0, True)
    for weights in ([1e308, -1e308], [1e308, 1e308], [10**400, 1], ["a", 1]):
        with pytest.raises(ArgumentError, match="whose sum is above 0"):
            average([several], tmp_path / "no", weights=weights)  # type: ignore[arg-type]


def test_one_text_names_several_and_the_result_is_a_table(tmp_path: Path) -> None:
    several = small(tmp_path / "run", [1.0], [2.0])
    made = average(several, tmp_path / "out")
    assert [checkpoint.step for checkpoint, _ in made.sources] == [1, 2]
    assert "2 leaves averaged" in repr(made)
    opened = [checkpoint for checkpoint, _ in made.sources]
    again = average(opened, tmp_path / "again")
    assert again.manifest.fingerprint == made.manifest.fingerprint
    for one in (Path(several.partition("@")[0]), Run(several.partition("@")[0]), opened[0]):
        with pytest.raises(ArgumentError, match="found 1"):
            average(one, tmp_path / "none")


def test_damage_and_a_full_disk_leave_no_checkpoint(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(run, broken)
    manifest = Run(broken).manifest(20)
    entry = next(leaf for leaf in manifest.leaves if leaf.path == "model/kernel")
    pack = broken / "packs" / manifest.packs[entry.chunks[1].pack].name
    data = bytearray(pack.read_bytes())
    data[entry.chunks[1].offset + 5] ^= 1
    pack.write_bytes(data)
    out = tmp_path / "out"
    with pytest.raises(CorruptionError, match="model/kernel") as caught:
        average([f"{broken}@10,20"], out)
    assert pack.name in str(caught.value)
    assert not Run(out).steps()
    pack.unlink()
    with pytest.raises(CorruptionError, match=pack.name):
        average([f"{broken}@10,20"], out)
    monkeypatch.setattr("perdure.store.local.LocalStorage.free_bytes", lambda _: 1000)
    with pytest.raises(SaveError, match="1000 are free"):
        average([f"{run}@10,20"], out)
    monkeypatch.undo()
    made = average([f"{run}@10,20"], out)  # what the failed calls left is no obstacle
    assert Run(out).steps() == [made.manifest.step]
    assert len(list((out / "packs").iterdir())) == 1


def test_command(run: str, tmp_path: Path) -> None:
    def command(*words: str) -> Any:
        return CliRunner().invoke(main, ["average", *words], catch_exceptions=False)

    out = str(tmp_path / "out")
    done = command(
        f"{run}@10,20", f"{run}@30", "-o", out, "--weights", "1,2,1", "--leaves", "model"
    )
    assert done.exit_code == 0, done.output
    assert "5 leaves averaged" in done.output
    again = command(f"{run}@10,20,30", "-o", str(tmp_path / "b"), "--json")
    document = json.loads(again.stdout)
    assert document["fingerprint"] == Run(tmp_path / "b").manifest(30).fingerprint
    assert [source["weight"] for source in document["sources"]] == [1, 1, 1]
    (tmp_path / "file").touch()
    for taken in (out, str(tmp_path / "file")):  # OUT has a checkpoint, or is no directory
        assert command(f"{run}@10,20", "-o", taken).exit_code == 2
    shown = CliRunner().invoke(main, ["show", out]).output
    assert "origin       average" in shown
    assert f"origin       {Run(run).where}@20, weight 2" in shown
    assert f"origin       {Run(run).where}@30, all other leaves" in shown
    one = command(f"{run}@10,20", "-o", str(tmp_path / "one"), "--leaves", "model/half")
    assert "1 leaf averaged" in one.output
    assert command(f"{run}@11,20", "-o", str(tmp_path / "c")).exit_code == 2
    assert command(f"{run}@10,20", "-o", str(tmp_path / "c"), "--weights", "1,x").exit_code == 2
