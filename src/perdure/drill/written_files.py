"""Inside a drilled program: its events, also which files it opens for writing and which lines ran.

The last two begin with the import of perdure. Files that native code opens are not seen here.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import cache
from types import CodeType, FrameType
from typing import Any

EVENTS = "events.jsonl"
_WRITES = os.O_WRONLY | os.O_RDWR
_OWN = ("perdure.", "importlib.", "_frozen_importlib")
_EXPORTS = ("perdure.convert", "perdure.look", "perdure.report")  # write what the program asks for
_HELPERS = ("pathlib", "shutil", "tempfile", "os")
_SYSTEM = ("/dev/", "/proc/", "/sys/")
_MOST = 20_000
_MOST_LINES = 5_000_000


def record(directory: str, event: str, **fields: Any) -> None:
    """Append an event of this process to the events of the drilled run in `directory`."""
    worker = int(os.environ.get("RANK") or 0)  # set by the supervisor
    line = {"e": event, "t": time.monotonic(), "w": worker, **fields}
    # One write to a file opened for appending, so that lines of several processes do not mix.
    os.write(_events(directory), json.dumps(line).encode() + b"\n")


@cache
def _events(directory: str) -> int:
    return os.open(os.path.join(directory, EVENTS), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def watch_files(directory: str) -> None:
    """Record from now on each file that this process writes, for the drilled run in `directory`."""
    left = _MOST

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event == "open":
            path, _, flags = arguments
            if not isinstance(flags, int) or not flags & _WRITES:
                return
        elif event == "os.rename":
            path, flags = arguments[1], 0
        else:
            return
        if not isinstance(path, (str, os.PathLike)) or not left:
            return
        frame = sys._getframe(1)
        while frame.f_globals.get("__name__") in _HELPERS and frame.f_back is not None:
            frame = frame.f_back
        module = str(frame.f_globals.get("__name__"))
        if module.startswith(_OWN) and not module.startswith(_EXPORTS):
            return
        absolute = os.path.abspath(path)
        if absolute.startswith(_SYSTEM) or "__pycache__" in absolute:
            return
        left -= 1
        record(directory, "written", path=absolute, append=bool(flags & os.O_APPEND))

    sys.addaudithook(hook)


class LineSigns:
    """Which lines of the program ran since they were asked for last, in the thread that made this.

    It does nothing under a debugger, and ends in a program that runs very many lines.
    """

    def __init__(self) -> None:
        self._lines: set[tuple[str, int]] = set()
        self._left = _MOST_LINES
        self._known: dict[CodeType, bool] = {}
        frame: FrameType | None = sys._getframe(1)
        if sys.gettrace() is not None:
            return
        while frame is not None:
            if self._is_of_program(frame):
                frame.f_trace = self._line
            frame = frame.f_back
        sys.settrace(self._call)

    def take(self) -> str:
        """One text for the set of lines."""
        lines, self._lines = self._lines, set()
        return f"{hash(frozenset(lines)) & 0xFFFFFFFF:08x}" if self._left else ""

    def _is_of_program(self, frame: FrameType) -> bool:
        from perdure.state.reachable import is_program_frame

        known = self._known.get(frame.f_code)
        if known is None:
            known = self._known[frame.f_code] = is_program_frame(frame)
        return known

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._line if self._left and self._is_of_program(frame) else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self._lines.add((frame.f_code.co_filename, frame.f_lineno))
            self._left -= 1
            if not self._left:
                sys.settrace(None)
                return None
        return self._line
