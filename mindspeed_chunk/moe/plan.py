"""The plan of one layer call: how many rows each rank sends to each, for all chunks, from one gather and one host copy.

T tokens here, K experts per token, N chunks, E experts, L = E / ep experts here, ep ranks.
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
        groups: rows by source rank and local expert, `[ep][L]`.
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

    Without a chunk size, their sizes differ by at most one token, and each is a union of the chunks of a cut into a
    multiple of their number. With a chunk size, the last chunks may be short or empty.
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


def num_counts(num_chunks: int, num_experts: int) -> int:
    """Counts that a rank contributes to a plan."""
    return num_chunks * (num_experts + _EXTRA_COLUMNS)


def count_keys(route_TK: torch.Tensor, slices: ChunkSlices, num_experts: int) -> torch.Tensor:
    """The index, among the `num_counts` counts, of each (token, k) pair, `[T, K]`."""
    num_tokens = route_TK.shape[0]
    # an NPU divides int64 on its AI CPU; `chunk_of` multiplies a token by the number of chunks
    dtype = torch.int32 if num_tokens * slices.num_chunks < 2**31 else torch.int64
    chunk_T = slices.chunk_of(torch.arange(num_tokens, dtype=dtype, device=route_TK.device))
    return route_TK + (chunk_T * (num_experts + _EXTRA_COLUMNS) + 1)[:, None]


class Gather:
    """The gather of all ranks' counts; `read()` waits for it, once.

    Each rank contributes a row of `[N * (E + 3) + 2]` int64: the counts of every chunk, the number of router choices
    that recomputes changed since the last call, and a word. The word is a checksum of the rank's settings (see
    `dispatcher.py`), or negative for a rank with invalid arguments.
    """

    def __init__(
        self,
        counts: torch.Tensor,
        num_experts: int,
        rerouted: torch.Tensor,
        word: int,
        group: dist.ProcessGroup | None,
        on_disagreement: Callable[[], None],
        on_rerouted: Callable[[dict[int, int]], None],
    ) -> None:
        """Launch it.

        Args:
            counts: how often each key of `count_keys` occurs, int64 `[num_counts]`.
            rerouted: see `replay.reroute`; int64 `[1]`.
            on_disagreement: called on every rank when the words differ or one is negative; must raise.
            on_rerouted: called on every rank if some rank's `rerouted` is not 0, with these numbers by rank.
        """
        self._num_experts, self._group = num_experts, group
        self._on_disagreement, self._on_rerouted = on_disagreement, on_rerouted
        # kept until the wait for the gather, which reads the row
        self._row = torch.cat([counts, rerouted, counts.new_full((1,), word)])
        self._gathered, self._work = all_gather(self._row, group, "plan")
        self._copy = HostCopy(self._gathered, "plan", after=self._work)

    def read(self) -> Counts:
        """The counts.

        Raises:
            ValueError: on every rank, if a rank's settings differ or an expert id is out of range.
        """
        gathered = self._copy.wait()
        self._work.wait()  # for the device, which also reads some of it
        words = gathered[:, -1].tolist()
        if len(set(words)) > 1 or words[0] < 0:
            self._on_disagreement()
        ranks = range(len(words)) if self._group is None else dist.get_process_group_ranks(self._group)
        rerouted = {rank: n for rank, n in zip(ranks, gathered[:, -2].tolist(), strict=True) if n}
        if rerouted:
            self._on_rerouted(rerouted)
        num_experts, columns = self._num_experts, self._num_experts + _EXTRA_COLUMNS
        all_RNC, on_device_RNC = (counts[:, :-2].unflatten(1, (-1, columns)) for counts in (gathered, self._gathered))
        invalid = all_RNC[:, :, [0, num_experts + 1]].sum(dim=(1, 2)).tolist()
        if any(invalid):
            by_rank = ", ".join(f"{n} on rank {rank}" for rank, n in zip(ranks, invalid, strict=True) if n)
            raise ValueError(f"selected_experts: {by_rank} of the ids are outside [0, {num_experts})")
        local = num_experts // len(words)
        first = 1 + group_rank(self._group) * local
        return Counts(all_RNC[:, :, 1 : num_experts + 1], on_device_RNC[:, :, first : first + local])


class Counts(NamedTuple):
    """Rows by source rank, chunk and expert: on the host for all E experts, on the device for the L here."""

    all_RNE: torch.Tensor
    here_RNL: torch.Tensor

    def merged(self, num_chunks: int) -> Counts:
        """The counts of `num_chunks` chunks, each a run of consecutive ones of these."""
        return Counts(*(counts.unflatten(1, (num_chunks, -1)).sum(2) for counts in self))


def merged(tokens: tuple[slice, ...], num_chunks: int) -> tuple[slice, ...]:
    """The slices of `num_chunks` chunks, each a run of consecutive ones of these."""
    run = len(tokens) // num_chunks
    return tuple(slice(tokens[c].start, tokens[c + run - 1].stop) for c in range(0, len(tokens), run))


def plan_chunks(counts: Counts, tokens: tuple[slice, ...], rank: int) -> tuple[ChunkPlan, ...]:
    """This rank's plan for each chunk, from the counts."""
    ep, _, num_experts = counts.all_RNE.shape
    local = num_experts // ep
    here_NRL = counts.all_RNE[:, :, rank * local : (rank + 1) * local].transpose(0, 1)
    sent_NRR = counts.all_RNE.unflatten(2, (ep, local)).sum(3).transpose(0, 1)
    to_others_NRR = sent_NRR.masked_fill(torch.eye(ep, dtype=torch.bool), 0)
    groups = Groups.of_chunks(here_NRL.tolist(), counts.here_RNL.transpose(0, 1).contiguous())
    return tuple(
        ChunkPlan(chunk, tuple(sent), tuple(received), max_split, here)
        for chunk, sent, received, max_split, here in zip(
            tokens,
            sent_NRR[:, rank].tolist(),
            here_NRL.sum(2).tolist(),
            to_others_NRR.amax((1, 2)).tolist(),
            groups,
            strict=True,
        )
    )


class PendingPlan:
    """The plan of every chunk, made on first use.

    Args:
        read: returns the counts; called once.
        tokens: each chunk's slice of this rank's tokens.
    """

    def __init__(self, read: Callable[[], Counts], tokens: tuple[slice, ...], group: dist.ProcessGroup | None) -> None:
        self._read: Callable[[], Counts] | None = read
        self._tokens, self._group = tokens, group
        self._chunks: tuple[ChunkPlan, ...] = ()

    def wait(self) -> tuple[ChunkPlan, ...]:
        """Raises the errors of `read`."""
        if self._read is not None:
            self._chunks = plan_chunks(self._read(), self._tokens, group_rank(self._group))
            self._read = None  # frees the gather's tensors
        return self._chunks

    def groups(self) -> tuple[Groups, ...]:
        """Those of every chunk, for one direction of the call."""
        return Groups.for_direction([chunk.groups for chunk in self.wait()])
