"""The plan of one layer call: how many rows each rank sends to each, for all chunks, from one gather and one host copy.

T tokens here, K experts per token, N chunks, E experts, L = E / ep experts here, G = ep ranks of the group, C columns
of the counts, D = min(K, ep) slots for the ranks of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from mindspeed_chunk.device import HostCopy
from mindspeed_chunk.dist import all_gather, all_reduce_max, group_rank, group_size
from mindspeed_chunk.ops.groups import Groups

# Columns in addition to the E experts: ids below 0, ids of E and above, and padded tokens.
_EXTRA_COLUMNS = 3


@dataclass(frozen=True)
class ChunkPlan:
    """One chunk's part. All figures come from the gathered counts, never from a local shape.

    Attributes:
        tokens: the chunk's slice of this rank's tokens.
        send_splits: rows to each rank, `[ep]`; the dispatch sends these, the combine returns them.
        recv_splits: rows from each rank, `[ep]`.
        max_split: the largest number of rows that any rank of the group sends to another one.
        groups: rows at the experts by source rank and local expert, `[ep][L]`, or only by expert, `[1][L]`, if tokens
            are sent once to each rank.
    """

    tokens: slice
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    max_split: int
    groups: Groups

    @property
    def num_tokens(self) -> int:
        return self.tokens.stop - self.tokens.start

    @property
    def num_sent(self) -> int:
        return sum(self.send_splits)


@dataclass(frozen=True)
class ChunkSlices:
    """How the tokens of a call are cut into contiguous chunks.

    Without a chunk size, their sizes differ by at most one token. A cut into a multiple of their
    number makes smaller chunks, and each chunk is a union of these. With a chunk size, the last chunks may be short or
    empty.
    """

    num_tokens: int
    num_chunks: int
    chunk_size: int = 0

    @property
    def slices(self) -> tuple[slice, ...]:
        if self.chunk_size:
            starts = [min(c * self.chunk_size, self.num_tokens) for c in range(self.num_chunks + 1)]
        else:
            starts = [-(-c * self.num_tokens // self.num_chunks) for c in range(self.num_chunks + 1)]
        return tuple(map(slice, starts[:-1], starts[1:]))

    def chunk_of(self, token_T: torch.Tensor) -> torch.Tensor:
        """The chunk of each token, computed by divisions: nothing is copied from or to the device."""
        if self.chunk_size:
            return token_T // self.chunk_size
        return token_T * self.num_chunks // max(1, self.num_tokens)


def agree_num_chunks(num_tokens: int, chunk_size: int, group: dist.ProcessGroup | None, device: torch.device) -> int:
    """The number of chunks for the rank with the most tokens: one very small all-reduce and one host copy."""
    needed = max(1, -(-num_tokens // chunk_size))
    if group_size(group) == 1:
        return needed
    wanted = torch.full((1,), needed, dtype=torch.int64, device=device)  # not a copy from the host, which would wait
    return int(HostCopy(all_reduce_max(wanted, group, "num_chunks"), "num_chunks").wait().item())


def route(index_TK: torch.Tensor, num_experts: int, pad_T: torch.Tensor | None) -> torch.Tensor:
    """Expert ids for the permutation and the counts, `[T, K]` int64.

    Ids out of range become -1 or E, and are refused when the plan is read. A padded token gets the sentinel E + 1,
    which is sorted after every expert and is not sent.

    Args:
        pad_T: True for padding tokens, or None.
    """
    route_TK = index_TK.to(torch.int64).clamp(-1, num_experts)
    if pad_T is None:
        return route_TK
    # the sentinel is the largest id; not masked_fill, which an NPU runs on its AI CPU for int64
    return torch.maximum(route_TK, (pad_T * (num_experts + 1))[:, None])


def rank_slots(route_TK: torch.Tensor, num_experts: int, ranks: int) -> torch.Tensor:
    """The ranks that have experts of each token, once each: int32 `[T, min(K, ranks)]`; other slots have `ranks`."""
    route_TK = route_TK.to(torch.int32)  # an NPU divides int64 on its AI CPU
    valid_TK = (route_TK >= 0) & (route_TK < num_experts)
    rank_TK = torch.where(valid_TK, torch.div(route_TK, num_experts // ranks, rounding_mode="floor"), ranks)
    top_k, device = route_TK.shape[1], route_TK.device
    if ranks < top_k:
        rank_G = torch.arange(ranks, dtype=torch.int32, device=device)
        return torch.where((rank_TK[:, :, None] == rank_G).any(1), rank_G, ranks)
    k_K = torch.arange(top_k, device=device)
    repeated_TK = ((rank_TK[:, :, None] == rank_TK[:, None, :]) & (k_K[:, None] > k_K)).any(2)
    return torch.where(repeated_TK, ranks, rank_TK)


@dataclass(frozen=True)
class Columns:
    """The counts of one chunk that a rank contributes to a plan.

    In this order: ids below 0, rows of each of the E experts, ids of E and above, padded rows (and empty slots). If
    `ranks` is not 0, then the tokens with experts on each rank, each counted once.
    """

    num_experts: int
    ranks: int

    @property
    def total(self) -> int:
        return self.num_experts + _EXTRA_COLUMNS + self.ranks

    def keys(self, route_TK: torch.Tensor, slices: ChunkSlices) -> torch.Tensor:
        """The indices, among the counts of all chunks, to be counted: int64, of any shape."""
        num_tokens = route_TK.shape[0]
        # an NPU divides int64 on its AI CPU; `chunk_of` multiplies a token by the number of chunks
        dtype = torch.int32 if num_tokens * slices.num_chunks < 2**31 else torch.int64
        chunk_T = slices.chunk_of(torch.arange(num_tokens, dtype=dtype, device=route_TK.device))
        first_T1 = (chunk_T * self.total)[:, None]
        key_TK = route_TK + (first_T1 + 1)
        if not self.ranks:
            return key_TK
        slot_TD = rank_slots(route_TK, self.num_experts, self.ranks)
        # empty slots are counted with the padded tokens, which nothing reads
        column_TD = torch.where(slot_TD < self.ranks, slot_TD + _EXTRA_COLUMNS, 2) + self.num_experts
        return torch.cat((key_TK, (column_TD + first_T1).to(torch.int64)), dim=1)


class Gather:
    """The gather of all ranks' counts; `read()` waits for it, once.

    Each rank contributes an int64 row: the counts of every chunk (`Columns`), how many router choices recomputes
    changed since the last call, and a checksum of the rank's settings (see `dispatcher.py`), which is negative for a
    rank with invalid arguments.
    """

    def __init__(
        self,
        counts: torch.Tensor,
        columns: Columns,
        rerouted: torch.Tensor,
        checksum: int,
        group: dist.ProcessGroup | None,
        on_disagreement: Callable[[], None],
        on_rerouted: Callable[[dict[int, int]], None],
    ) -> None:
        """Launch it.

        Args:
            counts: how often each key of `columns` occurs, int64 `[N * columns.total]`.
            rerouted: see `replay.reroute`; int64 `[1]`.
            on_disagreement: called on every rank when the checksums differ or one is negative; must raise.
            on_rerouted: called on every rank if some rank's `rerouted` is not 0, with these numbers by rank.
        """
        self._columns, self._group = columns, group
        self._on_disagreement, self._on_rerouted = on_disagreement, on_rerouted
        # kept until the wait for the gather, which reads the row
        self._row = torch.cat([counts, rerouted, counts.new_full((1,), checksum)])
        self._gathered, self._work = all_gather(self._row, group, "plan")
        self._copy = HostCopy(self._gathered, "plan", after=self._work)

    def read(self) -> Counts:
        """The counts.

        Raises:
            ValueError: on every rank, if a rank's settings differ or an expert id is out of range.
        """
        gathered = self._copy.wait()
        self._work.wait()  # for the device, which also reads some of it
        checksums = gathered[:, -1].tolist()
        if len(set(checksums)) > 1 or checksums[0] < 0:
            self._on_disagreement()
        ranks = range(len(checksums)) if self._group is None else dist.get_process_group_ranks(self._group)
        rerouted = {rank: n for rank, n in zip(ranks, gathered[:, -2].tolist(), strict=True) if n}
        if rerouted:
            self._on_rerouted(rerouted)
        num_experts, total = self._columns.num_experts, self._columns.total
        all_GNC, on_device_GNC = (counts[:, :-2].unflatten(1, (-1, total)) for counts in (gathered, self._gathered))
        invalid = all_GNC[:, :, [0, num_experts + 1]].sum(dim=(1, 2)).tolist()
        if any(invalid):
            by_rank = ", ".join(f"{n} on rank {rank}" for rank, n in zip(ranks, invalid, strict=True) if n)
            raise ValueError(f"selected_experts: {by_rank} of the ids are outside [0, {num_experts})")
        local = num_experts // len(checksums)
        first = 1 + group_rank(self._group) * local
        return Counts(
            all_GNC[:, :, 1 : num_experts + 1],
            on_device_GNC[:, :, first : first + local],
            all_GNC[:, :, num_experts + _EXTRA_COLUMNS :],
        )


class Counts(NamedTuple):
    """Rows by source rank, chunk and expert: on the host for all E experts, on the device for the L here.

    Then tokens by source rank, chunk and rank with experts of them, on the host; no columns if they are not counted.
    """

    all_GNE: torch.Tensor
    here_GNL: torch.Tensor
    once_GNG: torch.Tensor

    def merged(self, num_chunks: int) -> Counts:
        """The counts of `num_chunks` chunks, each a run of consecutive ones of these."""
        return Counts(*(counts.unflatten(1, (num_chunks, -1)).sum(2) for counts in self))


def merge_slices(tokens: tuple[slice, ...], num_chunks: int) -> tuple[slice, ...]:
    """The slices of `num_chunks` chunks, each a run of consecutive ones of these."""
    run = len(tokens) // num_chunks
    return tuple(slice(tokens[c].start, tokens[c + run - 1].stop) for c in range(0, len(tokens), run))


def plan_chunks(counts: Counts, tokens: tuple[slice, ...], rank: int, per_rank: bool) -> tuple[ChunkPlan, ...]:
    """This rank's plan for each chunk, from the counts; `per_rank`: a token is sent once to each rank."""
    ep, _, num_experts = counts.all_GNE.shape
    local = num_experts // ep
    here_NGL = counts.all_GNE[:, :, rank * local : (rank + 1) * local].transpose(0, 1)
    on_device_NGL = counts.here_GNL.transpose(0, 1)
    sent_NGG = counts.all_GNE.unflatten(2, (ep, local)).sum(3).transpose(0, 1)
    if per_rank:
        here_NGL, on_device_NGL = here_NGL.sum(1, keepdim=True), on_device_NGL.sum(1, keepdim=True)
        sent_NGG = counts.once_GNG.transpose(0, 1)
    to_others_NGG = sent_NGG.masked_fill(torch.eye(ep, dtype=torch.bool), 0)
    groups = Groups.of_chunks(here_NGL.tolist(), on_device_NGL.contiguous())
    return tuple(
        ChunkPlan(chunk, tuple(sent), tuple(received), max_split, here)
        for chunk, sent, received, max_split, here in zip(
            tokens,
            sent_NGG[:, rank].tolist(),
            sent_NGG[:, :, rank].tolist(),
            to_others_NGG.amax((1, 2)).tolist(),
            groups,
            strict=True,
        )
    )


class PendingPlan:
    """The plan of every chunk, made on first use.

    Args:
        read: returns the counts; called once.
        tokens: each chunk's slice of this rank's tokens.
        per_rank: see `plan_chunks`.
    """

    def __init__(
        self,
        read: Callable[[], Counts],
        tokens: tuple[slice, ...],
        group: dist.ProcessGroup | None,
        per_rank: bool = False,
    ) -> None:
        self._read: Callable[[], Counts] | None = read
        self._tokens, self._group, self._per_rank = tokens, group, per_rank
        self._chunks: tuple[ChunkPlan, ...] = ()

    @property
    def ready(self) -> bool:
        """`wait` returns at once."""
        return self._read is None

    def wait(self) -> tuple[ChunkPlan, ...]:
        """Raises the errors of `read`."""
        if self._read is not None:
            self._chunks = plan_chunks(self._read(), self._tokens, group_rank(self._group), self._per_rank)
            self._read = None  # frees the gather's tensors
        return self._chunks

    def groups(self) -> tuple[Groups, ...]:
        """Those of every chunk, for one direction of the call."""
        return Groups.for_direction([chunk.groups for chunk in self.wait()])
