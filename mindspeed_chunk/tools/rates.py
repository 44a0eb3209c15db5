"""The measured rates of a device and its links, as the content of a device file of `mindspeed-chunk plan`.

The slowest rank's figures, so they are the same on all ranks.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_chunk import ops
from mindspeed_chunk.device import launch_seconds
from mindspeed_chunk.dist import all_to_all
from mindspeed_chunk.moe.schedule import build as build_schedule
from mindspeed_chunk.ops.groups import Groups
from mindspeed_chunk.tools import devices
from mindspeed_chunk.tools.bench_cases import build
from mindspeed_chunk.tools.bench_layer import BenchLayer, seconds_of
from mindspeed_chunk.tools.link import bits_per_second

MEGABYTES = (0.25, 0.5, 1, 2, 4, 8, 16)
_REPEATS, _SMALL_CALLS = 5, 10
_SMALL = {"tokens": 16, "hidden": 16, "intermediate": 16, "top_k": 2, "experts": 4, "routing": "balanced"}
FORMATS = {"float32": "fp32", "bfloat16": "bf16"}


def measure(options: argparse.Namespace, layer: BenchLayer, chunks: int) -> dict[str, Any]:
    """The content of a device file.

    Args:
        layer: of these options, between the ranks.
        chunks: matmuls and moves are those of one chunk of so many.
    """
    flops, moved = _compute_rates(options, layer, options.tokens // chunks)
    small = BenchLayer(argparse.Namespace(**{**vars(options), **_SMALL}), None)
    messages = [_message(megabytes, layer) for megabytes in MEGABYTES]
    rate = bits_per_second(options.link) / 8 if options.link else messages[-1][0] / messages[-1][1]
    return {
        "name": f"{devices.name(options.device)}, link {options.link or 'not limited'}",
        "memory_gb": 1 if options.device == "cpu" else devices.memory_bytes(options.device) / 1e9,
        f"flops_{FORMATS[options.dtype]}": flops / 1e12,
        "memory_gb_per_s": moved / 1e9,
        **_host(options, small),
        "intra_gb_per_s": rate / 1e9,
        "inter_gb_per_s": rate / 1e9,
        "intra_messages": messages,
        "source": "measured by mindspeed-chunk bench",
    }


def _median(function: Callable[[], object], layer: BenchLayer) -> float:
    return statistics.median([seconds_of(function, layer.device) for _ in range(_REPEATS + 1)][1:])


def _message(megabytes: float, layer: BenchLayer) -> list[float]:
    """[bytes, seconds] of one all-to-all in which each rank sends so much to the others together."""
    ranks, (_, hidden) = dist.get_world_size(), layer.x_TH.shape
    rows = max(1, int(megabytes * 1e6) // (hidden * layer.x_TH.element_size() * (ranks - 1)))
    sent, splits = layer.x_TH.new_zeros(ranks * rows, hidden), [rows] * ranks

    def exchange() -> None:
        all_to_all(sent, splits, splits, dist.group.WORLD, "message", max_split=rows)[1].wait()

    return [megabytes * 1e6, _median(exchange, layer)]


def _compute_rates(options: argparse.Namespace, layer: BenchLayer, tokens: int) -> tuple[float, float]:
    """Operations per second of the experts' matmuls, and bytes per second of P, U and SwiGLU."""
    back_end = ops.resolve("auto", layer.device)
    x_TH, index_TK, weight_TK = (t.detach()[:tokens] for t in (layer.x_TH, layer.index_TK, layer.weight_TK))
    fc1_LHF, fc2_LIH = layer.fc1_LHF.detach(), layer.fc2_LIH.detach()
    each, size = index_TK.numel() // len(fc1_LHF), x_TH.element_size()
    all_RH, order_R = back_end.permute(x_TH, index_TK)
    rows_RH, groups = all_RH[: each * len(fc1_LHF)], Groups.of([[each] * len(fc1_LHF)], layer.device)
    fc1_RF = back_end.grouped_mm(rows_RH, fc1_LHF, groups)
    activated_RI, total_LHF = back_end.swiglu(fc1_RF, 0.0), torch.zeros_like(fc1_LHF, dtype=torch.float32)

    def matmuls() -> None:
        back_end.grouped_mm(rows_RH, fc1_LHF, groups)
        back_end.grouped_mm(activated_RI, fc2_LIH, groups)
        back_end.grouped_mm_wgrad(rows_RH, fc1_RF, groups, total_LHF)

    def moves() -> None:
        back_end.permute(x_TH, index_TK)
        back_end.unpermute(all_RH, order_R, weight_TK)
        back_end.swiglu(fc1_RF, 0.0)

    operations = len(rows_RH) * options.hidden * options.intermediate * (4 + 2 + 4)
    nbytes = size * (2 * (tokens + len(all_RH)) * options.hidden + 3 * len(rows_RH) * options.intermediate)
    return operations / _median(matmuls, layer), nbytes / _median(moves, layer)


def _host(options: argparse.Namespace, small: BenchLayer) -> dict[str, float]:
    """What actions cost besides their work: a CPU ends each of them, the host of another device only launches them."""
    if options.device == "cpu":
        return {"call_us": 1e6 * _call_seconds(small)}
    return {"launch_us": 1e6 * launch_seconds(small.device)}


def _call_seconds(small: BenchLayer) -> float:
    """What an action costs that is no all-to-all, with next to no data: the slope of a call's time over its actions."""
    seconds, actions = {}, {}
    for n in (1, 4):
        case = build(f"rolling:{n}")
        seconds[n] = statistics.median([small.time(case, _SMALL_CALLS) for _ in range(_REPEATS + 1)][1:])
        both = build_schedule("rolling", n) + build_schedule("rolling", n, backward=True)
        actions[n] = sum(action.kind not in "DC" for action in both)
    return max(0.0, (seconds[4] - seconds[1]) / (actions[4] - actions[1]))
