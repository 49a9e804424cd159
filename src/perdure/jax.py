"""What a user of JAX needs: the strategies on the JAX engine.

Inside the package this module is `perdure.jax`; `import jax` still means the framework.
"""

from perdure.distribute.jax_engine import (
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
)

__all__ = ["MirroredStrategy", "MultiWorkerMirroredStrategy", "OneDeviceStrategy"]
