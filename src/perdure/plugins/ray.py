"""For users of Ray Train: a backend with which `jax.distributed` works with and without GPUs.

    from ray.train.v2.jax import JaxTrainer
    JaxTrainer(loop, jax_config=perdure.plugins.ray.JaxConfig(), scaling_config=...).fit()

Inside the package this module is `perdure.plugins.ray`; `import ray` still means the framework.
"""

from perdure.errors import needs_extra

with needs_extra("ray"):
    from perdure.distribute.jax.ray_backend import JaxConfig

__all__ = ["JaxConfig"]
