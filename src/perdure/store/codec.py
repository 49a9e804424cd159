"""Encoding chunks: byte shuffle, then Zstandard at level 1.

Invariant: an encoded chunk can be checked without decompressing it, because it ends in a seal: the
BLAKE3 of all bytes before it, keyed with the hash of the chunk. So every flipped bit is found, the
decompressor only gets bytes that an encoder made, and packs can be copied where the library is
missing. Decoded chunks are hashed like all others.

    encoded chunk = width (1 byte) | one Zstandard frame of the shuffled bytes | seal (32 bytes)

Byte shuffle with width w puts the first bytes of all elements of w bytes first, then the second
bytes, and so on (as in HDF5 and Blosc): exponents are alike, mantissas are not. Zstandard is RFC 8878.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

from blake3 import blake3

from perdure.errors import StoreError
from perdure.store.format import CHUNK_BYTES, hash_bytes

CODECS = ("shuffle-zstd",)
LEVEL = 1
SEAL_BYTES = 32
WIDTHS = (1, 2, 4, 8, 16)

ENCODE_FROM = 4096
"""Smaller chunks are stored as they are, because encoding them costs more than it saves."""

LEAST_GAIN = 32
"""A chunk that shrinks by less than this part of itself is stored as it is, for faster reading."""

ENCODE_THREADS = max(2, min(8, os.cpu_count() or 2))

_WINDOW_LOG = CHUNK_BYTES.bit_length() - 1
"""A frame that asks for more memory than a chunk has is refused."""

_own = threading.local()

Encode = Callable[[memoryview, str, str], memoryview]
"""(bytes, dtype of their leaf, their hash) -> what is stored: the bytes themselves or fewer."""


def encoder(name: str | None) -> Encode | None:
    """The encoder of a codec by its name; None for None. Raises `StoreError` if there is none."""
    if name is None:
        return None
    if name not in CODECS:
        raise StoreError(f"codec: expected None or {CODECS[0]!r}, found {name!r}.")
    _zstd()
    return encode


def encode(data: memoryview, dtype: str, digest: str) -> memoryview:
    """The stored form of a chunk whose hash is `digest`: encoded, or `data` if that saves little."""
    import numpy as np  # not needed to list a run

    size, width = len(data), width_of(dtype)
    if size % width:
        width = 1
    planes: Any = data
    if width > 1:
        planes = _scratch(size).reshape(width, size // width)
        planes[...] = np.frombuffer(data, np.uint8).reshape(-1, width).T
    compressor = getattr(_own, "compressor", None)
    if compressor is None:
        compressor = _own.compressor = _zstd().ZstdCompressor(level=LEVEL)
    frame = compressor.compress(planes, compressor.FLUSH_FRAME)
    length = 1 + len(frame) + SEAL_BYTES
    if length > size - size // LEAST_GAIN:
        return data
    body = bytes([width]) + frame
    return memoryview(body + _seal(body, digest))


def decode(stored: memoryview, digest: str, target: memoryview) -> str | None:
    """Decode any bytes into `target`, in little memory; returns what is wrong with them, or None."""
    import numpy as np  # not needed to list a run

    if not is_intact(stored, digest, len(target)):
        return f"its {len(stored)} encoded bytes do not match their seal"
    width, frame = stored[0], stored[1:-SEAL_BYTES]
    if width not in WIDTHS or len(target) % width:
        return f"expected a shuffle of 1, 2, 4, 8 or 16 bytes, found {width}"
    plain = _decompressed(frame, len(target))
    if isinstance(plain, str):
        return plain
    planes = np.frombuffer(plain, np.uint8).reshape(width, -1)
    elements = np.frombuffer(target, np.uint8).reshape(-1, width)
    for position, plane in enumerate(planes):
        elements[:, position] = plane
    actual = hash_bytes(target)
    return None if actual == digest else f"expected hash {digest[:16]}, found {actual[:16]}"


def is_intact(stored: bytes | bytearray | memoryview, digest: str, size: int) -> bool:
    """Whether a stored chunk of `size` bytes is unchanged. Does not need the library."""
    if len(stored) == size:
        return hash_bytes(stored) == digest
    view = memoryview(stored)
    body, seal = view[:-SEAL_BYTES], view[-SEAL_BYTES:]
    return len(body) > 1 and _seal(body, digest) == seal


def width_of(dtype: str) -> int:
    """Bytes of one element, for the shuffle. A wrong guess costs space and nothing else."""
    if dtype.startswith("key<"):
        return 4
    bits = re.search(r"[0-9]+", dtype)
    width = int(bits[0]) // 8 if bits else 1
    return width if width in WIDTHS else 1


def _seal(body: bytes | memoryview, digest: str) -> bytes:
    return blake3(body, key=bytes.fromhex(digest)).digest()


def _decompressed(frame: memoryview, size: int) -> bytes | str:
    """The bytes of a frame that must hold `size`, or what is wrong with it."""
    zstd = _zstd()
    limit = {zstd.DecompressionParameter.window_log_max: _WINDOW_LOG}
    decompressor = zstd.ZstdDecompressor(options=limit)
    try:
        plain = decompressor.decompress(frame, size + 1)
    except zstd.ZstdError as error:
        return f"its encoded bytes cannot be decompressed: {error}"
    if len(plain) > size:
        return f"expected {size} bytes, found a frame of more"
    if len(plain) < size or not decompressor.eof or decompressor.unused_data:
        return f"expected one frame of {size} bytes, found {len(plain)}, or bytes after it"
    return plain


def _scratch(size: int) -> Any:
    """Memory of this thread, which is reused for its next chunk."""
    import numpy as np  # not needed to list a run

    held = getattr(_own, "scratch", None)
    if held is None or len(held) < size:
        held = _own.scratch = np.empty(max(size, ENCODE_FROM), np.uint8)
    return held[:size]


def _zstd() -> Any:
    """The Zstandard module of Python, or its backport."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError as error:
        raise StoreError(
            f"the codec {CODECS[0]!r} needs Zstandard, which is not installed ({error}). "
            f"Install the extra: pip install 'perdure[zstd]'."
        ) from None
    return zstd
