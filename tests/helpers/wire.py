"""Counting and delaying the collectives of one layer call, for tests."""

import weakref

import torch
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


class HeldWork:
    """An all-to-all whose rows arrive at `wait()` and no sooner; it also sees what became of the send buffer."""

    original = None
    waits = 0

    def __init__(self, output, rows, output_split_sizes, input_split_sizes, group, async_op):
        assert async_op
        self.output, self.rows, self.sent = output, weakref.ref(rows), rows.clone()
        self.arrived = torch.empty_like(output)
        type(self).original(self.arrived, rows, output_split_sizes, input_split_sizes, group=group)
        output.view(torch.uint8).fill_(0xFF)  # NaN in every dtype

    def wait(self):
        rows = self.rows()
        assert rows is not None, "the send buffer was freed before the wait"
        assert torch.equal(rows.view(torch.uint8), self.sent.view(torch.uint8)), "it was written to before the wait"
        self.output.copy_(self.arrived)
        type(self).waits += 1


def prepared(case, rank, world_size):
    """A layer, its leaves, and a dispatcher whose one-time agreement is behind it."""
    layer = Layer(case, rank, world_size)
    leaves = layer.leaves(
        {"x": layer.x, "weight": layer.weight, "fc1": layer.local(layer.fc1_EHF), "fc2": layer.local(layer.fc2_EIH)}
    )
    dispatcher = ChunkMoEDispatcher(case.config(), weight_layout=case.layout)
    layer.call(dispatcher, leaves, dist.group.WORLD)
    return layer, leaves, dispatcher
