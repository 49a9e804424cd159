"""SIGTERM as a request to save and leave: a flag that the loop asks for at the end of a step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

EXIT_PREEMPTED = 75
"""Exit status of a run that saved and wants to be started again (EX_TEMPFAIL of sysexits.h)."""


class PreemptionFlag:
    """Remembers a SIGTERM from `install` on; until then the signal keeps its old meaning.

    Installing late is deliberate: a program that never asks must still be stopped by SIGTERM.
    """

    def __init__(self) -> None:
        self.raised = False
        self._installed = False
        self._previous: Any = None

    def install(self) -> None:
        """Take over SIGTERM. May be called often; does nothing off the main thread."""
        if not self._installed and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)
            self._installed = True

    def remove(self) -> None:
        """Give the signal back to its former handler."""
        if self._installed and threading.current_thread() is threading.main_thread():
            # getsignal gives None for a handler that was not set from Python; that one is kept.
            if self._previous is not None:
                signal.signal(signal.SIGTERM, self._previous)
            self._installed = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.raised = True
