"""Programs of Flax, Equinox, optax and JAX resume with the bits of the undisturbed run.

After a kill a program has what is in its checkpoint and what its code makes again, and nothing else. So
each program begins again with new objects, in the same process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax_programs
import pytest
from jax.experimental.compilation_cache import compilation_cache

from forked import run_forked
from perdure import CheckpointManager
from perdure.state import flatten

STEPS, SAVED = 6, 3


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """JAX reads again what it has compiled for the same program with other objects."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    config: Any = jax.config
    before = {name: getattr(config, name) for name in settings}
    for values in (settings, before):
        for name, value in values.items():
            config.update(name, value)
        compilation_cache.reset_cache()
        if values is settings:
            yield


def bits(state: Any) -> dict[str, Any]:
    return {
        path: (leaf.dtype, leaf.shape, bytes(leaf.data)) for path, leaf in flatten(state).items()
    }


def train(program: jax_programs.Program, directory: Path, *, restored: bool = True) -> Any:
    """The bits at the end. The run begins at its checkpoint if it has one, or, without `restored`, at
    the step of this checkpoint with the fresh state."""
    fresh, step = program()
    with CheckpointManager(directory, save_interval_steps=SAVED, max_to_keep=1) as manager:
        state, start = manager.restore_or_initialize(fresh())
        if not restored:
            state = fresh()
        for number in range(start, STEPS):
            state = step(state, jax_programs.ROWS[number])
            if number + 1 == SAVED:
                manager.save(SAVED, state)
    return bits(state), start


@pytest.mark.parametrize("name", jax_programs.PROGRAMS)
def test_a_program_resumes_with_the_bits_of_the_undisturbed_run(name: str, tmp_path: Path) -> None:
    program = jax_programs.PROGRAMS[name]
    expected, start = train(program, tmp_path)
    assert start == 0
    resumed, start = train(program, tmp_path)
    assert start == SAVED, "the run was interrupted"
    assert resumed == expected
    assert train(program, tmp_path, restored=False)[0] != expected, "the control"


def test_a_state_of_one_mesh_is_restored_on_every_other(tmp_path: Path) -> None:
    program = Path(__file__).parent / "jax_mesh_worker.py"
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    [(status, out, err)] = run_forked("jax", program, [[str(tmp_path)]], [environment])
    assert status == 0, err
    answer = json.loads(out.splitlines()[-1])
    meshes = ["(2, 4)", "(4, 2)", "(8, 1)", "(1, 1)", "no mesh"]
    assert answer["equal"] == {f"{a} to {b}": True for a in meshes for b in meshes}
    assert answer["placed"] == answer["wanted"]
    assert answer["abstract"]
    assert answer["as one"], "the same bits continue the run on its own mesh"
    assert not answer["control"]
    same, other = answer["copies"]
    assert same == "saved"
    assert other.startswith("w: the copies of this array on cpu:2 and cpu:3 have different bits")
