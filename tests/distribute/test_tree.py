"""The reduction tree: one bracketing for every split; splits are contiguous and balanced."""

from __future__ import annotations

import itertools
import struct

import pytest

from perdure.distribute.reduction_tree import TreeNode, TreeSum, merge, partial_roots
from perdure.distribute.topology import bounds, split
from perdure.errors import TopologyError


def bracket(left: str, right: str) -> str:
    return f"({left}+{right})"


def one(leaves: int, parts: list[list[tuple[int, int]]]) -> str:
    """The bracketing if devices, then processes, then the group add their parts."""
    processes = []
    for devices in parts:
        nodes = []
        for start, stop in devices:
            reduce = TreeSum(leaves, bracket)
            for leaf in range(start, stop):
                reduce.push(TreeNode(0, leaf), str(leaf))
            nodes += reduce.roots()
        roots = merge(nodes, leaves, bracket)
        assert tuple(n for n, _ in roots) == partial_roots(devices[0][0], devices[-1][1], leaves)
        processes += roots
    ((node, text),) = merge(processes, leaves, bracket)
    assert node.span(leaves) == (0, leaves)
    return text


def test_the_bracketing_of_1_6_8_and_11_replicas() -> None:
    assert one(1, [[(0, 1)]]) == "0"
    assert one(8, [[(0, 8)]]) == "(((0+1)+(2+3))+((4+5)+(6+7)))"
    assert one(6, [[(0, 6)]]) == "(((0+1)+(2+3))+(4+5))"
    assert one(11, [[(0, 11)]]) == "((((0+1)+(2+3))+((4+5)+(6+7)))+((8+9)+10))"


@pytest.mark.parametrize("leaves", range(1, 18))
def test_any_devices_and_processes_give_one_bracketing(leaves: int) -> None:
    alone = one(leaves, [[(0, leaves)]])
    for devices in range(1, leaves + 1):
        assert one(leaves, [list(bounds(leaves, devices))]) == alone
        assert one(leaves, [[part] for part in bounds(leaves, devices)]) == alone
        for first in range(1, devices):
            parts = split(leaves, (first, devices - first))
            assert one(leaves, [list(part) for part in parts]) == alone


def test_any_contiguous_split_gives_one_bracketing() -> None:
    alone = one(9, [[(0, 9)]])
    for cuts in itertools.chain.from_iterable(
        itertools.combinations(range(1, 9), count) for count in range(9)
    ):
        edges = [0, *cuts, 9]
        assert one(9, [[part] for part in itertools.pairwise(edges)]) == alone


def test_control_adding_in_a_row_is_another_bracketing() -> None:
    row = ["".join(map(str, range(a, b))) for a, b in bounds(8, 2)]
    assert bracket(*row) != one(8, [list(bounds(8, 2))])
    text = "0"
    for leaf in range(1, 8):
        text = bracket(text, str(leaf))
    assert text != one(8, [[(0, 8)]])


@pytest.mark.parametrize("leaves", [1, 2, 7, 8, 64, 100, 1023])
def test_a_device_holds_log2_v_plus_1_partial_sums(leaves: int) -> None:
    reduce = TreeSum(leaves, lambda a, b: a + b)
    most = 0
    for leaf in range(leaves):
        reduce.push(TreeNode(0, leaf), 1)
        most = max(most, len(reduce.roots()))
    assert reduce.roots()[0][1] == leaves
    assert most <= leaves.bit_length()


def test_a_node_without_a_sibling_is_promoted_unchanged() -> None:
    added: list[float] = []

    def add(a: float, b: float) -> float:
        added.extend((a, b))
        return a + b

    reduce = TreeSum(5, add)
    for leaf in range(5):
        reduce.push(TreeNode(0, leaf), -0.0)
    ((_, total),) = reduce.roots()
    assert struct.pack("d", total) == struct.pack("d", -0.0)
    assert len(added) == 2 * 4


def test_contributions_out_of_order_are_refused() -> None:
    reduce = TreeSum(8, bracket)
    reduce.push(TreeNode(0, 0), "0")
    with pytest.raises(TopologyError) as error:
        reduce.push(TreeNode(0, 2), "2")
    assert "expected the one that starts at leaf 1, found leaf 2" in str(error.value)
    with pytest.raises(TopologyError):
        TreeSum(8, bracket).push(TreeNode(0, 8), "8")


@pytest.mark.parametrize("replicas", range(1, 18))
def test_bounds_are_contiguous_and_balanced(replicas: int) -> None:
    for devices in range(1, replicas + 1):
        parts = bounds(replicas, devices)
        assert [part[0] for part in parts] == [0, *[part[1] for part in parts[:-1]]]
        assert parts[-1][1] == replicas
        sizes = {stop - start for start, stop in parts}
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= 1


def test_fewer_replicas_than_devices_are_refused() -> None:
    with pytest.raises(TopologyError) as error:
        bounds(3, 4)
    assert "3 logical replicas cannot occupy 4 devices" in str(error.value)
    assert "Use at most 3 devices, or replicas=4" in str(error.value)
    for devices in [(1, 0), ()]:
        with pytest.raises(TopologyError):
            split(4, devices)
