"""`perdure.initialize_distributed`; a group of two JAX processes that restarts after a lost worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import perdure
from perdure.checkpoint import SingleProcess
from perdure.errors import ClusterError
from perdure.store import Run
from perdure.supervise import RunOptions, Supervisor
from perdure.supervise.worker_environment import default_cache, drop_recent

LOOP = """
import json, os, signal, sys
import jax
import jax.numpy as jnp
import perdure
processes = perdure.initialize_distributed()
assert jax.process_count() == int(os.environ.get("WORLD_SIZE", "1")) == processes.count
if processes.index == 0 and processes.count > 1:
    # The group's port is open to this machine alone.
    port = int(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"][0].rpartition(":")[2])
    sockets = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}")]
    listening = [s[1] for s in sockets if s[3] == "0A" and s[1].endswith(f":{port:04X}")]
    assert len(listening) == 1 and listening[0].endswith(f"0100007F:{port:04X}"), listening
step = jax.jit(lambda w, n: w * 0.9 + jnp.sin(n + w))
with perdure.CheckpointManager(sys.argv[1], save_interval_steps=2, processes=processes) as manager:
    state, start = manager.restore_or_initialize(lambda: {"w": jnp.arange(4.0)})
    for number in range(start, 10):
        if number == 5 and processes.index == 1 and os.environ["PERDURE_ATTEMPT"] == "1":
            manager.wait_until_finished()
            os.kill(os.getpid(), signal.SIGKILL)
        state = {"w": step(state["w"], number)}
        manager.save(number + 1, state)
"""


def test_two_workers_come_back_with_the_bits_of_one(tmp_path: Path) -> None:
    alone = [sys.executable, "-c", LOOP, str(tmp_path / "alone")]
    subprocess.run(alone, check=True, env={**_clean(), "JAX_PLATFORMS": "cpu"})
    options = RunOptions(
        workers=2,
        log_directory=tmp_path / "logs",
        environment={"JAX_PLATFORMS": "cpu"},
        compilation_cache=tmp_path / "cache",
    )
    summary = Supervisor([*alone[:-1], str(tmp_path / "group")], options).run()
    assert [each.kind for each in summary.attempts] == ["killed", "done"]
    assert summary.attempts[1].start == 4
    ends = [Run(tmp_path / name).manifest(10).fingerprint for name in ("alone", "group")]
    assert ends[0] == ends[1]
    # Both workers' programs are there: JAX by itself keeps those of process 0.
    names = [path.name.split("-")[0] for path in (tmp_path / "cache").glob("jit__lambda*-cache")]
    assert len(names) == 2


def _clean() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "PERDURE_"))}


def test_a_process_that_is_alone_joins_nothing() -> None:
    assert isinstance(perdure.initialize_distributed("jax"), SingleProcess)
    assert isinstance(perdure.initialize_distributed("torch"), SingleProcess)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({"jax": True, "torch": True}, "found both"),
        ({"jax": False, "torch": False}, "found neither"),
    ],
)
def test_the_engine_is_named_where_it_cannot_be_seen(
    modules: dict[str, bool], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, there in modules.items():
        if there:
            monkeypatch.setitem(sys.modules, name, sys)
        else:
            monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ClusterError) as caught:
        perdure.initialize_distributed()
    assert message in str(caught.value)
    with pytest.raises(ClusterError, match="expected 'jax' or 'torch', found 'tensorflow'"):
        perdure.initialize_distributed("tensorflow")


def test_the_cache_is_set_only_where_it_changes_no_bits(tmp_path: Path) -> None:
    home = {"XDG_CACHE_HOME": str(tmp_path)}
    found = default_cache({**home, "JAX_PLATFORMS": "cpu"})
    assert found is not None
    assert found.parent == tmp_path / "perdure"
    assert default_cache({**home, "JAX_COMPILATION_CACHE_DIR": "/mine"}) is None
    assert default_cache({**home, "JAX_PLATFORMS": "cuda"}) is None


def test_what_a_kill_may_have_cut_off_is_not_kept(tmp_path: Path) -> None:
    for name, age in (("jit_f-1-cache", 600), ("jit_f-2-cache", 0), ("notes", 0)):
        (tmp_path / name).touch()
        when = (tmp_path / name).stat().st_mtime - age
        os.utime(tmp_path / name, (when, when))
    drop_recent(tmp_path, seconds=300)
    assert {path.name for path in tmp_path.iterdir()} == {"jit_f-1-cache", "notes"}
    drop_recent(tmp_path / "none")
