"""Which parameters of PyTorch modules are frozen (`requires_grad`), as a leaf beside the state.

A loop that unfreezes a layer in its second epoch would train with a frozen one after a resume.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from perdure.errors import CorruptionError
from perdure.state.leaf_values import plain_value, scalar_leaf
from perdure.state.live_objects import live_objects
from perdure.state.paths import join_dotted
from perdure.store.leaf import Leaf

_PATH = "torch/frozen"
_WRAPPERS = ("module", "_orig_mod")
_FEW = 5
_decoder = msgspec.json.Decoder(dict[str, list[str]])


def frozen_leaves(state: Any) -> dict[str, Leaf]:
    """The leaf with the names of the frozen parameters of each module; none without a module."""
    frozen = {
        path: sorted({_plain(name) for name, value in parameters if not value.requires_grad})
        for path, parameters in _modules(state)
    }
    if not frozen:
        return {}
    return {_PATH: scalar_leaf(msgspec.json.encode(frozen, order="sorted").decode())}


def restore_frozen(
    state: Any, process_leaves: Mapping[str, Leaf], renamed: Callable[[str], str], where: str
) -> list[str]:
    """Set `requires_grad` of the parameters of `state` as it was saved.

    Args:
        state: a state that was restored exactly.
        process_leaves: those of the checkpoint, perhaps without the leaf of `frozen_leaves`.
        renamed: gives the path in `state` for a path in the checkpoint.
        where: names the checkpoint in messages.

    Returns:
        At most one warning, which names the parameters that were set.
    """
    if (leaf := process_leaves.get(_PATH)) is None:
        return []
    try:
        stored = _decoder.decode(plain_value(leaf))
    except ValueError as error:  # of msgspec
        raise CorruptionError(f"{where}: {_PATH} cannot be read: {error}.") from error
    frozen = {renamed(path): set(names) for path, names in stored.items()}
    changed: dict[str, bool] = {}
    for path, parameters in _modules(state):
        if path not in frozen:
            continue
        for name, value in parameters:
            is_trained = _plain(name) not in frozen[path]
            if value.requires_grad != is_trained and value.is_leaf:
                value.requires_grad_(is_trained)
                changed[join_dotted(path, _plain(name))] = is_trained
    if not changed:
        return []
    names = [f"{path} to {is_trained}" for path, is_trained in changed.items()]
    more = f" and {len(names) - _FEW:,} more" if len(names) > _FEW else ""
    warning = (
        f"{where}: the program has frozen other parameters than the checkpoint. `requires_grad` is set "
        f"as it was saved: {', '.join(names[:_FEW])}{more}. To train from here with others, set it "
        f"after the restore."
    )
    return [warning]


def _modules(state: Any) -> Iterator[tuple[str, Iterable[tuple[str, Any]]]]:
    """The path of each module of PyTorch, and its parameters by name."""
    if (torch := sys.modules.get("torch")) is None:
        return
    for path, value in live_objects(state):
        if isinstance(value, torch.nn.Module):
            yield path, value.named_parameters(remove_duplicate=False)


def _plain(name: str) -> str:
    """The name of a parameter without the parts of wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
