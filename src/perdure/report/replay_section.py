"""The replays of a run in its report: the records in `RUN/replays`, each checked by its own hash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from perdure.report.html_page import Html, badge, note, table
from perdure.store.format import TEMP_SUFFIX, hash_bytes
from perdure.store.storage import Storage

REPLAYS = "replays/"
_HEAD = len('{"digest":"') + 64 + len('",')
_MOST = 100
_KINDS = {"reproduced": "good", "differs": "bad", "not comparable": "warn"}


class _Stretch(Struct):
    start: int | None
    stop: int
    verdict: str
    steps: int
    checkpoints: int
    step: int | None = None
    what: str = ""


class _Record(Struct):
    created: str
    host: str
    command: list[str]
    verdict: str
    stretches: list[_Stretch]


def replay_rows(storage: Storage) -> list[dict[str, Any]]:
    """One row for each record, the newest last; `verdict` is None for one that was changed."""
    rows = []
    for name in sorted(storage.list(REPLAYS))[-_MOST:]:
        if name.endswith(TEMP_SUFFIX):
            continue
        row: dict[str, Any] = {"name": name, "verdict": None}
        try:
            data = storage.read(name)
            record = msgspec.json.decode(data, type=_Record)
            if data[:_HEAD] == b'{"digest":"%b",' % hash_bytes(b"{" + data[_HEAD:]).encode():
                row |= msgspec.to_builtins(record)
        except (OSError, ValueError, RecursionError):
            pass
        rows.append(row)
    return rows


def replay_part(rows: Sequence[Mapping[str, Any]]) -> Html:
    """The table of all replays; nothing if there is none."""
    if not rows:
        return Html("")
    lines = []
    for row in rows:
        if row["verdict"] is None:
            lines.append([row["name"], "", "", "", "", badge("changed", "bad")])
            continue
        steps = [f"{(part['start'] or 0) + 1} to {part['stop']}" for part in row["stretches"]]
        compared = [
            sum(part[name] for part in row["stretches"]) for name in ("steps", "checkpoints")
        ]
        first = [p for p in row["stretches"] if p["step"] is not None]
        verdict = badge(row["verdict"], _KINDS.get(row["verdict"], "plain"))
        place = f"step {first[0]['step']}: {first[0]['what']}" if first else ""
        lines.append(
            [
                row["created"],
                row["host"],
                ", ".join(steps),
                " + ".join(map(str, compared)),
                place,
                verdict,
            ]
        )
    head = ["when", "host", "steps", "steps + checkpoints compared", "first difference", "verdict"]
    part = table(head, lines, "Replays")
    if any(row["verdict"] is None for row in rows):
        part = Html(part + note("Changed: the file does not have the hash that it begins with."))
    return part
