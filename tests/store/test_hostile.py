"""Manifests with a correct digest and invalid contents are found by a check and by a load."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from helpers import make_leaves, repeated, run_on

from perdure.errors import CorruptionError, FormatVersionError, UnsupportedLeafError
from perdure.store import Leaf, MemoryStorage, Run, repair, verify_run
from perdure.store.format import CHUNK_BYTES, hash_bytes, manifest_name
from perdure.store.leaf import numpy_dtype
from perdure.store.manifest import Manifest, fingerprint
from perdure.store.manifest_json import item_bytes

Document = dict[str, Any]
STEP = 7


def saved(*, large: bool) -> MemoryStorage:
    """Arrays of one and two chunks, empty, encoded and key arrays, and every type of scalar."""
    source = random.Random(1)
    texts = {
        "py:int": "-12",
        "py:float": "1e-07",
        "py:complex": "(1-2j)",
        "py:bool": "true",
        "py:str": "a/b\n",
        "py:bytes": "00ff",
        "py:none": "",
    }
    leaves = {
        **make_leaves(1),
        "a/two": Leaf(
            "float32", (CHUNK_BYTES // 4 + 3,), memoryview(source.randbytes(CHUNK_BYTES + 12))
        ),
        "a/matrix": Leaf("bfloat16", (4, 5), memoryview(source.randbytes(40))),
        "a/none": Leaf("int64", (0, 3), memoryview(b"")),
        "keys": Leaf("key<threefry2x32>", (3,), memoryview(source.randbytes(24))),
        **{
            f"scalar/{kind[3:]}": Leaf(kind, (), memoryview(text.encode()), True)
            for kind, text in texts.items()
        },
        **repeated({"words": make_leaves(1, (64,))["model/layer0"]}, 128),
    }
    if not large:
        del leaves["a/two"]
    storage = MemoryStorage()
    with run_on(storage, codec="shuffle-zstd") as run:
        run.save(STEP, leaves, {"replicas": 8}, {"loss": 0.5})
    return storage


def document(storage: MemoryStorage) -> Document:
    """A manifest as JSON, without its digest."""
    manifest = json.loads(storage.objects[manifest_name(STEP)])
    del manifest["digest"]
    return manifest


def seal(storage: MemoryStorage, changed: Document, *, fit: bool = True) -> None:
    """Write a changed manifest with a correct digest and, with `fit`, a correct fingerprint."""
    if fit:
        with_rows: list[tuple[str, str, Any, list[str]]] = []
        try:
            for leaf in changed["leaves"]:
                hashes = [chunk[0] for chunk in leaf.get("chunks", ())]
                if leaf.get("text") is not None:
                    hashes = [hash_bytes(leaf["text"].encode())]
                with_rows.append((leaf["path"], leaf["dtype"], leaf.get("shape", []), hashes))
            changed["fingerprint"] = fingerprint(with_rows)
        except (AttributeError, KeyError, TypeError, IndexError, ValueError, RecursionError):
            pass  # so malformed that it has no fingerprint
    seal_bytes(storage, msgspec.json.encode(changed) + b"\n")


def seal_bytes(storage: MemoryStorage, body: bytes) -> None:
    head = b'{"digest":"' + hash_bytes(body).encode() + b'",'
    storage.objects[manifest_name(STEP)] = head + body[1:]


def leaf(changed: Document, path: str) -> Document:
    return next(leaf for leaf in changed["leaves"] if leaf["path"] == path)


def put(path: str, **fields: Any) -> Callable[[Document], None]:
    return lambda changed: leaf(changed, path).update(fields)


def chunk(path: str, place: int, value: Any, number: int = 0) -> Callable[[Document], None]:
    def change(changed: Document) -> None:
        leaf(changed, path)["chunks"][number][place] = value

    return change


def rename(path: str, to: str) -> Callable[[Document], None]:
    def change(changed: Document) -> None:
        leaf(changed, path)["path"] = to
        changed["leaves"].sort(key=lambda leaf: leaf["path"])

    return change


def swap(changed: Document) -> None:
    changed["leaves"][0], changed["leaves"][1] = changed["leaves"][1], changed["leaves"][0]


def pack(field: str, value: Any) -> Callable[[Document], None]:
    return lambda changed: changed["packs"][0].update({field: value})


NONSENSE: dict[str, Callable[[Document], None]] = {
    "a shape that needs other bytes": put("a/matrix", shape=[4, 6]),
    "a shape of 2^62": put("a/matrix", shape=[2**62]),
    "a shape whose product is beyond 64 bits": put("a/matrix", shape=[2**62, 2**62, 2**62]),
    "a shape of many dimensions": put("a/matrix", shape=[1] * 65),
    "a shape of very many dimensions": put("a/matrix", shape=[2**62] * 10_000),
    "an empty shape of a full array": put("a/matrix", shape=[0, 5]),
    "a full shape of an empty array": put("a/none", shape=[1, 3]),
    "a dtype of other bytes": put("a/matrix", dtype="float32"),
    "a name that no dtype has": put("a/matrix", dtype="O8"),
    "an unknown dtype of broken elements": put("a/matrix", dtype="posit16", shape=[7]),
    "an unknown dtype of less than a byte": put("a/matrix", dtype="posit16", shape=[2**62]),
    "an unknown dtype of no elements": put("a/matrix", dtype="posit16", shape=[0]),
    "a structured dtype": put("a/matrix", dtype="i1,i1"),
    "keys that do not fill their words": put("keys", shape=[5]),
    "keys without words": put("keys", shape=[0]),
    "a length of 2^62": chunk("a/matrix", 3, 2**62),
    "an offset of 2^62": chunk("a/matrix", 2, 2**62),
    "an offset at the end of the pack": lambda d: chunk("a/matrix", 2, d["packs"][0]["size"] - 39)(
        d
    ),
    "a pack that is not listed": chunk("a/matrix", 1, 1),
    "a length of nothing": chunk("a/matrix", 3, 0),
    "a first chunk that is not full": chunk("a/two", 3, CHUNK_BYTES - 4),
    "chunks in another cut": lambda d: leaf(d, "a/two").update(
        chunks=[leaf(d, "a/two")["chunks"][1], leaf(d, "a/two")["chunks"][0]]
    ),
    "a size that is not needed": put("a/matrix", size=40),
    "a size of 2^62": put("words", size=2**62, shape=[2**62]),
    "a size smaller than the chunk": put("words", size=4, shape=[4]),
    "two leaves of one path": rename("a/matrix", "a/none"),
    "a leaf below another": rename("a/matrix", "keys/data"),
    "a leaf far below another": rename("a/matrix", "keys/b/c/d"),
    "a leaf above others": rename("keys", "model"),
    "a path with an empty part": rename("keys", "x//y"),
    "a path that begins with a slash": rename("keys", "/x"),
    "a path that ends with a slash": rename("keys", "x/"),
    "leaves out of order": swap,
    "a pack name with a slash": pack("name", "../0000000001-00000-00000000.pack"),
    "a pack name that ends in a line": pack("name", "000000000001-00000-00000000.pack\n"),
    "a pack that is smaller than its chunks": pack("size", 10),
    "a pack that is listed twice": lambda d: d["packs"].append(d["packs"][0]),
    "another step": lambda d: d.update(step=8),
    "a step too large": lambda d: d.update(step=2**62),
    "text beside chunks": put("a/matrix", text="x"),
    "an array's text": put("scalar/int", dtype="int32"),
    "a scalar without text": lambda d: leaf(d, "scalar/int").pop("text"),
    "a scalar with a shape": put("scalar/int", shape=[1]),
    "text that is no integer": put("scalar/int", text="12_0"),
    "text that is no float": put("scalar/float", text="1.5.5"),
    "text that is no complex number": put("scalar/complex", text="import os"),
    "text that is no boolean": put("scalar/bool", text="True"),
    "text that is not hexadecimal": put("scalar/bytes", text="0g"),
    "text where none is": put("scalar/none", text="None"),
    "a metric that is a text": lambda d: d["metrics"].update(loss="x"),
    "deep nesting in the recipe": lambda d: d.update(recipe={"a": nested(50)}),
    "a field of a later version": lambda d: d.update(more=1),
}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.fixture(scope="module")
def pristine() -> dict[str, bytes]:
    return dict(saved(large=True).objects)


def copy_of(pristine: dict[str, bytes]) -> MemoryStorage:
    storage = MemoryStorage()
    storage.objects.update(pristine)
    return storage


@pytest.mark.parametrize("what", NONSENSE)
def test_invalid_contents_under_a_correct_digest_are_damage(
    pristine: dict[str, bytes], what: str
) -> None:
    storage = copy_of(pristine)
    changed = document(storage)
    NONSENSE[what](changed)
    seal(storage, changed)
    assert_damaged(storage)


@pytest.mark.parametrize("dtype", ["posit16", "int24", "float80", "datetime64[us]", "weak:fixed8"])
def test_an_unknown_dtype_is_no_damage(pristine: dict[str, bytes], dtype: str) -> None:
    storage = copy_of(pristine)
    before = Run(storage).load(STEP).leaves["a/matrix"]
    changed = document(storage)
    put("a/matrix", dtype=dtype)(changed)
    seal(storage, changed)
    assert verify_run(Run(storage)).ok
    with Run(storage) as run:
        assert repair(run).report.good == (STEP,)
        assert run.quarantined() == []
    leaf = Run(storage).load(STEP).leaves["a/matrix"]
    assert (leaf.dtype, leaf.shape, bytes(leaf.data)) == (dtype, before.shape, bytes(before.data))
    with pytest.raises(UnsupportedLeafError):
        numpy_dtype(dtype)


def assert_damaged(storage: MemoryStorage) -> None:
    report = verify_run(Run(storage))
    assert (report.good, report.bad, report.ok) == ((), (STEP,), False)
    with pytest.raises(CorruptionError, match=r"000000000007\.json|step 7"):
        Run(storage).load(STEP)


def test_control_the_same_manifest_sealed_again_is_good(pristine: dict[str, bytes]) -> None:
    storage = copy_of(pristine)
    seal(storage, document(storage))
    assert verify_run(Run(storage)).good == (STEP,)
    assert_consistent(storage)


@pytest.mark.parametrize(
    "body",
    [
        b"{" + b'"a":' + b"[" * 1_000_000,
        b'{"format":1,"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"format":1,"step":7,"recipe":{"a":' + b'{"a":' * 100_000 + b"}",
        b"{}",
        b"{" + b"\xff" * 100,
        b'{"format":1e400}',
        b'{"format":99999999999999999999999999}',
    ],
    ids=range(7),
)
def test_undecodable_bytes_are_damage(pristine: dict[str, bytes], body: bytes) -> None:
    storage = copy_of(pristine)
    seal_bytes(storage, body)
    try:
        assert_damaged(storage)
    except FormatVersionError:
        assert b"9999" in body, "a number of a version, and a large one"


def test_a_truncated_pack_is_found_before_memory_is_allocated(
    monkeypatch: pytest.MonkeyPatch, pristine: dict[str, bytes]
) -> None:
    storage = copy_of(pristine)
    name = next(name for name in storage.objects if name.startswith("packs/"))
    storage.objects[name] = storage.objects[name][:1000]
    taken: list[int] = []
    monkeypatch.setattr("perdure.store.reader.leaf_memory", taken.append)
    with pytest.raises(CorruptionError, match=r"expected at least .* bytes, found 1000"):
        Run(storage).load(STEP)
    assert taken == []


# ---------------------------------------------------------------- any change at all


def assert_consistent(storage: MemoryStorage) -> None:
    """A loaded leaf is what the manifest says."""
    loaded = Run(storage).load(STEP)
    manifest: Manifest = loaded.manifest
    assert list(loaded.leaves) == [record.path for record in manifest.leaves] or sorted(
        loaded.leaves
    ) == [record.path for record in manifest.leaves]
    for record in manifest.leaves:
        leaf = loaded.leaves[record.path]
        assert (leaf.dtype, leaf.shape) == (record.dtype, record.shape)
        assert leaf.hashes() == record.hashes()
        if record.text is None and not record.dtype.startswith("key<"):
            count = 1
            for size in record.shape:
                count *= size
            item = item_bytes(record.dtype) or len(leaf.data) // max(1, count)
            assert len(leaf.data) == count * item


VALUES: list[Any] = [
    0,
    1,
    -1,
    3,
    2**31,
    2**62,
    2**63,
    10**40,
    1.5,
    True,
    None,
    "",
    "x",
    "a/none",
    "0" * 64,
    "float32",
    "py:int",
    [],
    {},
    [1, 2],
    [2**62, 2**62],
    nested(30),
]


def mutate(value: Any, chance: random.Random) -> Any:
    """One change at a random place of a document."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(sorted(value))
        act = chance.random()
        if act < 0.06:
            return {k: v for k, v in value.items() if k != key}
        if act < 0.1:
            return {
                **value,
                chance.choice(["more", "size", "text", "shape"]): chance.choice(VALUES),
            }
        return {**value, key: mutate(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        offset = chance.randrange(len(value))
        act = chance.random()
        if act < 0.05:
            return value[:offset] + value[offset + 1 :]
        if act < 0.1:
            return [*value, value[offset]]
        if act < 0.15:
            other = chance.randrange(len(value))
            swapped = list(value)
            swapped[offset], swapped[other] = swapped[other], swapped[offset]
            return swapped
        return [*value[:offset], mutate(value[offset], chance), *value[offset + 1 :]]
    if isinstance(value, int) and chance.random() < 0.5:
        return value + chance.choice([-4096, -4, -1, 1, 2, 4, 4096])
    if isinstance(value, str) and value and chance.random() < 0.5:
        offset = chance.randrange(len(value))
        return value[:offset] + chance.choice("0aZ/_ \n\u00e9") + value[offset + 1 :]
    return chance.choice(VALUES)


def test_a_changed_manifest_is_damaged_or_loads_as_it_says() -> None:
    pristine = dict(saved(large=False).objects)
    outcomes = {"bad": 0, "good": 0, "newer": 0}
    for seed in range(1500):
        chance = random.Random(seed)
        storage = copy_of(pristine)
        changed = document(storage)
        for _ in range(chance.choice([1, 1, 1, 2, 3])):
            changed = mutate(changed, chance)
        if not isinstance(changed, dict):
            continue
        seal(storage, changed, fit=chance.random() < 0.9)
        try:
            report = verify_run(Run(storage))
        except FormatVersionError:
            outcomes["newer"] += 1
            continue
        if changed.get("run") != document(copy_of(pristine))["run"]:
            assert report.bad == (STEP,)
            outcomes["bad"] += 1
            continue
        if report.bad == (STEP,):
            outcomes["bad"] += 1
            with suppress(CorruptionError):  # a check additionally finds packs of another size
                assert_consistent(storage)
        else:
            assert report.good == (STEP,), seed
            outcomes["good"] += 1
            assert_consistent(storage)
    assert outcomes["bad"] > 700, outcomes
    assert outcomes["good"] > 50, outcomes
