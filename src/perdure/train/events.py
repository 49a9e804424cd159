"""TensorBoard event files: scalars and text, without TensorBoard, TensorFlow or protobuf.

An event file is a series of TFRecords (`tensorflow/core/lib/io/record_writer.h`): the length as 8
bytes little-endian, the masked CRC-32C of these 8 bytes, the data, its masked CRC-32C. The data is an
`Event` (`tensorflow/core/util/event.proto`) in the protocol buffers' wire format. CRC-32C is that of
RFC 3720, appendix B.4; it is masked by a rotation by 15 bits and the addition of 0xa282ead8.

Invariant: only whole records are written, each by one call.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import lru_cache
from io import BufferedWriter
from typing import SupportsFloat

_MASK = 0xA282EAD8
_POLYNOMIAL = 0x82F63B78
_DOUBLE = struct.Struct("<d")
_FLOAT = struct.Struct("<f")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_LARGEST = 3.4028234663852886e38  # of a float32; a larger one becomes an infinity


def _table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli) of `data`."""
    table, crc = _TABLE, 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return _U32.pack(((crc >> 15 | crc << 17 & 0xFFFFFFFF) + _MASK) & 0xFFFFFFFF)


@lru_cache(maxsize=1024)
def _header(length: int) -> bytes:
    head = _U64.pack(length)
    return head + _masked(head)


def record(data: bytes) -> bytes:
    """A TFRecord."""
    return b"".join((_header(len(data)), data, _masked(data)))


def varint(value: int) -> bytes:
    """An integer of 0 to 2**64 - 1, seven bits a byte, the lowest first."""
    if value < 128:
        return bytes((value,))
    parts = bytearray()
    while value >= 128:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _bytes(field: int, data: bytes) -> bytes:
    """A field of wire type 2 (bytes, strings, messages); `field` below 16."""
    return b"".join((bytes((field << 3 | 2,)), varint(len(data)), data))


@lru_cache(maxsize=4096)
def _tag(tag: str) -> bytes:
    """Field 1 of a Summary.Value, and the key of its field 2 (simple_value, a float)."""
    return _bytes(1, tag.encode()) + b"\x15"


def _single(value: float) -> bytes:
    return _FLOAT.pack(value if abs(value) <= _LARGEST or value != value else value * float("inf"))


class EventWriter:
    """Writes events to an open, buffered binary file."""

    def __init__(self, file: BufferedWriter, wall_time: float) -> None:
        self._file = file
        self._file.write(record(b"\x09" + _DOUBLE.pack(wall_time) + _bytes(3, b"brain.Event:2")))

    def start(self, step: int, wall_time: float) -> None:
        """Write a SessionLog START: TensorBoard drops earlier points of `step` and of later steps."""
        self._event(step, wall_time, _bytes(7, b"\x08\x01"))

    def scalars(self, step: int, values: Mapping[str, SupportsFloat], wall_time: float) -> None:
        """Write one point of each tag, as float32, in one event."""
        points = [_tag(tag) + _single(float(value)) for tag, value in values.items()]
        summary = b"".join([b"\x0a" + varint(len(point)) + point for point in points])
        self._event(step, wall_time, _bytes(5, summary))

    def text(self, step: int, tag: str, text: str, wall_time: float) -> None:
        """Write a text, which TensorBoard shows as Markdown."""
        # TensorProto: dtype 7 (DT_STRING), an empty shape, one string_val.
        tensor = b"\x08\x07" + _bytes(2, b"") + _bytes(8, text.encode())
        plugin = _bytes(1, _bytes(1, b"text"))
        value = _bytes(1, tag.encode()) + _bytes(8, tensor) + _bytes(9, plugin)
        self._event(step, wall_time, _bytes(5, _bytes(1, value)))

    def flush(self) -> None:
        """Flush the file: what was written then survives the end of the process."""
        self._file.flush()

    def _event(self, step: int, wall_time: float, body: bytes) -> None:
        header = b"\x09" + _DOUBLE.pack(wall_time) + b"\x10" + varint(step)
        self._file.write(record(header + body))
