"""The number of chunks of a layer call: as configured, chosen at the first call, or more if one would be too large.

`costs` chooses it from the rows that the ranks will send and from rates that are measured in the call. The figures are
the same on every rank, and so is the number.

G ranks of the group, S slices that were counted, E experts, K experts per token, H hidden.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import time
from collections.abc import Callable

import torch

from mindspeed_chunk.config import ChunkMoEConfig
from mindspeed_chunk.device import HostCopy, accelerator, launch_seconds
from mindspeed_chunk.dist import all_reduce_max, all_to_all, group_size
from mindspeed_chunk.hardware import Device, Link
from mindspeed_chunk.log import Rarely, say, say_once
from mindspeed_chunk.moe.arguments import Arguments
from mindspeed_chunk.moe.costs.choice import ChunkChoice, best_num_chunks
from mindspeed_chunk.moe.costs.rows import ChunkRows
from mindspeed_chunk.moe.plan import Counts
from mindspeed_chunk.ops import BackEnd
from mindspeed_chunk.ops.groups import Groups

CANDIDATES = (1, 2, 4, 8, 16)
_REPEATS = 3
_SMALL = 16  # rows of the small message, to each rank


class NumChunks:
    """The number of chunks of one dispatcher's layer calls, without `moe_chunk_size`.

    Attributes:
        settled: N; None until it is chosen.
    """

    def __init__(self, config: ChunkMoEConfig) -> None:
        self._config = config
        self.settled = None if config.chunk_moe_auto else max(1, config.moe_num_chunks)
        self._over = Rarely()

    @property
    def may_change(self) -> bool:
        """Whether the counts decide; if so, they must be read before the first chunk is cut."""
        return self.settled is None or self._config.chunk_moe_max_rows > 0

    @property
    def slices(self) -> int:
        """The number of slices in which the next call's rows are counted."""
        slices = self.settled or 1
        while self.may_change and slices < CANDIDATES[-1]:
            slices *= 2
        return slices

    def choose(self, counts: Counts, arguments: Arguments, ops: BackEnd, dispatch: str) -> int:
        """N for this call, a divisor of the slices. A collective if it is chosen for the first time.

        Args:
            counts: of the call's slices, the same on every rank.
            dispatch: "per_expert" or "per_rank".
        """
        counts_GSE = counts.all_GNE
        if self.settled is None:
            if not torch.is_grad_enabled() or not counts_GSE.any():
                return 1  # an evaluation, or a call without rows, says nothing about a training step
            choice = _choose(counts, arguments, ops, self._config, dispatch)
            # already equal, unless the ranks' configurations differ
            agreed = all_reduce_max(torch.tensor([choice.num_chunks]).to(arguments.x_TH.device), arguments.group, "N")
            self.settled = int(HostCopy(agreed, "N").wait().item())
            _log_choice(choice)
        num_chunks, max_rows = self.settled, self._config.chunk_moe_max_rows
        if max_rows:
            while num_chunks < counts_GSE.shape[1] and received(counts_GSE, num_chunks).max() > max_rows:
                num_chunks *= 2
            self._warn_over(int(received(counts_GSE, num_chunks).max()), num_chunks)
        return num_chunks

    def _warn_over(self, rows: int, num_chunks: int) -> None:
        max_rows = self._config.chunk_moe_max_rows
        if rows > max_rows and self._over.again():
            say(
                logging.WARNING,
                f"chunk_moe_max_rows: {max_rows}: one of {num_chunks} chunks has {rows} rows on one rank, and this is "
                f"the largest number of chunks (time {self._over.times})",
            )


def received(counts_GSE: torch.Tensor, num_chunks: int) -> torch.Tensor:
    """Rows that each rank's experts get in each of `num_chunks` chunks, `[num_chunks, G]`."""
    ranks = counts_GSE.shape[0]
    return counts_GSE.unflatten(1, (num_chunks, -1)).unflatten(3, (ranks, -1)).sum(dim=(0, 2, 4))


