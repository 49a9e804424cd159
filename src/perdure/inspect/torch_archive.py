"""A state dict in the zip format of `torch.save`, written without PyTorch and a chunk at a time.

The pickle in it holds a dict from names to tensors and Python scalars, from the opcodes and functions
that `torch.load(weights_only=True)` accepts.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, BinaryIO

from perdure.inspect.foreign_leaves import ForeignLeaf
from perdure.inspect.stored_zip import StoredZip

# The dtypes that have a class of storages, and those that PyTorch added later without one.
_STORAGES = {
    "bool": "BoolStorage",
    "uint8": "ByteStorage",
    "int8": "CharStorage",
    "int16": "ShortStorage",
    "int32": "IntStorage",
    "int64": "LongStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}
_UNTYPED = (
    "uint16",
    "uint32",
    "uint64",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
DTYPES = (*_STORAGES, *_UNTYPED)


def write_torch(
    file: BinaryIO, leaves: Sequence[ForeignLeaf], scalars: Sequence[tuple[str, Any]]
) -> None:
    """Write a state dict: arrays in the order in which they are read, and values of Python."""
    with StoredZip(file) as archive:
        archive.add("archive/data.pkl", [_pickle(leaves, scalars)])
        archive.add("archive/byteorder", [b"little"])
        for number, leaf in enumerate(leaves):
            archive.add(f"archive/data/{number}", leaf.chunks())
        archive.add("archive/version", [b"3\n"])


def _pickle(leaves: Sequence[ForeignLeaf], scalars: Sequence[tuple[str, Any]]) -> bytes:
    items = [(leaf.name, _tensor(number, leaf)) for number, leaf in enumerate(leaves)]
    items += [(name, _value(value)) for name, value in scalars]
    pairs = b"".join(_text(name) + value for name, value in sorted(items))
    return b"\x80\x02}(" + pairs + b"u."


def _tensor(number: int, leaf: ForeignLeaf) -> bytes:
    """The call that rebuilds one contiguous tensor over a storage of its own."""
    typed = leaf.dtype in _STORAGES
    storage_class = (
        ("torch", _STORAGES[leaf.dtype]) if typed else ("torch.storage", "UntypedStorage")
    )
    elements = math.prod(leaf.shape)
    persistent = _tuple(
        _text("storage"),
        _global(*storage_class),
        _text(str(number)),
        _text("cpu"),
        _int(elements if typed else leaf.nbytes),
    )
    strides = [math.prod(leaf.shape[axis + 1 :]) for axis in range(len(leaf.shape))]
    no_hooks = _global("collections", "OrderedDict") + b")R"
    arguments = [
        persistent + b"Q",
        _int(0),
        _tuple(*map(_int, leaf.shape)),
        _tuple(*map(_int, strides)),
        b"\x89",
        no_hooks,
    ]
    if typed:
        return _global("torch._utils", "_rebuild_tensor_v2") + _tuple(*arguments) + b"R"
    dtype = _global("torch", leaf.dtype)
    return _global("torch._utils", "_rebuild_tensor_v3") + _tuple(*arguments, dtype) + b"R"


def _value(value: Any) -> bytes:
    """A Python scalar."""
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        return _int(value)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, complex):
        parts = _tuple(_value(value.real), _value(value.imag))
        return _global("builtins", "complex") + parts + b"R"
    if isinstance(value, bytes):
        text = _tuple(_text(value.decode("latin1")), _text("latin1"))
        return _global("_codecs", "encode") + text + b"R"
    return _text(value)


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _tuple(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def _int(number: int) -> bytes:
    if -(2**31) <= number < 2**31:
        return b"J" + struct.pack("<i", number)
    data = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    if len(data) < 256:
        return b"\x8a" + bytes([len(data)]) + data
    return b"\x8b" + struct.pack("<i", len(data)) + data
