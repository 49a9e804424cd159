"""An object with `load_state_dict` receives the stored state, whatever a new object's state is."""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from perdure import CheckpointManager
from perdure.checkpoint import Checkpoint
from perdure.errors import MismatchError, StateError, UnsupportedLeafError
from perdure.state import flatten, restore, snapshot


class Holder:
    """An object whose state is the dict of its attributes."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).clear()
        vars(self).update(state)


class CatMetric(torch.nn.Module):
    """Like torchmetrics' `CatMetric`: a list of tensors, set by name."""

    def __init__(self) -> None:
        super().__init__()
        self.value: list[torch.Tensor] = []

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}value"] = [v if keep_vars else v.detach() for v in self.value]

    def _load_from_state_dict(self, *args: Any) -> None:  # type: ignore[override]
        state, prefix = args[:2]
        self.value = state.pop(f"{prefix}value")
        super()._load_from_state_dict(*args)


class Loader:
    """Like torchdata's loader: a state exists after the first call of state_dict, and grows."""

    def __init__(self) -> None:
        self.iterator: dict[str, Any] | None = None
        self.next: dict[str, Any] | None = None

    def step(self) -> None:
        state = self.state_dict()
        state["_num_yielded"] += 1
        state["fetcher_state"] = {
            "buffer": [*(state["fetcher_state"] or {"buffer": []})["buffer"], 1]
        }
        self.iterator = state

    def state_dict(self) -> dict[str, Any]:
        if self.iterator is None:
            self.iterator = self.next or {"_num_yielded": 0, "fetcher_state": None, "_workers": {}}
        return dict(self.iterator)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.iterator, self.next = None, state


def bits(state: Any) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {p: (leaf.dtype, leaf.shape, bytes(leaf.data)) for p, leaf in flatten(state).items()}


def scaler(scale: float, updates: int) -> Any:
    made = torch.amp.GradScaler("cpu", init_scale=scale)  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD([parameter := torch.nn.Parameter(torch.ones(1))], lr=0.1)
    for _ in range(updates):
        made.scale(parameter.sum()).backward()
        made.step(optimizer)
        made.update()
    return made


def averaged(k: int) -> Any:
    torch.manual_seed(k)
    model = torch.nn.Linear(2, 2)
    average = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(k):
        average.update_parameters(model)
    return average


def metric(k: int) -> Any:
    made = CatMetric()
    made.value = [torch.full((2,), float(i)) for i in range(k)]
    return made


def loader(k: int) -> Any:
    made = Loader()
    for _ in range(k):
        made.step()
    return made


def fit_loop(k: int) -> Any:
    """A state as Lightning's loops return it."""
    progress = {"total": {"ready": k, "completed": k}, "current": {"ready": k}}
    done = {"epoch_loop.val_loop": {}, "batches": [progress] * k, "is_last_batch": k > 1}
    return Holder(state_dict_={}, **{"epoch_loop.state_dict": done, "epoch_progress": progress})


PAIRS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "scaler_int_then_float": lambda: (scaler(1024, 3), scaler(1024, 0)),
    "averaged_model": lambda: (averaged(3), averaged(0)),
    "growing_lists": lambda: (
        Holder(history=[0.5, None, "x"], top_k={"b": 1, "a": [2]}),
        Holder(history=[], top_k={}),
    ),
    "shrinking_lists": lambda: (Holder(history=[], top_k={}), Holder(history=[1], top_k={"a": 1})),
    "best_none": lambda: (Holder(best=0.25), Holder(best=None)),
    "best_number": lambda: (Holder(best=None), Holder(best=0.25)),
    "a_number_becomes_text": lambda: (Holder(a="x", b=1, c=True), Holder(a=1, b=2.5, c=None)),
    "arrays_of_other_shapes": lambda: (
        Holder(a=np.arange(3), b=torch.ones(2, dtype=torch.bfloat16), c=jnp.ones(2)),
        Holder(a=np.zeros((2, 2), np.int8), b=torch.zeros(5), c=jnp.zeros(7)),
    ),
    "an_array_of_another_library": lambda: (Holder(a=np.ones(2)), Holder(a=torch.zeros(2))),
    "missing_and_more": lambda: (Holder(a=1, b=[2]), Holder(c=[3], a=2)),
    "cat_metric": lambda: (metric(3), metric(0)),
    "cat_metric_emptied": lambda: (metric(0), metric(2)),
    "metric_in_a_module": lambda: (
        torch.nn.ModuleDict({"m": metric(2), "l": averaged(1)}),
        torch.nn.ModuleDict({"m": metric(0), "l": averaged(0)}),
    ),
    "loader": lambda: (loader(3), loader(0)),
    "fit_loop": lambda: (fit_loop(2), fit_loop(0)),
    "nested": lambda: (Holder(inner=metric(2), n=[1]), Holder(inner=metric(0), n=[])),
}


