"""Constants and names of the format of a run directory (docs/FORMAT.md), and the hash that it uses.

Pure functions of their inputs. Nothing here imports numpy, so that listing a run stays quick.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from blake3 import blake3
from msgspec import Meta, Struct

from perdure.errors import CorruptionError, FormatVersionError

BLOCK_ITEMS = 1024

PLACEHOLDER: Any = msgspec.Raw(b"\0")
"""Stands for the one long list of an object. Other JSON text never has this byte."""


def blocks(items: Iterable[T], size: int | None = None) -> Iterator[list[T]]:
    """The items in lists of at most `size`, by default BLOCK_ITEMS."""
    iterator = iter(items)
    while block := list(islice(iterator, size or BLOCK_ITEMS)):
        yield block


def batches(items: Iterable[T], nbytes: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """The items in lists of at most `most` bytes together, and of one item at least."""
    batch: list[T] = []
    size = 0
    for item in items:
        if batch and size + nbytes(item) > most:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += nbytes(item)
    if batch:
        yield batch


def json_parts(lists: Iterable[bytes], frame: bytes = b"\0") -> Iterator[bytes | memoryview]:
    """The JSON `frame`, in parts, with the items of `lists` (JSON) in the place of `PLACEHOLDER`."""
    head, tail = frame.split(b"\0")
    yield head + b"["
    comma = b""
    for text in lists:
        yield comma
        yield memoryview(text)[1:-1]
        comma = b","
    yield b"]" + tail


FORMAT = 1
"""The format of run directories, manifests and packs."""

Metric = float | Literal["NaN", "Infinity", "-Infinity"]
"""A metric as JSON has it; see `json_number`."""

CHUNK_BYTES = 4 * 1024 * 1024
EPOCH_ENDS = "ended_epochs"
"""The last part of the path of the process leaf that names the loops which have ended."""

DCP_LAYOUT = "dcp/layout"
"""The local leaf, as JSON, of values that DCP stores in a checkpoint besides its leaves."""

SCALAR_PREFIX = "py:"
WEAK_PREFIX = "weak:"
"""Precedes the dtype of a weakly typed JAX array, which takes the other type in arithmetic."""

MARKER = "perdure.json"
LOCK = "lock"
MANIFESTS = "checkpoints/"
PACKS = "packs/"
QUARANTINE = "quarantine/"
PINS = "pins/"
TEMP_SUFFIX = ".tmp"
MAX_STEP = 10**12 - 1

_TEMPORARY = re.compile(
    r"([0-9]{12}[0-9a-f.-]*(\.json|\.pack)?|\.run|log-[0-9]+\.jsonl)(\.[0-9a-f]{8})?\.tmp"
)
_MANIFEST_NAME = re.compile(re.escape(MANIFESTS) + r"([0-9]{12})\.json")
Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
# Matching a pattern for each chunk would take longer than all other work of reading a manifest, so
# `check_hashes` looks at all of them at once.
Hash = Annotated[str, Meta(min_length=64, max_length=64)]
T = TypeVar("T")


class _Header(Struct):
    format: int


def hash_bytes(data: bytes | bytearray | memoryview) -> str:
    """BLAKE3-256 of `data`, 64 lower-case hexadecimal digits."""
    return blake3(data).hexdigest()


def hash_each(parts: Iterable[bytes | bytearray | memoryview]) -> list[str]:
    """`hash_bytes` of many small parts, without a call and a hasher for each."""
    hasher = blake3()
    reset, update, digest = hasher.reset, hasher.update, hasher.digest
    digests = []
    for part in parts:
        reset()
        update(part)
        digests.append(digest())
    # All digits in one call, which takes less than half the time of a text for each hash.
    return b"".join(digests).hex(" ", -32).split(" ") if digests else []


def manifest_name(step: int) -> str:
    """Name of the manifest of `step` inside a run directory."""
    return f"{MANIFESTS}{step:012d}.json"


def step_of(name: str) -> int | None:
    """Step of a manifest's name; None for a name that is not one."""
    match = _MANIFEST_NAME.fullmatch(name)
    return int(match[1]) if match else None


