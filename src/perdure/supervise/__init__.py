"""Processes: starting the workers of one machine, watching them, starting them again, ending them.

Imports no numpy and no framework: the process that watches is to cost little.
"""

from perdure.supervise.history import AttemptRecord, Summary
from perdure.supervise.options import Limits, RunOptions
from perdure.supervise.supervisor import Observer, Supervisor
from perdure.supervise.worker_group import Ended, WorkerGroup

__all__ = [
    "AttemptRecord",
    "Ended",
    "Limits",
    "Observer",
    "RunOptions",
    "Summary",
    "Supervisor",
    "WorkerGroup",
]
