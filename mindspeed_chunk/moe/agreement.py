"""What the ranks of an expert-parallel group compare before they exchange rows."""

from __future__ import annotations

import weakref
from typing import Literal

import torch.distributed as dist

from mindspeed_chunk.config import ChunkMoEConfig
from mindspeed_chunk.dist import agree, check_all_to_all, group_size
from mindspeed_chunk.moe.arguments import Arguments


def settings_of(config: ChunkMoEConfig, arguments: Arguments, num_chunks: int | None) -> dict[str, object]:
    """The settings that must be equal on every rank of the group, since exchanges would not match otherwise.

    Args:
        num_chunks: the number of chunks that was chosen, if any.
    """
    needs = arguments.needs()
    return {
        "moe_num_chunks": config.moe_num_chunks,
        "moe_chunk_size": config.moe_chunk_size,
        "chunk_moe_auto": config.chunk_moe_auto,
        "chunk_moe_max_rows": config.chunk_moe_max_rows,
        "chunks chosen": num_chunks,
        "chunk_moe_schedule": config.chunk_moe_schedule,
        "chunk_moe_lookahead": config.chunk_moe_lookahead,
        "chunk_moe_keep": config.keep,
        "chunk_moe_dispatch": config.chunk_moe_dispatch,
        "chunk_moe_skip_unread": config.chunk_moe_skip_unread,
        "num_experts": arguments.num_experts,
        "experts per token": arguments.selected_experts.shape[1],
        "hidden size": arguments.x_TH.shape[1],
        "dtype of the rows": arguments.compute_dtype,
        "dtype of the router weights": arguments.routing_weights.dtype,
        "needs a gradient of the rows": needs.rows,
        "needs a gradient of the router weights": needs.weights,
        "needs a backward": needs.any,
    }


class Agreement:
    """The first calls of one dispatcher in which the ranks of each group have compared their settings."""

    def __init__(self) -> None:
        self._compared: weakref.WeakKeyDictionary[dist.ProcessGroup, set[tuple]] = weakref.WeakKeyDictionary()

    def reach(
        self,
        direction: Literal["forward", "recompute"],
        arguments: Arguments,
        settings: dict[str, object],
        error: str | None,
    ) -> None:
        """At the first call of its direction with this group and number of experts, compare all settings.

        The very first one checks the exchange, too. Later calls compare a checksum in the plan's gather. The settings
        that are compared here determine the size of that gather.

        Args:
            error: what is wrong with the call on this rank; it is raised on every rank.
        """
        group, call = arguments.group, (direction, arguments.num_experts)
        if group is None or group_size(group) == 1:
            return
        compared = self._compared.setdefault(group, set())
        if call in compared:
            return
        device = arguments.x_TH.device
        if not compared:
            wire_error = check_all_to_all(group, device)
            error = error or wire_error
        agree(settings, error, group, device)
        compared.add(call)
