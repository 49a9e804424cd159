"""PyTorch's global generators under (seed, step, replica)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch

from perdure.distribute.engine import Stream


def make_generator(device: torch.device, stream: Stream) -> torch.Generator:
    """A generator of its own, whose numbers are a function of `stream`."""
    return torch.Generator(device).manual_seed(_mixed(stream))


def remember(device: torch.device) -> Callable[[], None]:
    """Remembers the state of the global generators; the result puts it back."""
    states = [(generator.set_state, generator.get_state()) for generator in _generators(device)]

    def restore() -> None:
        for set_state, state in states:
            set_state(state)

    return restore


def seed(device: torch.device, stream: Stream) -> Callable[[], None]:
    """Put the global generators under `stream`; the result puts them back, for draws between steps."""
    number = _mixed(stream)
    restore = remember(device)
    for generator in _generators(device):
        # Not torch.manual_seed, which formats a stack trace for a CUDA that is not there.
        generator.manual_seed(number)
    return restore


@contextlib.contextmanager
def seeded(device: torch.device, stream: Stream) -> Iterator[None]:
    """`seed` for the code inside."""
    restore = seed(device, stream)
    try:
        yield
    finally:
        restore()


@functools.cache
def _generators(device: torch.device) -> tuple[torch.Generator, ...]:
    if device.type != "cuda":
        return (torch.default_generator,)
    return torch.default_generator, torch.cuda.default_generators[device.index]


@functools.lru_cache(64)
def _mixed(stream: Stream) -> int:
    """63 bits of (seed, step, replica), by SplitMix64 (see perdure.data.permutation)."""
    seed, step, replica = stream
    return _mix(_mix(_mix(0, seed), step), replica) >> 1


@functools.lru_cache(8)
def _mix(value: int, part: int) -> int:
    mask = 2**64 - 1
    value = ((value + 0x9E3779B97F4A7C15) ^ part) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)
