"""Chooses the numbers of a run before it starts: memory, traffic and time of a model on a number of devices.

Called by `mindspeed-chunk plan`. In code, the parts that answer one question each:

    expert_memory(LayerShape(...), num_chunks=4, keep="rows")    bytes that an MoE layer call keeps and holds at most
    chunk_times(LayerShape(...), device, span, num_chunks=4)     its simulated time, and how much of it is exposed
    exchanges(LayerShape(...), num_chunks=4)                     its all-to-alls, and the bytes that a rank sends
    best_num_chunks(LayerShape(...), device, span)               N, from memory and time
    state_bytes(load_model("35b"), Sharding(...), recipe)        parameters, gradients, optimizer state of one rank
    Estimator(Job(...))(Setting(...))                            memory and seconds of a whole step of one setting

Formulas are in the modules' docstrings, and explained in docs/planner.md. Nothing here needs torch.
"""

from mindspeed_chunk.hardware import Device, GroupShape, Link
from mindspeed_chunk.moe.costs.choice import ChunkChoice, best_num_chunks
from mindspeed_chunk.moe.costs.memory import ExpertMemory, expert_memory
from mindspeed_chunk.moe.costs.rows import ChunkRows, LayerShape, balanced_rows
from mindspeed_chunk.moe.costs.timing import ChunkTimes, chunk_times
from mindspeed_chunk.planner.compare.recipes import RECIPES
from mindspeed_chunk.planner.device import load_device
from mindspeed_chunk.planner.estimate import Estimate, Estimator
from mindspeed_chunk.planner.layout import Layout, layouts
from mindspeed_chunk.planner.model import ModelSize, load_model
from mindspeed_chunk.planner.precision import Recipe
from mindspeed_chunk.planner.setting import Job, Setting
from mindspeed_chunk.planner.state import Sharding, StateBytes, state_bytes
from mindspeed_chunk.planner.traffic import Exchanges, exchanges

Span = GroupShape  # its name before 0.2; remove it in 0.3

__all__ = [
    "RECIPES",
    "ChunkChoice",
    "ChunkRows",
    "ChunkTimes",
    "Device",
    "Estimate",
    "Estimator",
    "Exchanges",
    "ExpertMemory",
    "GroupShape",
    "Job",
    "Layout",
    "LayerShape",
    "Link",
    "ModelSize",
    "Recipe",
    "Setting",
    "Sharding",
    "Span",
    "StateBytes",
    "balanced_rows",
    "best_num_chunks",
    "chunk_times",
    "exchanges",
    "expert_memory",
    "layouts",
    "load_device",
    "load_model",
    "state_bytes",
]
