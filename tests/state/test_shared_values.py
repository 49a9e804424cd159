"""What members of a state share before a save, they share after the restore."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from perdure import CheckpointManager, MemoryStorage
from perdure.errors import UnsupportedLeafError
from perdure.state import snapshot

State = dict[str, Any]


@dataclass
class Episode:
    rewards: list[float] = field(default_factory=list)


class Memory:
    """A replay buffer of the program's own class, with a `state_dict`."""

    def __init__(self) -> None:
        self.items: deque[Any] = deque(maxlen=3)
        self.newest: Any = None

    def state_dict(self) -> State:
        return {"items": self.items, "newest": self.newest}

    def load_state_dict(self, state: State) -> None:
        self.items, self.newest = state["items"], state["newest"]


def fresh() -> State:
    state = {"replay": [], "elites": deque(), "best": None, "weights": np.zeros(2), "index": {}}
    return state | {"memory": Memory()}


def change(state: State, step: int) -> None:
    """Values that are in two grown members are changed in place through one of them."""
    entry: Any = {"seen": np.full(2, float(step)), "visits": [0], "episode": Episode()}
    state["replay"].append(entry)
    state["index"][f"step{step}"] = entry["seen"]
    if step % 2:
        state["elites"].append(entry)
        state["best"] = (entry["visits"], state["weights"])
        state["memory"].items.append(entry)
        state["memory"].newest = entry["seen"]
    for each in state["elites"]:
        each["seen"] += 1 / (step + 1)
        each["visits"].append(step)
        each["episode"].rewards.append(step / 3)
    state["weights"] += step
    state["memory"].newest -= step
    state["best"][0][0] += 1


def run(where: MemoryStorage, stop: int) -> tuple[dict[str, bytes], State]:
    with CheckpointManager(where, recipe={}) as manager:
        state, start = manager.restore_or_initialize(fresh())
        for step in range(start, stop):
            change(state, step + 1)
            manager.save(step + 1, state)
    return {path: bytes(leaf.data) for path, leaf in snapshot(state).items()}, state


@pytest.mark.parametrize("stop", [1, 3, 4])
def test_values_in_several_grown_members_stay_one(stop: int) -> None:
    whole, _ = run(MemoryStorage(), 7)
    run(where := MemoryStorage(), stop)
    again, state = run(where, 7)
    assert again == whole
    assert state["elites"][0] is state["replay"][0]
    assert state["index"]["step1"] is state["replay"][0]["seen"]
    assert state["best"][1] is state["weights"]
    assert state["memory"].items[-1]["seen"] is state["memory"].newest


def test_a_grown_member_gets_the_placed_arrays_of_the_target() -> None:
    """In whatever order the target has them: only its own value says the devices of arrays."""
    device = jax.devices()[-1]

    def init() -> State:
        return {"history": [], "params": {"w": jax.device_put(jnp.zeros(2), device)}}

    with CheckpointManager(where := MemoryStorage(), recipe={}) as manager:
        state, _ = manager.restore_or_initialize(init())
        state["params"] = {"w": state["params"]["w"] + 1}
        state["history"].append(state["params"])
        manager.save(1, state)
    with CheckpointManager(where, recipe={}) as manager:
        state, _ = manager.restore_or_initialize(init())
    assert state["history"][0] is state["params"]
    assert state["params"]["w"].committed


def test_a_restore_of_a_part_shares_nothing() -> None:
    run(where := MemoryStorage(), 3)
    like = fresh() | {"weights": np.full(2, 7.0)}
    with CheckpointManager(where, recipe={}) as manager:
        state, _ = manager.restore(like=like, leaves=["best", "replay"])
    assert state["weights"] is like["weights"]
    assert state["best"][1].tolist() == [6.0, 6.0]


def test_values_that_have_a_part_at_their_own_path_are_shared() -> None:
    def fresh() -> State:
        octets = bytearray(b"ab")
        return {"one": octets, "other": octets, "grown": [], "more": None}

    with CheckpointManager(where := MemoryStorage(), recipe={}) as manager:
        state, _ = manager.restore_or_initialize(fresh())
        state["grown"].append(bytearray(b"c"))
        state["more"] = state["grown"][0]
        manager.save(1, state)
    with CheckpointManager(where, recipe={}) as manager:
        state, _ = manager.restore_or_initialize(fresh())
    assert state["one"] is state["other"]
    assert state["more"] is state["grown"][0]


@pytest.mark.parametrize("make", [np.zeros, torch.zeros])
def test_two_arrays_that_share_elements_are_refused_and_parts_of_one_are_not(make: Any) -> None:
    whole = make(6)
    with CheckpointManager(MemoryStorage()) as manager:
        with pytest.raises(UnsupportedLeafError, match="whole and part share memory"):
            manager.save(1, {"whole": whole, "part": whole[1:3]})
        manager.save(1, {"first": whole[:3], "rest": whole[3:]})
        manager.save(2, {"whole": whole, "again": whole})


def test_the_best_weights_without_a_copy_are_refused() -> None:
    net = torch.nn.Linear(2, 2)
    with CheckpointManager(MemoryStorage()) as manager:
        with pytest.raises(UnsupportedLeafError, match="share memory"):
            manager.save(1, {"net": net, "best": net.state_dict()})
        best = {name: value.clone() for name, value in net.state_dict().items()}
        manager.save(1, {"net": net, "best": best})


