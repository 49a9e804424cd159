"""The drill: a program of the user's own, under faults on purpose, ends with the same bits or not."""

from perdure.supervise.drill.campaign import DrillOptions, Report, run_drill
from perdure.supervise.drill.plan import KINDS

__all__ = ["KINDS", "DrillOptions", "Report", "run_drill"]
