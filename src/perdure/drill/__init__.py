"""The drill: runs a user's program under injected faults and checks that it ends with the same bits."""

from perdure.drill.drill import DrillOptions, DrillReport, run_drill
from perdure.drill.fault_plan import KINDS

__all__ = ["KINDS", "DrillOptions", "DrillReport", "run_drill"]