def is_temporary(name: str) -> bool:
    """Whether a name in a folder is the name of a file that perdure has begun to write there."""
    return _TEMPORARY.fullmatch(name.rpartition("/")[2]) is not None


def pack_name(step: int, process: int, nonce: str) -> str:
    """Name of a pack inside `packs/`; `nonce` (8 hex digits) keeps a repeated save apart."""
    return f"{step:012d}-{process:05d}-{nonce}.pack"


def pack_step(name: str) -> int:
    """Step of the save that wrote a pack, from its name; -1 for a name that is not a pack's."""
    match = re.fullmatch(r"([0-9]{12})-[0-9]{5}-[0-9a-f]{8}\.pack", name)
    return int(match[1]) if match else -1


def pin_name(step: int) -> str:
    """Name of the empty object that pins `step`."""
    return f"{PINS}{step:012d}"


def time_text(seconds: float) -> str:
    """`YYYY-MM-DDTHH:MM:SSZ` of seconds since 1970."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def seconds_of(text: str) -> int:
    """Seconds since 1970 of a `time_text`; raises `ValueError` for what is not a date."""
    return int(datetime.fromisoformat(text).timestamp())


def steps_text(steps: Sequence[int]) -> str:
    """Steps as an error lists them: all of up to 8, else the first and the last three."""
    if len(steps) <= 8:
        return ", ".join(map(str, steps))
    return f"{steps_text(steps[:3])} ... {steps_text(steps[-3:])} ({len(steps)})"


def span_text(first: int, last: int) -> str:
    """The steps from `first` to `last`: `step 6`, `steps 6 to 9`."""
    return f"step {first}" if first == last else f"steps {first} to {last}"


def chunk_spans(nbytes: int) -> list[tuple[int, int]]:
    """(start, stop) of every chunk of a leaf of `nbytes` bytes; none for an empty leaf."""
    return [(start, min(start + CHUNK_BYTES, nbytes)) for start in range(0, nbytes, CHUNK_BYTES)]


def children_of(paths: Iterable[str]) -> dict[str, list[str]]:
    """The last parts of the paths below each path, in the order of their first occurrence."""
    children: dict[str, dict[str, None]] = {}
    for path in paths:
        while path:
            parent, _, last = path.rpartition("/")
            known = children.setdefault(parent, {})
            if last in known:
                break
            known[last] = None
            path = parent
    return {path: list(parts) for path, parts in children.items()}


def escape(key: str) -> str:
    """A key as a part of a path."""
    return key.replace("%", "%25").replace("/", "%2F")


def unescape(part: str) -> str:
    """The inverse of `escape`."""
    return part.replace("%2F", "/").replace("%25", "%")


def check_hashes(hashes: Iterable[str], where: str) -> None:
    """Raise `CorruptionError` unless all hashes are lower-case hexadecimal; lengths are not checked."""
    for block in blocks(hashes):
        if others := "".join(block).encode(errors="replace").translate(None, b"0123456789abcdef"):
            raise CorruptionError(
                f"{where}: expected hexadecimal hashes, found {others[:9]!r} in them."
            )


def hash_parts(parts: Iterable[bytes | memoryview]) -> str:
    """`hash_bytes` of the parts, one after the other."""
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def check_version(data: bytes | memoryview, where: str) -> None:
    """Raise `FormatVersionError` if the format that JSON states is newer than this one."""
    version = decode_json(data, _Header, where).format
    if version > FORMAT:
        raise FormatVersionError(
            f"{where}: written in format {version}; this perdure reads up to format {FORMAT}. "
            f"Nothing was changed. Install a newer perdure to use it."
        )


def decode_json(data: bytes | memoryview, kind: type[T], where: str) -> T:
    """Decode JSON by its schema; raises `CorruptionError` if it does not fit."""
    try:
        return msgspec.json.decode(data, type=kind)
    # msgspec's own errors, UnicodeDecodeError, and values nested deeper than Python's stack
    except (ValueError, RecursionError) as error:
        raise CorruptionError(
            f"{where}: not a valid {kind.__name__.strip('_').lower()}: {error}"
        ) from None


def json_number(value: float) -> Metric:
    """A float for JSON, which has no NaN and no infinity: they become texts that `float` reads."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
