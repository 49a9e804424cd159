"""A channel of a group for the saves of one manager.

Saves run in threads, so that those of several managers of one group overlap: in one channel the bytes
of one save would be taken for those of another.
"""

from __future__ import annotations

import itertools
import threading

from perdure.checkpoint.group_call import GroupCall
from perdure.process_group import Processes

_guard = threading.Lock()
_taken: set[int] = set()
"""The numbers of the channels that managers use of which this process is the chief."""


class SaveChannel:
    """The channel `processes`, which no other manager uses until `release`.

    Making it is a collective.

    Raises:
        StoreError: The processes save into directories of different names, so that they make the calls
            of several managers in different orders.
    """

    def __init__(self, processes: Processes, where: str) -> None:
        name = where.rstrip("/").rpartition("/")[2]
        call = GroupCall(processes, f"save into {name}")
        self._number = _take() if processes.is_chief else None
        try:
            agreed = int(call.agree(b"%d" % (self._number or 0), lambda sent: sent[0]))
        except BaseException:
            self.release()
            raise
        self.processes = processes.channel(f"save-{agreed}")

    def release(self) -> None:
        """Let another manager use the channel. May be called twice."""
        with _guard:
            if self._number is not None:
                _taken.discard(self._number)
            self._number = None


def _take() -> int:
    with _guard:
        number = next(number for number in itertools.count() if number not in _taken)
        _taken.add(number)
    return number
