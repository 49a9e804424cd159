"""Whether plain values, arrays and containers of them have the same bits. 0.0 is not -0.0."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from blake3 import blake3

_LARGE = 1 << 20
"""Bytes of an array of which no copy is made."""


def same(one: Any, other: Any) -> bool:
    """Whether two values have the same types, dtypes, shapes and bits, wherever tensors are."""
    return one is other or b"".join(_bytes_of(one)) == b"".join(_bytes_of(other))


def hash_of(value: Any) -> bytes:
    """Bytes that are equal for values that are the `same`. In one thread: a process that is forked
    after a hash in several would wait for ever in its own."""
    hasher = blake3()
    for part in _bytes_of(value):
        hasher.update(part)
    return hasher.digest()


def octets(tensor: Any) -> memoryview | bytes:
    """The elements of a dense tensor, in row-major order, where they are on the CPU in that order."""
    import torch

    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().data if plain.numel() else b""


def _bytes_of(value: Any) -> Iterator[memoryview | bytes]:
    yield type(value).__name__.encode()
    if isinstance(value, (np.ndarray, np.generic)):
        yield f"{value.dtype.str}{value.shape}".encode()
        if value.nbytes > _LARGE and not value.dtype.hasobject:
            yield np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
        else:
            yield value.tobytes()
        if isinstance(value, np.ma.MaskedArray):
            yield from _bytes_of((np.asarray(value.mask), value.fill_value))
    elif getattr(value, "is_sparse", False):
        yield from _bytes_of((tuple(value.shape), value._indices(), value._values()))
    elif hasattr(value, "untyped_storage"):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield octets(value)
    elif isinstance(value, float):
        yield struct.pack("<d", value)
    elif isinstance(value, complex):
        yield struct.pack("<dd", value.real, value.imag)
    elif isinstance(value, bytes):
        yield value
    elif isinstance(value, (dict, list, tuple, deque)):
        yield f"{len(value)}:".encode()
        for item in value.items() if isinstance(value, dict) else value:
            yield from _bytes_of(item)
    elif isinstance(value, (set, frozenset)):
        yield from sorted(b"".join(_bytes_of(item)) for item in value)
    else:
        yield str(value).encode()
    yield b"\0"
