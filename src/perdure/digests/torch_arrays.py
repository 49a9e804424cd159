"""Digests of PyTorch tensors on accelerators, and of `DTensor`s, of which each process has a shard."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed

from perdure.digests.digest import ArrayTaker, LeafSums
from perdure.digests.memory_sums import LANES, lane_keys, row_keys, sums_by_slabs
from perdure.state.torch_state import ADAPTER
from perdure.state.torch_tensors import has_all_elements, is_dtensor, local_tensor, region
from perdure.store.shard_plan import Region

PIECE_ROWS = 128
"""Rows of 128 KiB that are multiplied at a time; the products take twice as much memory."""


class TorchTaker(ArrayTaker):
    """Takes tensors of other devices than the CPU, and sharded `DTensor`s."""

    def __init__(self) -> None:
        self._sums: list[torch.Tensor] = []
        self._received: list[np.ndarray[Any, np.dtype[np.uint64]]] = []
        self._sharded: dict[tuple[Any, tuple[int, ...]], list[int]] = defaultdict(list)

    def take(self, value: Any) -> LeafSums | None:
        if not isinstance(value, torch.Tensor) or _is_in_memory(value):
            return None
        spec = ADAPTER.spec(value)
        assert spec is not None
        number = len(self._sums)
        indices = tuple((0, size) for size in value.shape)
        if is_dtensor(value) and not has_all_elements(value):
            indices = region(value)
            cuts = (
                axis
                for axis, placement in enumerate(value.placements)  # type: ignore[attr-defined]
                if not placement.is_replicate()
            )
            self._sharded[value.device_mesh, tuple(cuts)].append(number)  # type: ignore[attr-defined]
        self._sums.append(tensor_sums(local_tensor(value), indices, tuple(value.shape)))
        nbytes = value.numel() * value.element_size()
        return LeafSums(spec.dtype, spec.shape, nbytes, lambda: self._received[number])

    def finish(self) -> None:
        for (mesh, axes), members in self._sharded.items():
            sums = torch.stack([self._sums[number] for number in members])
            # Sums of halves of 32 bits cannot overflow, which no backend defines.
            halves = torch.stack([sums & 0xFFFFFFFF, (sums >> 32) & 0xFFFFFFFF])
            for axis in axes:
                torch.distributed.all_reduce(halves, group=mesh.get_group(axis))
            for number, total in zip(members, halves[0] + (halves[1] << 32), strict=True):
                self._sums[number] = total
        self._received = [sums.cpu().numpy().view(np.uint64) for sums in self._sums]


def tensor_sums(part: torch.Tensor, indices: Region, shape: tuple[int, ...]) -> torch.Tensor:
    """The sums of the elements at `indices`, `int64[2]` on the device: modulo 2**64 as in `uint64`."""
    if not part.numel():
        return torch.zeros(2, dtype=torch.int64, device=part.device)
    plain = part.detach().resolve_conj().resolve_neg().contiguous()
    octets = plain.unsqueeze(-1).view(torch.uint8)
    itemsize = octets.shape[-1]
    return sums_by_slabs(
        octets, (*indices, (0, itemsize)), (*shape, itemsize), 1, _contiguous_sums, octets.new_zeros
    )


def _contiguous_sums(octets: torch.Tensor, offset: int) -> torch.Tensor:
    flat = octets.reshape(-1)
    before = offset % 8
    after = -(before + flat.numel()) % 8
    if before or after or flat.data_ptr() % 8:
        padded = flat.new_zeros(before + flat.numel() + after)
        padded[before : before + flat.numel()] = flat
        flat = padded
    total = torch.zeros(2, dtype=torch.int64, device=flat.device)
    position = offset // 8
    while flat.numel():
        row, lane = divmod(position, LANES)
        count = min(LANES - lane, flat.numel() // 8)
        if not lane:
            count = max(count, min(PIECE_ROWS, flat.numel() // 8 // LANES) * LANES)
        total += _piece_sums(flat[: 8 * count], row, lane)
        flat, position = flat[8 * count :], position + count
    return total


def _piece_sums(octets: torch.Tensor, row: int, lane: int) -> torch.Tensor:
    """The sums of whole rows, or of a part of one row that begins at `lane`."""
    words = octets.view(torch.int64)
    swapped = octets.view(-1, 8).flip(1).view(torch.int64)
    rows = max(1, words.numel() // LANES)
    of_rows = _tensor(row_keys(row, rows)).to(octets.device)
    sums = []
    for which, part in enumerate((words, swapped)):
        lines = part.reshape(rows, -1)
        keys = _lane_keys(octets.device)[which, lane : lane + lines.shape[1]]
        sums.append(((lines * keys).sum(1) * of_rows[which]).sum())
    return torch.stack(sums)


@cache
def _lane_keys(device: torch.device) -> torch.Tensor:
    return _tensor(lane_keys()).to(device)


def _tensor(keys: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(keys.view(np.int64))


def _is_in_memory(value: torch.Tensor) -> bool:
    """Whether the adapter of PyTorch takes the tensor: the CPU has all of it, or it is refused."""
    if is_dtensor(value) and not has_all_elements(value):
        return any(placement.is_partial() for placement in value.placements)  # type: ignore[attr-defined]
    return value.is_cpu or value.is_meta


TAKER = TorchTaker
