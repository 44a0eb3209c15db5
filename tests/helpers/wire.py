"""Counting the collectives of one layer call, for tests."""

import torch.distributed as dist

from layer import Layer
from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher

COLLECTIVES = (
    "all_to_all_single",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_gather",
    "broadcast",
)


class Counted:
    """Counts the calls of torch.distributed itself, under the names that do the work."""

    def __enter__(self):
        self.calls, self.originals = [], {}
        for name in COLLECTIVES:
            if hasattr(dist, name):
                self.originals[name] = getattr(dist, name)
                setattr(dist, name, self._counting(name, self.originals[name]))
        return self

    def _counting(self, name, original):
        def call(*args, **kwargs):
            self.calls.append(name)
            return original(*args, **kwargs)

        return call

    def __exit__(self, *_):
        for name, original in self.originals.items():
            setattr(dist, name, original)

    def take(self):
        counted = {"all_to_all": 0, "gather": 0, "other": 0}
        for name in self.calls:
            key = {"all_to_all_single": "all_to_all"}.get(name, "gather" if name.startswith("all_gather_") else "other")
            counted[key] += 1
        self.calls.clear()
        return counted


def prepared(case, rank, world_size):
    """A layer, its leaves, and a dispatcher whose one-time agreement is behind it."""
    layer = Layer(case, rank, world_size)
    leaves = layer.leaves(
        {"x": layer.x, "weight": layer.weight, "fc1": layer.local(layer.fc1_EHF), "fc2": layer.local(layer.fc2_EIH)}
    )
    dispatcher = ChunkMoEDispatcher(case.config(), weight_layout=case.layout)
    layer.call(dispatcher, leaves, dist.group.WORLD)
    return layer, leaves, dispatcher