def busiest_rows(counts: Counts, num_chunks: int, top_k: int, per_rank: bool) -> list[ChunkRows]:
    """The work of the busiest rank of each chunk."""
    merged = counts.merged(num_chunks)
    counts_GNE, once_GNG = merged.all_GNE, merged.once_GNG
    pairs_N = counts_GNE.sum(2).amax(0)
    computed_N = received(counts.all_GNE, num_chunks).amax(1)
    largest_N = counts_GNE.sum(0).amax(1)
    sent_N, received_N = pairs_N, computed_N
    if per_rank:
        sent_N, received_N = once_GNG.sum(2).amax(0), once_GNG.sum(0).amax(1)
    columns = (pairs_N.add(top_k - 1) // top_k, sent_N, received_N, largest_N, computed_N)
    return list(itertools.starmap(ChunkRows, torch.stack(columns, dim=1).tolist()))


def _choose(counts: Counts, arguments: Arguments, ops: BackEnd, config: ChunkMoEConfig, dispatch: str) -> ChunkChoice:
    counts_GSE, top_k = counts.all_GNE, arguments.selected_experts.shape[1]
    most_sent = int(counts_GSE.sum(dim=(1, 2)).max())
    shape = dataclasses.replace(arguments.shape(), tokens=-(-most_sent // top_k), dispatch=dispatch)
    candidates = [n for n in CANDIDATES if counts_GSE.shape[1] % n == 0]
    return best_num_chunks(
        shape,
        measure(arguments, ops, most_sent // 4),
        candidates=candidates,
        schedule=config.chunk_moe_schedule,
        keep=config.keep,
        lookahead=config.chunk_moe_lookahead,
        dtype=str(arguments.compute_dtype),
        rows_of=lambda n: busiest_rows(counts, n, top_k, shape.per_rank),
    )


@torch.no_grad()
def measure(arguments: Arguments, ops: BackEnd, rows: int) -> Device:
    """Rates of this device and its link with about `rows` rows; each is that of the group's slowest rank."""
    group, dtype, device = arguments.group, arguments.compute_dtype, arguments.x_TH.device
    ranks, hidden = group_size(group), arguments.x_TH.shape[1]
    fc1_LHF = arguments.fc1.to(dtype)
    if arguments.weight_layout == "LFH":
        fc1_LHF = fc1_LHF.transpose(1, 2)
    local, width = fc1_LHF.shape[0], fc1_LHF.shape[2]
    each = max(1, rows // local)
    rows_RH = torch.zeros((each * local, hidden), dtype=dtype, device=device)
    groups = Groups.of([[each] * local], device)
    index_T1 = torch.zeros((each * local, 1), dtype=torch.int64, device=device)
    sizes = [_SMALL, max(2 * _SMALL, rows // ranks)]
    seconds = [
        _seconds(lambda: ops.grouped_mm(rows_RH, fc1_LHF, groups), device),
        _seconds(lambda: ops.permute(rows_RH, index_T1), device),
        _seconds(lambda: ops.permute(rows_RH[:1], index_T1[:1]), device),
        launch_seconds(device),
        *(_seconds(functools.partial(_exchange, size, hidden, arguments), device) for size in sizes),
    ]
    nanoseconds = torch.tensor([int(s * 1e9) + 1 for s in seconds], dtype=torch.int64).to(device)
    slowest = HostCopy(all_reduce_max(nanoseconds, group, "rates"), "rates").wait().tolist()
    matmul, move, call, launch, small, large = (n / 1e9 for n in slowest)
    row = hidden * dtype.itemsize
    to_others = row * (ranks - 1)
    messages = ((sizes[0] * to_others, small), (sizes[1] * to_others, max(small, large)))
    link = Link(rate=messages[1][0] / large or 1.0, measured=messages)
    return Device(
        name="as measured at the first call",
        memory=float("inf"),
        flops={str(dtype): 2 * each * local * hidden * width / max(matmul - call, 1e-9)},
        memory_rate=2 * rows_RH.nbytes / max(move - call, 1e-9),
        intra=link,
        inter=link,
        # a device whose host launches ahead does not wait for the end of an action
        **({"call": call} if accelerator(device) is None else {"launch": launch}),
    )


def _exchange(rows: int, hidden: int, arguments: Arguments) -> None:
    """Send `rows` rows to each rank, including this one."""
    group = arguments.group
    splits = [rows] * group_size(group)
    sent = torch.zeros((sum(splits), hidden), dtype=arguments.compute_dtype, device=arguments.x_TH.device)
    _, work = all_to_all(sent, splits, splits, group, "rates", max_split=rows)
    work.wait()


def _seconds(function: Callable[[], object], device: torch.device) -> float:
    """The shortest of several runs, after one warm-up run."""
    streams, took = accelerator(device), []
    for _ in range(1 + _REPEATS):
        start = time.perf_counter()
        function()
        if streams is not None:
            streams.synchronize(device)
        took.append(time.perf_counter() - start)
    return min(took[1:])


def _log_choice(choice: ChunkChoice) -> None:
    times = ", ".join(f"N={n} {1e3 * each.total:.2f} ms" for n, each in choice.times.items())
    chosen = f"chunk_moe_auto: {choice.num_chunks} chunks"
    say_once(
        logging.INFO,
        f"{chosen}, the fewest of the fastest settings; times of a layer's forward and backward, computed from rates "
        f"measured in this call: {times}",
        about=chosen,  # each layer chooses
    )
