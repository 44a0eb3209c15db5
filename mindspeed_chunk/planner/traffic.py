"""Collectives of one optimizer step on one rank: calls, bytes, and seconds on their links.

T tokens of one micro batch on this rank, H hidden, s bytes per element, m micro batches per step.

    FSDP2      per unit and micro batch one gather in the forward, one in the backward, and a reduce-scatter:
               MindSpeed-MM's train_step (fsdp/train/train_engine.py) marks the last pass with set_is_last_backward and
               set_requires_all_reduce (fsdp/utils/utils.py), but neither stops a pass from reduce-scattering.
               ChunkMBS runs m micro-chunks inside one pass, so m passes become 1
    EP         per MoE layer and pass 2N all-to-alls forward, 2N backward, and 2N if the block is recomputed
    CP         see `sequence.py`; in a recompute those of the forward again
    TP, PP     see `compare/megatron.py`
"""

from __future__ import annotations

import math
from typing import NamedTuple

from mindspeed_chunk.hardware import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER, Device, collective_seconds
from mindspeed_chunk.moe.costs.rows import LayerShape, row_bytes
from mindspeed_chunk.planner.layout import Layout
from mindspeed_chunk.planner.model import ModelSize
from mindspeed_chunk.planner.precision import Recipe
from mindspeed_chunk.planner.state import Sharding, units

REDUCED = 4  # bytes of an element while gradients are summed: `reduce_dtype: fp32`


class Collective(NamedTuple):
    """Collectives of one kind in one kind of group, in one step.

    Attributes:
        nbytes: of all calls together: the whole tensor of a gather or a reduction; for an all-to-all the rows that a
            rank sends, including those to itself.
        ranks: of the group.
    """

    group: str
    kind: str
    ranks: int
    calls: int
    nbytes: int

    def seconds(self, layout: Layout, devices_per_node: int, device: Device) -> float:
        """On the busier link, if no two calls run at the same time."""
        if not self.calls or self.ranks == 1:
            return 0.0
        span = layout.span(self.group, devices_per_node)
        return self.calls * collective_seconds(self.kind, self.nbytes / self.calls, span, device)


class Exchanges(NamedTuple):
    """All-to-alls of one MoE layer, forward and backward of one pass: calls, and bytes that a rank sends to others."""

    calls: int
    sent: int


def exchanges(
    shape: LayerShape,
    *,
    num_chunks: int,
    keep: str = "activations",
    recompute: bool = False,
    skip_unread: bool = False,
    to_others: int | None = None,
    from_others: int | None = None,
) -> Exchanges:
    """The all-to-alls of one layer and pass.

    Args:
        recompute: the block around the layer is recomputed; `skip_unread`: with `chunk_moe_skip_unread`, and nothing
            after the layer reads its output.
        to_others, from_others: rows of all chunks that this rank sends to other ranks' experts, and that its experts
            get from other ranks; balanced if they are not given.
    """
    balanced = -(-math.ceil(shape.tokens * shape.copies) * (shape.ep - 1) // shape.ep)  # a single row is not none
    to_others = balanced if to_others is None else to_others
    from_others = balanced if from_others is None else from_others
    row = row_bytes(shape, keep)
    forward = to_others * row.dispatch + from_others * row.combine
    calls, sent = 4 * num_chunks, forward + to_others * row.backward_dispatch + from_others * row.backward_combine
    if recompute and not skip_unread:
        calls, sent = calls + 2 * num_chunks, sent + forward
    elif recompute and keep != "input":
        calls, sent = calls + num_chunks, sent + to_others * row.dispatch
    return Exchanges(calls, sent) if shape.ep > 1 else Exchanges(0, 0)


def fsdp_traffic(
    model: ModelSize, sharding: Sharding, recipe: Recipe, passes: int, *, sync_every_pass: bool = True
) -> list[Collective]:
    """FSDP2's gathers and reduce-scatters in one step of `passes` forward and backward passes.

    A unit gathers `recipe.gathered` bytes per element, and reduces in fp32. Units that are not trained are not run.

    Args:
        sync_every_pass: every pass reduce-scatters, as in MindSpeed-MM; without it only the last one does, as in the
            embedded trainer (`set_requires_gradient_sync`), which therefore holds whole gradients between passes.
    """
    syncs = passes if sync_every_pass else 1
    by_group: dict[tuple[str, str, int], list[int]] = {}
    for unit in units(model, sharding):
        if unit.trained and unit.ranks > 1:
            group, elements = "edp" if unit.expert else "dp_cp", unit.gathered()
            gathers = by_group.setdefault((group, ALL_GATHER, unit.ranks), [0, 0])
            gathers[0] += 2 * passes * unit.number
            gathers[1] += 2 * passes * unit.number * elements * recipe.gathered
            reductions = by_group.setdefault((group, REDUCE_SCATTER, unit.ranks), [0, 0])
            reductions[0] += syncs * unit.number
            reductions[1] += syncs * unit.number * elements * REDUCED
    return [Collective(group, kind, ranks, *totals) for (group, kind, ranks), totals in by_group.items()]


def expert_traffic(
    model: ModelSize, shape: LayerShape, *, passes: int, num_chunks: int, keep: str, recompute: bool
) -> list[Collective]:
    """The all-to-alls of one step, balanced; `shape` is that of one pass."""
    if shape.ep == 1:
        return []
    one = exchanges(shape, num_chunks=num_chunks, keep=keep, recompute=recompute)
    layers = model.num_hidden_layers
    sent_and_own = one.sent * shape.ep // (shape.ep - 1)
    return [Collective("ep", ALL_TO_ALL, shape.ep, layers * passes * one.calls, layers * passes * sent_and_own)]
