"""A channel of a group for the saves of one manager.

Saves run in threads, so that those of several managers of one group overlap: in one channel the bytes
of one save would be taken for those of another. No number is used twice, because of a save that failed
messages may still be unread.
"""

from __future__ import annotations

import itertools

from perdure.checkpoint.group_call import GroupCall
from perdure.process_group import Processes

_numbers = itertools.count()
"""The numbers of the channels of which this process is the chief."""


def save_channel(processes: Processes, where: str) -> Processes:
    """A channel that no other manager has. A collective.

    Raises:
        StoreError: The processes save into directories of different names, so that they make the calls
            of several managers in different orders.
    """
    name = where.rstrip("/").rpartition("/")[2]
    number = next(_numbers) if processes.is_chief else 0
    call = GroupCall(processes, f"save into {name}")
    return processes.channel(f"save-{int(call.agree(b'%d' % number, lambda sent: sent[0]))}")