def test_an_array_of_numpy_and_a_tensor_on_it_are_refused() -> None:
    array = np.zeros(3, np.float32)
    with CheckpointManager(MemoryStorage()) as manager:
        with pytest.raises(UnsupportedLeafError, match="array and tensor share memory"):
            manager.save(1, {"array": array, "tensor": torch.from_numpy(array)})
        manager.save(1, {"array": array, "tensor": torch.from_numpy(array.copy())})


def optimizers(share: bool) -> tuple[list[Any], torch.Tensor]:
    weight = torch.ones(2, requires_grad=True)
    one, other = (torch.optim.SGD([weight], lr=0.1, momentum=0.9) for _ in range(2))
    if share:
        other.state = one.state
    return [one, other], weight


def test_optimizers_with_one_dict_of_states_have_one_after_a_restore() -> None:
    def train(storage: MemoryStorage, stop: int) -> list[float]:
        (one, other), weight = optimizers(share=True)
        state = {"one": one, "other": other, "weight": weight}
        with CheckpointManager(storage) as manager:
            for step in range(manager.restore_or_initialize(state).step, stop):
                weight.grad = torch.full((2,), 0.3)
                (one, other)[step % 2].step()
                manager.save(step + 1, state)
        assert one.state is other.state
        return weight.tolist()

    train(interrupted := MemoryStorage(), 1)
    assert train(interrupted, 4) == train(MemoryStorage(), 4)


def test_optimizers_that_share_tensors_of_their_states_are_refused_and_copies_are_not() -> None:
    (one, other), weight = optimizers(share=False)
    weight.grad = torch.ones(2)
    one.step()
    other.load_state_dict(one.state_dict())
    state = {"one": one, "other": other, "weight": weight}
    with CheckpointManager(MemoryStorage()) as manager:
        with pytest.raises(
            UnsupportedLeafError, match="one and other have a tensor of their state"
        ):
            manager.save(1, state)
        other.load_state_dict(copy.deepcopy(one.state_dict()))
        manager.save(1, state)


class Holder(torch.nn.Module):
    """Each attribute of a group begins as one array."""

    counted: torch.Tensor
    hidden: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counted", torch.zeros(2))
        self.inner: Any = torch.nn.Identity()
        self.first = self.second = self.inner.third = torch.zeros(2)
        self.of_numpy = self.other = np.zeros(2)
        self.listed = [one := torch.zeros(2), one]
        self.named = dict.fromkeys("ab", torch.zeros(2))
        self.fields = SimpleNamespace(a=one, b=torch.zeros(2))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.register_buffer("seen", self.hidden, persistent=False)
        self.shown = self.counted
        self.both = torch.zeros(2)
        self.together = {"x": self.both, "y": [self.both]}

    def learn(self) -> None:
        self.first = torch.ones(2)
        self.other = np.ones(2)
        self.listed[0] = self.named["a"] = torch.full((2,), 2.0)
        self.fields.b = self.fields.a
        self.seen = torch.full((2,), 3.0)
        self.shown = self.counted + 4
        self.both += 5

    def look(self) -> list[Any]:
        arrays = [self.first, self.second, self.inner.third, self.of_numpy, self.other]
        arrays += [*self.listed, *self.named.values(), self.fields.a, self.fields.b]
        arrays += [self.hidden, self.seen, self.counted, self.shown]
        arrays += [self.both, self.together["x"], self.together["y"][0]]
        return [(each.tolist(), [each is other for other in arrays]) for each in arrays]


def test_what_is_one_array_only_at_the_start_is_several_after_a_restore() -> None:
    storage, found = MemoryStorage(), []
    for number in range(2):
        holder = Holder()
        outside = holder.both
        with CheckpointManager(storage) as manager:
            assert manager.restore_or_initialize({"holder": holder}).step == number
            if not number:
                holder.learn()
                manager.save(1, {"holder": holder})
        found.append(holder.look())
        assert outside is holder.both, "all that have it have changed together"
    assert found[0] == found[1]


class Env:
    def __init__(self, make: Any) -> None:
        self.x = make(0)


class Agent:
    def __init__(self, env: Env) -> None:
        self.env, self.state = env, env.x
        self.replay: deque[Any] = deque(maxlen=9)


class World(torch.nn.Module):
    """The path of the agent is before that of its environment in the order of paths."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.env = Env(make)
        self.agent = Agent(self.env)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("kind", [np, torch])
def test_an_array_that_two_objects_share_is_one_after_a_restore(kind: Any, keeps: bool) -> None:
    def make(value: int) -> Any:
        return kind.ones(2) * value

    storage, found = MemoryStorage(), []
    for number in range(2):
        world = World(make)
        agent = world.agent
        with CheckpointManager(storage) as manager:
            assert manager.restore_or_initialize({"world": world}).step == number
            if not number:
                for step in range(1, 4):
                    agent.env.x = make(step)
                    if keeps:
                        agent.replay.append((agent.state,))
                    agent.state = agent.env.x
                manager.save(1, {"world": world})
        assert agent.env is world.env
        assert agent.state is world.env.x
        found.append([agent.state.tolist(), [part.tolist() for (part,) in agent.replay]])
    assert found[0] == found[1]
