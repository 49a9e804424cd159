"""Processes: starting the workers of one machine, watching them, starting them again, ending them.

Imports no numpy and no framework: the process that watches is to cost little.
"""

from perdure.supervise.group import Ended, Group
from perdure.supervise.options import Limits, RunOptions
from perdure.supervise.record import Attempt, Summary
from perdure.supervise.supervisor import Observer, Supervisor

__all__ = [
    "Attempt",
    "Ended",
    "Group",
    "Limits",
    "Observer",
    "RunOptions",
    "Summary",
    "Supervisor",
]
