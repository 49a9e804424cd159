"""The reduction tree, a pure function of the number of leaves.

Over V leaves there is one binary tree. A node is (level, number) and covers the leaves [number *
2**level, (number + 1) * 2**level) below V. A node whose sibling would lie beyond V is promoted as
it is. Zeros are never added: -0.0 + 0.0 loses the sign.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from perdure.errors import TopologyError

T = TypeVar("T")


class TreeNode(NamedTuple):
    """A node of the tree. Leaves have level 0."""

    level: int
    number: int

    def span(self, leaves: int) -> tuple[int, int]:
        """The leaves below this node, as a half-open range."""
        return self.number << self.level, min((self.number + 1) << self.level, leaves)


class TreeSum(Generic[T]):
    """Adds contributions in the order of the leaves, siblings at once: log2(V) + 1 sums are alive."""

    def __init__(self, leaves: int, add: Callable[[T, T], T]) -> None:
        if leaves < 1:
            raise TopologyError(f"a reduction: expected at least 1 leaf, found {leaves}")
        self._leaves = leaves
        self._add = add
        self._stack: list[tuple[TreeNode, T]] = []
        self._end = 0  # the leaf where the next one has to start, unless it is the first

    def push(self, node: TreeNode, value: T) -> None:
        """Add the sum under `node`, which must start where the previous one ended."""
        start, stop = node.span(self._leaves)
        if not 0 <= start < stop:
            raise TopologyError(f"{node} lies outside a tree of {self._leaves} leaves")
        if self._stack and self._end != start:
            raise TopologyError(
                f"contributions out of order: expected the one that starts at leaf {self._end}, found "
                f"leaf {start}"
            )
        self._stack.append((node, value))
        self._end = stop
        self._settle()

    def roots(self) -> list[tuple[TreeNode, T]]:
        """The partial sums that are left: one when the whole tree was pushed."""
        return list(self._stack)

    def _settle(self) -> None:
        stack = self._stack
        while True:
            (level, number), value = stack[-1]
            if number % 2:
                # A right child: it merges if its left sibling is the whole entry below it.
                if len(stack) < 2 or stack[-2][0] != (level, number - 1):
                    return
                stack.pop()
                _, left = stack.pop()
                value = self._add(left, value)
            elif (number + 1) << level < self._leaves or (1 << level) >= self._leaves:
                return  # it waits for its sibling, or it is the root
            else:
                stack.pop()
            stack.append((TreeNode(level + 1, number >> 1), value))


def merge(
    nodes: Iterable[tuple[TreeNode, T]], leaves: int, add: Callable[[T, T], T]
) -> list[tuple[TreeNode, T]]:
    """Partial sums over adjacent ranges in any order, added as far as the tree allows."""
    reduce = TreeSum(leaves, add)
    for node, value in sorted(nodes, key=lambda item: item[0].span(leaves)[0]):
        reduce.push(node, value)
    return reduce.roots()


def partial_roots(start: int, stop: int, leaves: int) -> tuple[TreeNode, ...]:
    """The nodes with which the range [start, stop) of the leaves ends; at most 2 log2(V)."""
    reduce: TreeSum[None] = TreeSum(leaves, lambda _left, _right: None)
    for leaf in range(start, stop):
        reduce.push(TreeNode(0, leaf), None)
    return tuple(node for node, _ in reduce.roots())
