"""Sizes of an MoE layer call: its shape, the rows of its chunks, and the bytes of a row in each exchange.

T tokens, H hidden, K experts per token, E experts, L = E / ep experts here, s bytes per element.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

from mindspeed_chunk.moe.packing import packed_bytes

PER_EXPERT, PER_RANK = "per_expert", "per_rank"
ID = 4  # bytes of an expert's id on the wire
# `auto` sends a token per rank if that sends at most this share of the bytes: docs/DECISIONS.md.
WORTHWHILE = 0.9


class ChunkRows(NamedTuple):
    """Rows of one chunk on one rank.

    Attributes:
        tokens: of the chunk.
        sent: rows that leave its tokens, those for this rank's own experts included: K per token, or one for each rank
            with experts of a token.
        received: rows that arrive at its experts, from this rank and the others.
        largest: the most that one local expert gets.
        computed: rows that its experts compute; 0: as many as received.
    """

    tokens: int
    sent: int
    received: int
    largest: int
    computed: int = 0

    @property
    def at_experts(self) -> int:
        """Rows that the experts compute."""
        return self.computed or self.received


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One MoE layer call on one rank.

    Attributes:
        tokens: T, on this rank.
        hidden, intermediate: H, and an expert's I.
        experts: E, on all ranks of the expert-parallel group together.
        top_k: K, experts per token.
        ep: ranks of the expert-parallel group.
        element_size: bytes of an element of the rows, of the weights and of the router weights.
        dispatch: "per_expert" or "per_rank".
    """

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    ep: int
    element_size: int
    dispatch: str = PER_EXPERT

    @property
    def local_experts(self) -> int:
        """L, the experts on this rank."""
        return self.experts // self.ep

    @property
    def weight_elements(self) -> int:
        """Elements of the local experts' weights: 3 L H I."""
        return 3 * self.local_experts * self.hidden * self.intermediate

    @property
    def per_rank(self) -> bool:
        """A token is sent once to each rank that has experts of it."""
        return self.dispatch == PER_RANK

    @property
    def copies(self) -> float:
        """Rows that are sent per token, with uniform routing."""
        return ranks_per_token(self.experts, self.top_k, self.ep) if self.per_rank else self.top_k


def ranks_per_token(num_experts: int, top_k: int, ranks: int) -> float:
    """The expected number of ranks that have experts of a token, if its K different experts are uniformly drawn.

    A rank has none of them with probability C(E - L, K) / C(E, K).
    """
    if top_k > num_experts:  # not all different: an upper bound
        return min(top_k, ranks)
    elsewhere = num_experts - num_experts // ranks
    if top_k > elsewhere:
        return ranks
    return ranks * (1 - math.prod((elsewhere - k) / (num_experts - k) for k in range(top_k)))


class RowBytes(NamedTuple):
    """Bytes of a row in each exchange: the forward's dispatch and combine, and the backward's."""

    dispatch: int
    combine: int
    backward_dispatch: int
    backward_combine: int


def row_bytes(shape: LayerShape, keep: str, router_size: int = 0) -> RowBytes:
    """Bytes of a row. In the backward rows are packed; with "input", the tokens are sent again with their gradients.

    Args:
        router_size: bytes of a router weight; 0: as of the rows.
    """
    hidden, size, router = shape.hidden, shape.element_size, router_size or shape.element_size
    again = 2 * hidden if keep == "input" else hidden
    if not shape.per_rank:
        out, back = packed_bytes(again, size, [router]), packed_bytes(hidden, size, [router])
        return RowBytes(hidden * size, hidden * size, out, back)
    routing = [shape.top_k * ID, shape.top_k * router]
    out = packed_bytes(again, size, routing) if keep == "input" else hidden * size
    return RowBytes(
        packed_bytes(hidden, size, routing), hidden * size, out, packed_bytes(hidden, size, [shape.top_k * router])
    )


def share_of_bytes(shape: LayerShape, router_size: int = 0) -> float:
    """The bytes of a dispatch per rank in the four exchanges of a call, divided by those of a dispatch per expert."""
    return _share(dataclasses.replace(shape, tokens=1, intermediate=1, dispatch=PER_EXPERT), router_size)


@functools.lru_cache(maxsize=1024)
def _share(shape: LayerShape, router_size: int) -> float:
    """`shape`: without what does not matter, so that many settings of a plan are one."""
    once, each = (dataclasses.replace(shape, dispatch=kind) for kind in (PER_RANK, PER_EXPERT))
    sent = [kind.copies * sum(row_bytes(kind, "activations", router_size)) for kind in (once, each)]
    return sent[0] / sent[1]


def resolve_dispatch(setting: str, shape: LayerShape, router_size: int = 0) -> str:
    """The kind of dispatch that a value of `chunk_moe_dispatch` means.

    It is a function of sizes alone, so a resumed run has the same.

    Args:
        router_size: bytes of a router weight; 0: as of the rows.
    """
    if shape.ep == 1 or shape.top_k == 1:
        return PER_EXPERT
    if setting != "auto":
        return setting
    return PER_RANK if share_of_bytes(shape, router_size) <= WORTHWHILE else PER_EXPERT


def balanced_rows(shape: LayerShape, num_chunks: int, imbalance: float = 1.0) -> tuple[ChunkRows, ...]:
    """The rows of each chunk if every expert gets equally many.

    Args:
        imbalance: rows that the busiest rank receives, and its busiest expert, over the mean. No rank receives more
            than all rows of its group, EP times the mean; with EP=1 it computes its own, whatever the routing.
    """
    imbalance = min(imbalance, shape.ep)
    ends = [-(-c * shape.tokens // num_chunks) for c in range(num_chunks + 1)]
    tokens = [end - start for start, end in zip(ends, ends[1:])]
    rows = []
    for n in tokens:
        computed, sent = round(n * shape.top_k * imbalance), round(n * shape.copies)
        # each token of the group arrives at most once
        received = min(round(n * shape.copies * imbalance), n * shape.ep) if shape.per_rank else computed
        rows.append(ChunkRows(n, sent, received, -(-computed // shape.local_experts), computed))
    return tuple(rows)
