"""Values of one type are looked at in few calls, with the leaves of one value after another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from call_counts import calls
from perdure.errors import UnsupportedLeafError
from perdure.state import StateWithExtras, flatten
from perdure.state.builtin import Builtin
from perdure.state.walk import Template, differences, template_of

COUNT = 1000
OTHERS: dict[str, Any] = {
    "none of the built-in dtypes": np.arange(3, dtype=">f4"),
    "no bytes": np.empty((0, 3), np.float32),
    "shared": np.arange(1000.0),
    "another order": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "every second": np.arange(9)[::2],
    "no axis": np.array(3, np.int8),
    "scalar": np.float32(7),
    "number": 5,
    "below": {"a": np.ones(2), "b/c": [np.zeros(3), "text"]},
    "masked": np.ma.masked_array([1, 2], [True, False]),
}


def many(*others: str) -> dict[str, Any]:
    """Small arrays, with others at the end of the first block, in the next one, and at the end."""
    source = np.random.default_rng(1)
    state = {f"w{n}": source.random(n % 7 + 1, np.float32) for n in range(COUNT)}
    items = list(state.items())
    for place, name in zip((127, 200, COUNT), others, strict=False):
        items.insert(place, (name, OTHERS[name]))
    return dict(items)


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for verb in ("specs", "leaves"):
        monkeypatch.setattr(Builtin, verb, lambda *_: None)


def rows(state: Any) -> list[tuple[Any, ...]]:
    return [
        (path, leaf.dtype, leaf.shape, bytes(leaf.data), leaf.frozen)
        for path, leaf in flatten({"model": state, "step": 3}).items()
    ]


def spec_rows(template: Template) -> list[tuple[Any, ...]]:
    return [(path, spec.dtype, spec.shape) for path, spec in template.leaves.items()]


@pytest.mark.parametrize("names", [(name, "number") for name in OTHERS] + [()])
def test_the_leaves_are_those_of_each_value(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = many(*names)
    together, specs = rows(state), spec_rows(template_of(state))
    assert not differences(template_of(state), flatten(state))
    one_by_one(monkeypatch)
    assert rows(state) == together
    assert spec_rows(template_of(state)) == specs


def test_a_wrong_leaf_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above, and of the comparison of a state with its leaves."""
    state, leaves = many(), Builtin.leaves
    expected = rows(state)
    monkeypatch.setattr(Builtin, "leaves", lambda self, values: leaves(self, values[::-1]))
    assert rows(state) != expected
    assert differences(template_of(state), flatten(state))


def test_a_path_that_there_is_twice_is_refused_in_any_block() -> None:
    extras = {f"e{n}": np.ones(2) for n in range(300)}
    assert len(flatten(StateWithExtras(many(), extras))) == COUNT + 300  # control
    with pytest.raises(UnsupportedLeafError, match=r"two leaves have the path 'w500'"):
        flatten(StateWithExtras(many(), {**extras, "w500": np.ones(2)}))
    bad = {**many(), "\udcff": np.ones(2)}
    for look in (flatten, template_of):
        with pytest.raises(UnsupportedLeafError, match="not valid Unicode"):
            look({"model": bad})


def test_most_arrays_take_one_call_of_python_each(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"w{n}": np.ones(4, np.float32) for n in range(10 * COUNT)}
    leaves = flatten(state)
    looks = [lambda: flatten(state), lambda: differences(template_of(state), leaves)]
    together = [calls(look) / len(state) for look in looks]
    assert max(together) < 1.5
    one_by_one(monkeypatch)
    assert min(calls(look) / len(state) for look in looks) > 3  # negative control
