"""Cases of one MoE layer that more than one back end is tested with, and one call of it that is watched for waits."""

import itertools

import torch
from torch.utils.checkpoint import checkpoint

from host_sync import no_host_sync
from layer import Case, Layer
from mindspeed_chunk.config import KEEPS, SCHEDULES, ChunkMoEConfig
from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher
from mindspeed_chunk.moe.replay import replay_contexts
from mindspeed_chunk.observe import observe

ROUTINGS = (
    {"routing": "random"},
    {"routing": "balanced"},
    {"routing": "one_rank"},
    {"routing": "alternate", "tokens": (12,), "top_k": 2},
    {"routing": "first", "top_k": 1, "tokens": (7,)},
    {"routing": "last", "top_k": 1, "tokens": (7,)},
)
SIZES = (
    {"tokens": (1, 7)},
    {"tokens": (5, 2), "chunks": 4},
    {"tokens": (2,), "chunks": 5},
    {"tokens": (0, 6)},
    {"tokens": (0,)},
    {"chunk_size": 4, "chunks": 0, "tokens": (13, 2)},
    {"chunk_size": 1, "chunks": 0, "tokens": (1, 0)},
    {"experts": 4, "top_k": 2},
)
OTHERS = (
    {"padded": True},
    {"padded": True, "routing": "one_rank", "keep": "rows"},
    {"limit": 0.5},
    {"dense_weights": True},
    {"activation": "module"},
    {"activation": "module", "routing": "one_rank"},
    {"router_dtype": torch.float32, "dtype": torch.bfloat16},
    {"router_dtype": torch.float64, "dtype": torch.float32},
    {"frozen": ("x", "weight")},
    {"frozen": ("x",)},
    {"frozen": ("weight", "fc2")},
    {"frozen": ("fc1", "fc2")},
    {"frozen": ("x", "weight", "fc1", "fc2")},
)
WAIT_CASES = [
    Case(chunks=n, schedule=schedule, keep=keep, dtype=dtype)
    for n, schedule, keep, dtype in itertools.product((1, 2, 3, 5), SCHEDULES, KEEPS, (torch.float64, torch.bfloat16))
]
FITS = {"hidden": 24, "intermediate": 8, "experts": 6, "top_k": 3}  # widths that a grouped matmul takes


def call_cases():
    for keep, schedule, dtype in itertools.product(KEEPS, SCHEDULES, (torch.float32, torch.float64)):
        yield Case(chunks=3, keep=keep, schedule=schedule, dtype=dtype, **FITS)
    for change in (
        {"padded": True},
        {"limit": 0.5},
        {"tokens": (0, 5)},
        {"layout": "LFH"},
        {"dense_weights": True},
        {"router_dtype": torch.float32, "dtype": torch.bfloat16},
        {"frozen": ("x", "weight")},
        {"activation": "module"},
        {"chunk_size": 4, "chunks": 0},
    ):
        yield Case(**{"chunks": 3, "dtype": torch.float32, **FITS, **change})


def watched(case, *, checkpointed, rank=0, ranks=1, group=None):
    """Forward and backward of a call that is not the first; returns how often the host waited for a copy."""
    layer = Layer(case, rank, ranks)
    leaves = layer.leaves(
        {"x": layer.x, "weight": layer.weight, "fc1": layer.local(layer.fc1_EHF), "fc2": layer.local(layer.fc2_EIH)}
    )
    config = ChunkMoEConfig(**{**vars(case.config()), "chunk_moe_skip_unread": checkpointed})
    dispatcher = ChunkMoEDispatcher(config, weight_layout=case.layout)

    def block(x):
        return layer.call(dispatcher, {**leaves, "x": x}, group) * 1

    block(leaves["x"])  # agrees with the other ranks, and tries the activation
    with no_host_sync(), observe() as events:
        if checkpointed:
            out = checkpoint(
                block, leaves["x"], use_reentrant=False, preserve_rng_state=False, context_fn=replay_contexts
            )
        else:
            out = block(leaves["x"])
        out.backward(layer.grad)
    return sum(event.kind == "host_copy" for event in events)
