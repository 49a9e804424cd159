"""perdure.plugins.ray, with Ray played by a few lines: what each worker is told, and how a group ends.

Ray itself is tried by `make proof-drill`.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from perdure.distribute import Cluster, ClusterOptions, resolve
from perdure.errors import ClusterError

GROUP = Cluster("10.0.0.7:5000", 3, 2, source="Ray")


class RayError(Exception):
    pass


class Workers:
    """A worker group whose functions run at once, in this process; a future is a call and its end."""

    def __init__(self, count: int, dead: tuple[int, ...] = ()) -> None:
        self.count, self.dead = count, dead
        self.calls: list[tuple[int, Any, tuple[Any, ...]]] = []

    def __len__(self) -> int:
        return self.count

    def execute_single(self, index: int, fn: Any, *args: Any) -> Any:
        self.calls.append((index, fn, args))
        return fn(*args)

    def execute_single_async(self, index: int, fn: Any, *args: Any) -> Any:
        self.calls.append((index, fn, args))
        return index

    def execute_async(self, fn: Any) -> list[Any]:
        return [self.execute_single_async(index, fn) for index in range(self.count)]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What perdure.plugins.ray is made of, imported above the play of Ray."""
    played = ModuleType("ray")
    backend = ModuleType("ray.train.backend")
    backend.Backend = type("Backend", (), {})  # pyright: ignore[reportAttributeAccessIssue]
    backend.BackendConfig = type("BackendConfig", (), {})  # pyright: ignore[reportAttributeAccessIssue]
    played.util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")  # pyright: ignore[reportAttributeAccessIssue]
    played.exceptions = SimpleNamespace(RayError=RayError)  # pyright: ignore[reportAttributeAccessIssue]
    for name, each in (("ray", played), ("ray.train", ModuleType("ray.train"))):
        monkeypatch.setitem(sys.modules, name, each)
    monkeypatch.setitem(sys.modules, "ray.train.backend", backend)
    ours = ("perdure.plugins.ray", "perdure.distribute.jax.ray_backend")
    for name in ours:
        monkeypatch.delitem(sys.modules, name, raising=False)
    public = importlib.import_module("perdure.plugins.ray")
    found = importlib.import_module("perdure.distribute.jax.ray_backend")
    assert public.JaxConfig is found.JaxConfig
    yield found
    for name in ours:
        sys.modules.pop(name, None)


def test_every_worker_joins_one_group_on_a_port_of_its_own(module: Any) -> None:
    got: list[Any] = []
    module.ray.get = got.append
    config = module.JaxConfig(start_timeout=50, heartbeat=7)
    attempts = [Workers(3), Workers(3)]
    for workers in attempts:
        config.backend_cls().on_start(workers, config)
    assert got == [[0, 1, 2]] * 2  # all are waited for, and one that raises is raised here
    coordinators = []
    for workers in attempts:
        joining = [call for call in workers.calls if call[1] is module._join]
        clusters = [cluster for _, _, (cluster, _) in joining]
        assert [cluster.process_id for cluster in clusters] == [index for index, *_ in joining]
        assert {cluster.num_processes for cluster in clusters} == {3}
        [coordinator] = {cluster.coordinator for cluster in clusters}
        assert coordinator.startswith("127.0.0.1:")
        coordinators.append(coordinator)
        assert all(limits == config for _, _, (_, limits) in joining)
    assert config.to_dict() == {"start_timeout": 50, "heartbeat": 7}


def test_what_a_worker_is_told_makes_a_strategy_join_that_group(module: Any) -> None:
    environ: dict[str, str] = {}
    module.prepare(GROUP, 0, environ, plugin=False)
    assert environ.pop("JAX_PLATFORMS") == "cpu"
    found = resolve(environ=environ)
    assert (found.coordinator, found.num_processes, found.process_id) == ("10.0.0.7:5000", 3, 2)


def test_a_worker_with_a_gpu_never_falls_back_in_silence(module: Any) -> None:
    environ: dict[str, str] = {}
    module.prepare(GROUP, 1, environ, plugin=True)
    assert environ["JAX_PLATFORMS"] == "cuda,cpu"
    for chosen in ("rocm", "cpu"):  # what the user chose stays
        environ = {"JAX_PLATFORMS": chosen}
        module.prepare(GROUP, 1, environ, plugin=chosen == "rocm")
        assert environ["JAX_PLATFORMS"] == chosen
    with pytest.raises(ClusterError) as error:
        module.prepare(GROUP, 2, {}, plugin=False)
    assert (
        "Ray gave worker 2 2 GPU(s), and the JAX that is installed there knows the CPU alone"
        in (str(error.value))
    )


def test_a_dead_worker_does_not_keep_the_group_from_ending(module: Any) -> None:
    def get(future: int) -> None:
        if future == 1:
            raise RayError("the actor died")

    module.ray.get = get
    asked: list[Any] = []
    module.ray.wait = lambda futures, **limits: (asked.append(limits), (futures[:2], futures[2:]))[
        1
    ]
    config = module.JaxConfig()
    config.backend_cls().on_shutdown(Workers(3), config)
    assert asked == [{"num_returns": 3, "timeout": ClusterOptions().leave_timeout}]


def test_limits_that_are_none_are_refused(module: Any) -> None:
    with pytest.raises(ClusterError) as error:
        module.JaxConfig(heartbeat=0)
    assert "heartbeat: expected seconds above 0, found 0" in str(error.value)