@pytest.mark.parametrize("name", PAIRS)
def test_an_object_receives_the_stored_state(name: str) -> None:
    old, new = PAIRS[name]()
    saved = snapshot({"object": old})
    assert bits({"object": new}) != bits({"object": old}), "the control: they differ before"
    assert restore({"object": new}, saved)["object"] is new
    assert bits({"object": new}) == bits({"object": old})
    assert flatten({"object": new}).containers == saved.containers


def test_a_number_that_the_object_returns_as_another_type_of_number_is_accepted() -> None:
    old, new = scaler(1024, 0), scaler(2.0, 2)
    restore(new, snapshot(old))
    assert (old.state_dict()["scale"], new.state_dict()["scale"]) == (1024, 1024.0)


KINDS: dict[str, Any] = {
    "integer keys": {3: "x", 1: (2, 3), "s": ()},
    "order of keys": {"b": 1, "a": 2},
    "keys of digits": {"0": 1, "1": 2},
    "odd keys": {"a/b": 1, "a%2Fb": {"%": [1]}, "ü ": 2, -1: 3},
    "OrderedDict": collections.OrderedDict(z=1, a=2),
    "defaultdict": collections.defaultdict(list, {"q": [1]}),
    "no factory": collections.defaultdict(None, {"q": 1}),
    "Counter": collections.Counter([5, 5, 7]),
    "any keys": {(1, 2): 3, "a": {True: [(None,)], 1.5: collections.Counter({(0,): 2})}},
    "a number and its text": {1: 2, "1": [3]},
    "keys of a form": {"!listed": [1], "in": {"!listed": 2, "in": "range"}},
    "deque": collections.deque([1, 2], maxlen=5),
    "endless deque": collections.deque([[]]),
    "set": {3, 1, "a", None},
    "frozenset": frozenset("ab"),
    "Size": torch.Size([2, 3]),
    "empties": [{}, [], (), set(), "", b"", [[]]],
    "Parameter": [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.ones(1), False)],
    "requires_grad": (torch.zeros(2, requires_grad=True), torch.zeros(2)),
    "numpy": [
        np.arange(3),
        np.arange(3, dtype=">i4"),
        np.float32(3),
        np.array(2.0),
        np.zeros((0, 2)),
    ],
    "jax": [jnp.ones(2), jax.random.key(3), jnp.zeros((0,), jnp.bfloat16)],
    "mixed arrays": {"n": np.ones(1), "t": torch.ones(1), "j": jnp.ones(1)},
    "large integer": [2**80, {2**70: 1}],
}


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple, collections.deque)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.requires_grad == other.requires_grad
    if isinstance(one, (np.ndarray, np.generic, jax.Array)):
        return bits(one) == bits(other) and one.dtype == other.dtype
    return one == other


@pytest.mark.parametrize("fresh", [{}, {"value": None}, {"value": [1]}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_container_is_restored_with_its_type(kind: str, fresh: dict[str, Any]) -> None:
    new = Holder(**fresh)
    restore({"o": new}, snapshot({"o": Holder(value=KINDS[kind])}))
    assert same(new.value, KINDS[kind])
    for name in ("default_factory", "maxlen"):
        assert getattr(new.value, name, 0) == getattr(KINDS[kind], name, 0)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (object(), r"o/value: a value of type builtins\.object has no exact form"),
        ({frozenset({1})}, "o/value: a set of values other than Python scalars"),
    ],
)
def test_a_container_that_cannot_be_rebuilt_is_refused_at_the_save(value: Any, why: str) -> None:
    with pytest.raises(UnsupportedLeafError, match=why):
        flatten({"o": Holder(value=value)})


def test_outside_objects_the_structure_of_the_target_is_strict() -> None:
    for like, saved in (({"a": []}, {"a": [1]}), ({"a": {}}, {"a": {"b": 1}}), ({}, {"a": 1})):
        with pytest.raises(MismatchError, match="the target no such leaf"):
            restore(like, snapshot(saved))


@pytest.mark.parametrize(
    ("like", "saved"), [(None, 0.25), (1, 2.5), (0.5, None), ("x", 3), (True, b"\0")]
)
def test_a_python_scalar_may_change_its_type(like: Any, saved: Any) -> None:
    restored = restore({"best": like}, snapshot({"best": saved}))
    assert type(restored["best"]) is type(saved)
    assert restored["best"] == saved


