"""Whether `DistributedDataParallel` (DDP) broadcasts the buffers of the first process before the next
forward pass: it does not after a pass without an exchange of gradients (`no_sync`, accumulation)."""

from __future__ import annotations

import msgspec

from perdure.state.extra_members import ExtraMember, Restoring, Saving, json_leaf
from perdure.state.torch_buckets import ddp_modules
from perdure.state.walk import Walk
from perdure.store.leaf import Leaf

_EXCHANGES = "require_forward_param_sync"
_decoder = msgspec.json.Decoder(dict[str, bool])


class DdpBufferSync(ExtraMember):
    """Stores the DDP modules that will not broadcast their buffers before the next forward pass; the
    others have no leaf and will. Refuses nothing."""

    def capture(self, saving: Saving) -> dict[str, Leaf]:
        found = ddp_modules(saving.walk.torch_objects("nn.Module"))
        without = {p: False for p, ddp in found if not getattr(ddp, _EXCHANGES, True)}
        return {f"process/{saving.process}/exchanges": json_leaf(without)} if without else {}

    def restore(self, restoring: Restoring, walk: Walk) -> list[str]:
        stored = restoring.by_path("exchanges", _decoder)
        for path, ddp in ddp_modules(walk.torch_objects("nn.Module")):
            setattr(ddp, _EXCHANGES, stored.get(path, True))
        return []
