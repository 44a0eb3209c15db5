"""Bytes of a decoder block's activations under each recomputation policy, and the forward work a policy repeats.

T tokens of one micro-chunk on this rank, H hidden, s bytes per element, L blocks. For blocks with fused attention
kernels, which keep queries, keys, values and the output. The bytes of an MoE layer are exact (`moe/costs/memory.py`);
the rest is a count of the operands that each operation's gradient needs, by the method of Korthikanti et al.
(arXiv:2205.05198).

    none       L x block                            no forward work is repeated
    selective  L x (block - attention core)         the attention core again: little work, much memory
    full       L x T H s + one block                the whole forward again: a third more work of the blocks
    sqrt       ceil(L / k) x T H s + k blocks, k = round(sqrt(L)): every k-th block's input is kept (Chen et al.,
               arXiv:1604.06174); the same work again
    offload    full, with the inputs on the host: two of them are here at a time
"""

from __future__ import annotations

import math
from typing import NamedTuple

from mindspeed_chunk.moe.costs.memory import ExpertMemory
from mindspeed_chunk.planner.model import ModelSize

POLICIES = ("none", "selective", "full", "sqrt", "offload")
RECOMPUTED = ("full", "sqrt", "offload")  # those that run the whole forward of a block again
_FP32 = 4  # bytes
_OFFLOADED_HERE = 2  # block inputs: one on its way, one in use


class BlockBytes(NamedTuple):
    """Bytes that one block keeps for its backward, with nothing recomputed.

    Attributes:
        core: of these, the bytes of its attention core (queries, keys, values, output), the mean over the layers.
    """

    total: int
    core: int
    input: int


class Activations(NamedTuple):
    """Bytes of all blocks of one rank.

    Attributes:
        kept: alive from the forward to the backward.
        working: the block, or blocks, whose backward runs.
        host: on the host.
        again: forward work that is repeated, as a share of the blocks' forward.
    """

    kept: int
    working: int
    host: int
    again: float


def block_bytes(model: ModelSize, tokens: int, element_size: int, expert: ExpertMemory, tp: int = 1) -> BlockBytes:
    """The mean block of a model; TP splits everything except tensors of width H."""
    hidden, size = model.hidden_size, element_size
    full = model.num_full_attention / model.num_hidden_layers
    query, key = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    # queries with the gate, normed queries, output, gated output; keys and values, normed keys; the log-sum-exp
    attention = (5 * query + 3 * key) * size + model.num_attention_heads * _FP32
    attention_core = (2 * query + 2 * key) * size + model.num_attention_heads * _FP32
    convolved, value = 2 * model.linear_key_width + model.linear_value_width, model.linear_value_width
    # before and after the convolution; queries and keys, normed and repeated to the value heads; gate, output, gated
    # output; decay and rate of each head
    delta = (2 * convolved + 2 * value + 3 * value) * size + 2 * model.linear_num_value_heads * _FP32
    delta_core = (4 * value) * size + 2 * model.linear_num_value_heads * _FP32
    # inputs and outputs of two norms; the shared expert: two projections, their product, its output
    shared = (4 * hidden + hidden) * size + 3 * model.shared_expert_intermediate_size * size / tp
    router = 2 * model.num_experts * _FP32
    core = full * attention_core + (1 - full) * delta_core
    rest = full * attention + (1 - full) * delta
    total = tokens * (shared + router + rest / tp) + expert.kept
    return BlockBytes(round(total), round(tokens * core / tp), tokens * hidden * size)


def activations(policy: str, block: BlockBytes, layers: int, core_share: float = 0.0) -> Activations:
    """Bytes of `layers` blocks under one of `POLICIES`.

    Args:
        core_share: the share of the attention core in a block's forward work.
    """
    if policy == "none":
        return Activations(layers * block.total, 0, 0, 0.0)
    if policy == "selective":
        return Activations(layers * (block.total - block.core), block.core, 0, core_share)
    if policy == "full":
        return Activations(layers * block.input, block.total, 0, 1.0)
    if policy == "sqrt":
        stride = max(1, round(math.sqrt(layers)))
        return Activations(-(-layers // stride) * block.input, stride * block.total, 0, 1.0)
    here = min(layers, _OFFLOADED_HERE)
    return Activations(here * block.input, block.total, (layers - here) * block.input, 1.0)
