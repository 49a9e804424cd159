"""A whole step in one or two dispatches, for one process.

A function takes this path only if the compiler shows that its instructions are those of the
reference. On a platform where that was not measured, the first steps are computed both ways.
"""

from perdure.distribute.jax.fused.proven_programs import ReferencePrograms
from perdure.distribute.jax.fused.step_by_signature import fused_step

__all__ = ["ReferencePrograms", "fused_step"]
