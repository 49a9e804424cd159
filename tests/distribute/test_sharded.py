"""Arrays sharded over processes: saved by all, restored on other processes with other shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from group import results

from perdure import load_checkpoint, verify_run
from perdure.store import Run


def worker(processes: int, devices: int, directory: Path, action: str) -> list[dict]:
    arguments = ("--directory", str(directory), "--action", action)
    env = {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    return results("sharded_worker.py", processes, *arguments, env=env, forked="jax")


def assert_refused(answers: list[dict], found: str) -> None:
    """Every process has refused the array that is not on devices of all of them, by its path."""
    for answer in answers:
        text = answer.pop("refused")
        assert "stage/part: expected an array on devices of each of the" in text
        assert found in text


def test_shards_of_two_processes_are_restored_in_three_and_without_jax(tmp_path: Path) -> None:
    import sharded_worker

    saved = worker(2, 2, tmp_path, "save")
    assert_refused(saved, "JAX's processes [1]")
    for answer in saved:
        alone = answer.pop("alone")
        assert "model/rows: an array with the sharding" in alone
        assert "processes=perdure.initialize_distributed('jax')" in alone
    packs = {pack.name.split("-")[1] for pack in Run(tmp_path).manifest(3).packs}
    assert packs == {"00000", "00001"}
    arrays = load_checkpoint(tmp_path)
    for name in sharded_worker.SHAPES:
        assert np.array_equal(arrays[name], sharded_worker.value(name))
    restored = worker(3, 1, tmp_path, "restore")
    assert_refused(restored, "JAX's processes [1, 2]")
    assert restored == [{"step": 3, "equal": True, "spec": restored[0]["spec"]}] * 3
    assert "None, 'device'" in restored[0]["spec"]
    assert verify_run(Run(tmp_path)).problems == ()
