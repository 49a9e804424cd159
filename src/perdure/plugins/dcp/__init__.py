"""For users of PyTorch's distributed checkpoint (DCP): a storage that writes run directories.

    dcp.save(state_dict, storage_writer=perdure.plugins.dcp.Writer("runs/a", step))
    dcp.load(state_dict, storage_reader=perdure.plugins.dcp.Reader("runs/a"))

Invariant: a checkpoint is committed by its manifest, after all ranks have made their packs durable, and
no byte is loaded unverified.
"""

from perdure.errors import needs_extra
from perdure.plugins.trainer_library import require_version

require_version("torch", "torch", "2.6", "3")
with needs_extra("torch"):
    from perdure.plugins.dcp.storage_reader import Reader
    from perdure.plugins.dcp.storage_writer import Writer

__all__ = ["Reader", "Writer"]
