"""What every test runs under, whatever machine and shell it is started from.

Set before the first import of JAX, and inherited by every process that a test starts. The number of
virtual CPU devices is left alone: a test that needs several says so to its own process.
"""

from __future__ import annotations

import os

from hypothesis import settings

os.environ["JAX_PLATFORMS"] = "cpu"
# The size of XLA's thread pool decides bits of convolutions, and follows the machine if not pinned.
os.environ["PJRT_NPROC"] = "8"
# A cluster that the surrounding job belongs to is not the one that a test describes.
os.environ.pop("TF_CONFIG", None)

# The same examples in every run: a failure that is seen once is seen again.
settings.register_profile("perdure", derandomize=True, deadline=None, print_blob=False)
settings.load_profile("perdure")
