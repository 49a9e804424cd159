"""A disk that is full, for one file of the supervisor."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest


class FullDisk:
    """Lets `os.write` write as many bytes to files of a name as there is space."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, space: int) -> None:
        self.space, self.fired = space, 0
        write = os.write

        def limited(file: int, data: Any) -> int:
            if not os.readlink(f"/proc/self/fd/{file}").endswith(name):
                return write(file, data)
            if not self.space:
                self.fired += 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written = write(file, data[: self.space])
            self.space -= written
            return written

        monkeypatch.setattr(os, "write", limited)
