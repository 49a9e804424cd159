"""The drill: a program of the user's own, under faults on purpose, ends with the same bits or not."""

from perdure.drill.drill import DrillOptions, DrillReport, run_drill
from perdure.drill.fault_plan import KINDS

__all__ = ["KINDS", "DrillOptions", "DrillReport", "run_drill"]
