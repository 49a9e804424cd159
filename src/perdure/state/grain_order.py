"""What decides the order of the elements of a Grain `MapDataset` or `IterDataset`: seeds and lengths.

Grain stores only an index in the position of such an iterator, which fits any dataset.
"""

from __future__ import annotations

import sys
from typing import Any

from perdure.errors import StateError

_PARENTS = ("_map_parent", "_iter_parent", "_maybe_nonnative_parent")
_SEEDS = ("_seed_rng_seed", "_seed")

Order = dict[str, list[int]]
"""The seeds and the lengths of the datasets below an iterator."""


def order_of(iterator: Any) -> Order | None:
    """The seeds and lengths below an iterator of Grain; None for any other. Does not import Grain.

    Grain has no public names for them. What a release does not have under these names is left out.
    """
    grain = sys.modules.get("grain")
    if grain is None or not isinstance(iterator, getattr(grain, "DatasetIterator", ())):
        return None
    order: Order = {"seeds": [], "lengths": []}
    pending, seen = [iterator], set[int]()
    while pending:
        node = pending.pop(0)
        if id(node) in seen:
            continue
        seen.add(id(node))
        seeds: list[Any] = [getattr(node, name, None) for name in _SEEDS]
        order["seeds"] += [int(seed) for seed in seeds if hasattr(seed, "__index__")]
        if isinstance(node, grain.MapDataset) and [len(node)] != order["lengths"][-1:]:
            order["lengths"].append(len(node))  # a transformation that keeps the length adds none
        pending += getattr(node, "_parents", ())
        pending += [getattr(node, name) for name in _PARENTS if hasattr(node, name)]
    return order


def require_same_order(saved: Order, iterator: Any) -> None:
    """Raise `StateError` if the datasets below `iterator` have other seeds or lengths."""
    present = order_of(iterator) or {}
    for name, expected in saved.items():
        found = present.get(name)
        if expected and found and found != expected:
            raise StateError(
                f"the {name} of the Grain datasets are not those that this iterator was saved with: "
                f"expected {expected}, found {found}, from the iterator to its source. Its position "
                f"would be that of other elements. Create it with the same source, seed, batch size "
                f"and other transformations, or restore the other members only (`leaves`)."
            )