def test_live_objects_in_the_state_of_an_object_are_restored_in_place() -> None:
    def make(k: int) -> Any:
        params = {"w": jnp.full(2, float(k))}
        model = averaged(k)
        return Holder(model=model, opt=optax.adam(1e-3).init(params), params=params, log=[k] * k)

    old, new = make(3), make(0)
    model = new.model
    restore({"trainer": new}, snapshot({"trainer": old}))
    assert new.model is model
    assert type(new.opt[0]).__name__ == "ScaleByAdamState"
    assert bits(new) == bits(old)
    with pytest.raises(MismatchError, match=r"t/model: the state that was stored has a .*Averaged"):
        restore({"t": Holder(model=None)}, snapshot({"t": old}))
    other = make(1)
    other.opt = optax.adam(1e-3).init({"w": jnp.zeros(3)})  # a named tuple is plain data
    restore({"t": other}, snapshot({"t": old}))
    assert bits(other) == bits(old)


class Failing(Holder):
    """An object whose `load_state_dict` fails after half of the work."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.a = state["a"]
        if state["fail"] and not getattr(self, "mended", False):
            raise KeyError("missing")
        super().load_state_dict(state)


class Forgetful(Holder):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({**state, "a": state["a"] + 1})


def members(k: int, last: Any) -> dict[str, Any]:
    """Members of all kinds, with the one that fails at the end or at the start."""
    torch.manual_seed(k)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=k)
    model(torch.randn(3, 2)).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, k),
        "generator": torch.Generator().manual_seed(k),
        "numpy": np.random.default_rng(k),
        "holder": Holder(h=[k] * k, t=[torch.full((k,), k)]),
        "metric": metric(k),
        "zfailing": last(k),
    }


@pytest.mark.parametrize("name", ["zfailing", "a"])
def test_a_load_that_fails_changes_nothing(name: str) -> None:
    old = members(1, lambda k: Failing(a=k, fail=True))
    new = members(2, lambda k: Failing(a=k, fail=False))
    old[name], new[name] = old.pop("zfailing"), new.pop("zfailing")
    before, state = bits(new), new["optimizer"].state
    with pytest.raises(
        StateError, match=rf"^{name}: a .*Failing did not take .*KeyError"
    ) as caught:
        restore(new, snapshot(old))
    assert isinstance(caught.value.__cause__, KeyError)
    assert "Every object has the state that it had before" in str(caught.value)
    assert bits(new) == before
    assert new["optimizer"].state is state
    new[name].mended = True  # the control: without the fault everything is restored
    old[name].mended = True
    restore(new, snapshot(old))
    assert bits(new) == bits(old)


def test_an_object_that_returns_another_state_is_refused_and_reset() -> None:
    old, new = members(1, lambda k: Forgetful(a=k)), members(2, lambda k: Holder(a=k))
    new["zfailing"].__class__ = Forgetful
    before = bits({name: new[name] for name in new if name != "zfailing"})
    with pytest.raises(MismatchError, match="zfailing/a: stored int 1, the object has int 2"):
        restore(new, snapshot(old))
    assert bits({name: new[name] for name in new if name != "zfailing"}) == before


def test_an_object_that_cannot_be_reset_is_named() -> None:
    old, new = Failing(a=1, fail=True), Failing(a=2, fail=True)
    with pytest.raises(StateError, match="a mixture of old and new values: o"):
        restore({"o": new}, snapshot({"o": old}))


@pytest.mark.parametrize("make", [averaged, metric, lambda k: Holder(a=k)])
def test_an_object_at_two_paths_is_loaded_once(make: Callable[[int], Any]) -> None:
    old, new = make(3), make(2)
    before = bits(new)
    with pytest.raises(MismatchError, match="b: is one object with a in the target"):
        restore({"a": new, "b": new}, snapshot({"a": old, "b": make(1)}))
    assert bits(new) == before
    restore({"a": new, "b": new}, snapshot({"a": old, "b": old}))
    assert bits(new) == bits(old)


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["self"] = state
    with pytest.raises(UnsupportedLeafError, match="contains itself"):
        flatten({"o": Holder(x=state)})


def test_an_interrupted_restore_is_undone() -> None:
    class Interrupted(Holder):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyboardInterrupt

    new = Holder(a=1)
    with pytest.raises(KeyboardInterrupt):
        restore({"a": new, "b": Interrupted()}, snapshot({"a": Holder(a=[2]), "b": Holder(a=3)}))
    assert new.a == 1


@pytest.mark.parametrize("value", [torch.ones(3), 5, [1, [2]], None, {}], ids=str)
@pytest.mark.parametrize("fresh", [torch.zeros(1), None, {"a": 1}], ids=str)
def test_a_state_may_be_any_value(value: Any, fresh: Any) -> None:
    class Any_(Holder):
        def state_dict(self) -> Any:
            return self.x

        def load_state_dict(self, state: Any) -> None:
            self.x = state

    for path in ({"o": 0}, {}):
        old, new = Any_(x=value), Any_(x=fresh)
        restore({"o": new} if path else new, snapshot({"o": old} if path else old))
        assert same(new.x, value)
    inner, outer = Holder(a=[]), Holder(b=[])
    restore(
        {"o": Holder(inner=[inner], outer=outer)},
        snapshot({"o": Holder(inner=[Holder(a=[value])], outer=Holder(b=[value, 1]))}),
    )
    assert same(inner.a, [value])
    assert same(outer.b, [value, 1])


def test_a_mismatch_anywhere_is_found_before_any_load() -> None:
    calls = []

    class Counting(Holder):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            calls.append(state)

    with pytest.raises(MismatchError, match="x: expected"):
        restore({"o": Counting(), "x": np.zeros(2)}, snapshot({"o": Holder(), "x": np.zeros(3)}))
    assert not calls


def test_an_object_without_a_state_in_the_checkpoint_is_a_difference() -> None:
    with pytest.raises(MismatchError, match=r"o: expected the state of a .*Holder"):
        restore({"o": Holder(a=1), "x": 1}, snapshot({"x": 1}))


def test_the_members_of_a_checkpoint_object_are_strict() -> None:
    saved = snapshot(Checkpoint(model=torch.nn.Linear(2, 2), step=3, log=[1]))
    fresh = Checkpoint(model=torch.nn.Linear(2, 2), step=0, log=[0])
    restore(fresh, saved)
    assert (fresh.step, fresh.log) == (3, [1])
    with pytest.raises(MismatchError, match="log/0: the checkpoint has int"):
        restore(Checkpoint(model=torch.nn.Linear(2, 2), step=0), saved)


def test_a_long_list_of_differences_is_cut() -> None:
    def tree(n: int, prefix: str = "") -> dict[str, Any]:
        return {f"{prefix}p{i}": np.zeros(1) for i in range(n)}

    with pytest.raises(MismatchError) as caught:
        restore(tree(1000), snapshot(tree(1000, "x")))
    assert "differ in 2,000 leaves" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 23
    assert "and 1,980 more" in str(caught.value)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_different_prefix_is_one_line_for_each_side_and_a_rename(reverse: bool) -> None:
    plain = torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(500)])
    states: list[Any] = [{"model": plain}, {"model": torch.nn.Sequential(plain)}]
    if reverse:
        states.reverse()
    with pytest.raises(MismatchError) as caught:
        restore(states[0], snapshot(states[1]))
    text = str(caught.value)
    assert len(text.splitlines()) == 4
    assert "1,000 leaves that only the target has" in text
    assert "1,000 leaves that only the checkpoint has" in text
    assert "`rename={old: new}`" in text


class Transition(NamedTuple):
    reward: float


class Memory:
    """The replay memory of a tutorial: records of a class of its own in a list."""

    def __init__(self) -> None:
        self.records: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"records": self.records}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.records = state["records"]


def test_objects_that_no_fresh_target_can_rebuild_are_refused_at_the_first_save(
    tmp_path: Path,
) -> None:
    memory = Memory()
    with CheckpointManager(tmp_path, recipe={}) as manager:
        manager.restore_or_initialize({"memory": memory})
        memory.records += [Holder(n=1), Holder(n=2)]
        with pytest.raises(
            MismatchError, match=r"memory/records/0: would be saved as a .*Holder \(2 such values\)"
        ):
            manager.save(1, {"memory": memory})
        memory.records = [(1.0,)]
        manager.save(2, {"memory": memory})
        manager.wait_until_finished()
        memory.records.append(Holder(n=3))
        manager.save(3, {"memory": memory})
        with pytest.warns(UserWarning, match="step 3: the structure of the state has changed"):
            manager.wait_until_finished()


def test_objects_that_the_target_has_are_rebuilt(tmp_path: Path) -> None:
    memory, other = Memory(), Memory()
    memory.records, other.records = [Holder(n=1)], [Holder(n=2)]
    with CheckpointManager(tmp_path, recipe={}) as manager:
        manager.restore_or_initialize({"memory": memory})
        manager.save(1, {"memory": memory})
        manager.restore(like={"memory": other})
    assert other.records[0].n == 1
