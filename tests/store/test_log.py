"""A log: chained lines, what a torn and a damaged one mean, and whose file it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from perdure.errors import CorruptionError
from perdure.store import LocalStorage, MemoryStorage
from perdure.store.log import LogWriter, read_log
from perdure.store.storage import Storage

EVENTS = [{"kind": "step", "step": 1}, {"kind": "rules", "keep": None}, {"kind": "step", "step": 2}]


def write(storage: Storage) -> None:
    log = LogWriter(storage, "log")
    for event in EVENTS:
        log.append(event)
    log.sync()
    log.close()


@pytest.mark.parametrize("storage", [None, MemoryStorage()])
def test_a_log_has_its_lines_again(tmp_path: Path, storage: Storage | None) -> None:
    storage = storage or LocalStorage(tmp_path)
    assert list(read_log(storage, "log")) == []
    write(storage)
    *_, last = read_log(storage, "log")
    log = LogWriter(storage, "log", last)
    added = log.append(EVENTS[0])
    log.close()
    lines = list(read_log(storage, "log"))
    assert [b'"step"' in line.rest for line in lines] == [True, False, True, True]
    assert [line.number for line in lines] == [1, 2, 3, 4]
    assert lines[-1].reference == added.reference
    assert len({line.hash for line in lines}) == 4


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    write(storage)
    path = tmp_path / "log.jsonl"
    data = path.read_bytes()
    for place in range(len(data) - 1):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(CorruptionError, match="line"):
            list(read_log(storage, "log"))
    path.write_bytes(data)
    assert len(list(read_log(storage, "log"))) == 3  # the control


def test_a_torn_last_line_is_no_line_and_the_writer_cuts_it_off(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    write(storage)
    path = tmp_path / "log.jsonl"
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        lines = list(read_log(storage, "log"))
        assert len(lines) == data[:length].count(b"\n")
        log = LogWriter(storage, "log", lines[-1] if lines else None)
        log.append(EVENTS[0])
        log.close()
        assert len(list(read_log(storage, "log"))) == len(lines) + 1


def test_a_line_of_a_bucket_is_an_object_and_none_may_be_missing() -> None:
    storage = MemoryStorage()
    write(storage)
    assert sorted(storage.objects) == [f"log/{number:012d}.json" for number in (1, 2, 3)]
    removed = storage.objects.pop("log/000000000002.json")
    with pytest.raises(CorruptionError, match="line 2"):
        list(read_log(storage, "log"))
    storage.objects["log/000000000002.json"] = removed + b" "
    with pytest.raises(CorruptionError, match="line 2"):
        list(read_log(storage, "log"))


def test_a_log_that_was_replaced_or_changed_while_it_was_open_takes_no_line(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    log = LogWriter(storage, "log")
    log.append(EVENTS[0])
    path = tmp_path / "log.jsonl"
    data = path.read_bytes()
    (tmp_path / "other").write_bytes(data)
    os.replace(tmp_path / "other", path)
    with pytest.raises(OSError, match="replaced"):
        log.append(EVENTS[1])
    assert path.read_bytes() == data
    log.close()
    (line,) = read_log(storage, "log")
    log = LogWriter(storage, "log", line)
    path.write_bytes(b"")
    with pytest.raises(OSError, match="changed"):
        log.append(EVENTS[1])
    log.close()


@pytest.mark.parametrize("is_open", [False, True])
def test_a_log_never_grows_in_its_copy_by_cp_al(tmp_path: Path, is_open: bool) -> None:
    storage = LocalStorage(tmp_path / "run")
    os.mkdir(tmp_path / "run")
    log = LogWriter(storage, "log")
    log.append(EVENTS[0])
    if not is_open:
        log.close()
    os.link(tmp_path / "run" / "log.jsonl", tmp_path / "copy.jsonl")
    before = (tmp_path / "copy.jsonl").read_bytes()
    if not is_open:
        (line,) = read_log(storage, "log")
        log = LogWriter(storage, "log", line)
    log.append(EVENTS[1])
    log.close()
    assert (tmp_path / "copy.jsonl").read_bytes() == before
    assert len(list(read_log(storage, "log"))) == 2


def test_a_pipe_in_the_place_of_a_log_is_damage(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log.jsonl")
    with pytest.raises(CorruptionError, match="regular file"):
        list(read_log(LocalStorage(tmp_path), "log"))


def test_a_disk_that_fills_up_leaves_nothing_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    log = LogWriter(storage, "log")
    log.append(EVENTS[0])
    real = os.write
    parts = iter([True, False])

    def full(descriptor: int, data: memoryview) -> int:
        if next(parts):
            return real(descriptor, data[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="space"):
        log.append(EVENTS[1])
    monkeypatch.undo()
    log.append(EVENTS[2])
    log.close()
    assert [line.number for line in read_log(storage, "log")] == [1, 2]
