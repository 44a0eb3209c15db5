"""Bytes that one Chunk MoE layer call keeps and holds at most, counted by walking the executor's own schedule.

T tokens here, H hidden, K experts per token, S = T x K rows sent, R rows received, I expert intermediate, F = 2I,
L experts here, s bytes per element. Every buffer is entered in a ledger when the executor makes it, and removed when
the executor releases it (`moe/executor.py`, `moe/experts.py`, `ops/cpu.py`). Nothing here is fitted to a measurement.
Not counted: the layer's input, the weights, and what a library allocates inside one operation.

In formulas: kept are K (H + 2I) s per token with "activations", K H s with "rows", nothing with "input", and 8 bytes
per row for the order of the rows. With N chunks of ceil(T / N) tokens, two of them are between their dispatch and their
combine, and three own buffers. Each additional chunk that is dispatched ahead adds one to both numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mindspeed_chunk.moe.packing import packed_bytes
from mindspeed_chunk.moe.schedule import Schedule, build

_INDEX = 8  # bytes of an int64
_TOTAL = 4  # bytes of an element of the totals of narrow weights' gradients: fp32


class ChunkRows(NamedTuple):
    """Rows of one chunk on one rank.

    Attributes:
        tokens: of the chunk.
        sent: rows of its tokens, K each, including those for this rank's own experts.
        received: rows for the experts here, from this rank and the others.
        largest: the largest number of rows that one local expert gets.
    """

    tokens: int
    sent: int
    received: int
    largest: int


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One MoE layer call on one rank.

    Attributes:
        tokens: T, on this rank.
        hidden, intermediate: H, and an expert's I.
        experts: E, on all ranks of the expert-parallel group together.
        top_k: K, experts per token.
        ep: ranks of the expert-parallel group.
        element_size: bytes of an element of the rows and of the weights.
    """

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    ep: int
    element_size: int

    @property
    def local_experts(self) -> int:
        """L, the experts on this rank."""
        return self.experts // self.ep

    @property
    def weight_elements(self) -> int:
        """Elements of the local experts' weights: 3 L H I."""
        return 3 * self.local_experts * self.hidden * self.intermediate


def row_bytes(shape: LayerShape, keep: str) -> tuple[int, int, int]:
    """Bytes of a row: in the forward, dispatched in the backward, combined in the backward.

    In the backward rows are packed; with "input", the tokens are sent with their gradients.
    """
    hidden, size = shape.hidden, shape.element_size
    return hidden * size, packed_bytes(hidden * (2 if keep == "input" else 1), size), packed_bytes(hidden, size)


class ExpertMemory(NamedTuple):
    """Bytes of a layer call.

    Attributes:
        kept: alive between forward and backward, without the output.
        forward_peak: the most alive at once in the forward; with the output.
        backward_peak: the same in the backward; with the output and the gradient of the input, without `weight_grads`.
        weight_grads: the totals in which the chunks' weight gradients are summed, fp32 for narrower weights.
    """

    kept: int
    forward_peak: int
    backward_peak: int
    weight_grads: int

    @property
    def peak(self) -> int:
        """The most alive at once in either direction."""
        return max(self.forward_peak, self.backward_peak)


def balanced_rows(shape: LayerShape, num_chunks: int, imbalance: float = 1.0) -> tuple[ChunkRows, ...]:
    """The rows of each chunk if every expert gets equally many.

    Args:
        imbalance: rows that the busiest rank receives, and its busiest expert, over the mean. No rank receives more
            than all rows of its group, EP times the mean; with EP=1 it computes its own, whatever the routing.
    """
    imbalance = min(imbalance, shape.ep)
    ends = [-(-c * shape.tokens // num_chunks) for c in range(num_chunks + 1)]
    tokens = [end - start for start, end in zip(ends, ends[1:])]
    received = [round(n * shape.top_k * imbalance) for n in tokens]
    return tuple(
        ChunkRows(n, n * shape.top_k, rows, -(-rows // shape.local_experts)) for n, rows in zip(tokens, received)
    )


def expert_memory(
    shape: LayerShape,
    *,
    num_chunks: int = 1,
    schedule: str = "rolling",
    keep: str = "activations",
    lookahead: int = 1,
    rows: Sequence[ChunkRows] | None = None,
) -> ExpertMemory:
    """Bytes of a layer call.

    Args:
        schedule, keep, lookahead: `chunk_moe_schedule`, `chunk_moe_keep`, `chunk_moe_lookahead`.
        rows: of each chunk, if they are known, instead of `num_chunks`; otherwise `balanced_rows`.
    """
    rows = rows or balanced_rows(shape, num_chunks)
    forward = _ForwardLedger(shape, rows, keep)
    forward.run(build(schedule, len(rows), lookahead=lookahead))
    backward = _BackwardLedger(shape, rows, keep, forward.kept)
    backward.run(build(schedule, len(rows), lookahead=lookahead, backward=True))
    narrow = shape.element_size == 2
    # at the end, the totals are cast to the weights' format: fc2's, a third of them, is freed before fc1's is cast
    backward_peak = max(
        backward.peak, backward.now + (shape.weight_elements // 3 * shape.element_size if narrow else 0)
    )
    weight_grads = shape.weight_elements * (_TOTAL if narrow else shape.element_size)
    return ExpertMemory(forward.kept, forward.peak, backward_peak, weight_grads)


class _Ledger:
    """The buffers that are alive, with their bytes, and a method per kind of action."""

    def __init__(self, shape: LayerShape, rows: Sequence[ChunkRows], keep: str) -> None:
        self._shape, self._rows, self._keep = shape, rows, keep
        self._row = shape.hidden * shape.element_size
        self._fc1_row = 2 * shape.intermediate * shape.element_size
        self._activated_row = shape.intermediate * shape.element_size
        # elsewhere the rows come in the order that experts want
        self._regroups = shape.ep > 1 and shape.local_experts > 1
        self._held: dict[tuple[str, int], int] = {}
        self.now = self.peak = 0

    def run(self, schedule: Schedule) -> None:
        for kind, c in schedule:
            getattr(self, kind)(c, self._rows[c])

    def _hold(self, name: str, c: int, nbytes: int, transient: int = 0) -> None:
        """Enter a buffer; `transient` are bytes that are alive only while it is made."""
        self._held[name, c] = nbytes
        self.now += nbytes
        self._pass(transient)

    def _pass(self, nbytes: int) -> None:
        self.peak = max(self.peak, self.now + nbytes)

    def _free(self, *names: str, c: int) -> None:
        for name in names:
            self.now -= self._held.pop((name, c), 0)

    def _move(self, name: str, to: str, c: int) -> None:
        self._held[to, c] = self._held.pop((name, c))

    def _arrived(self, c: int, row: int, received: int) -> None:
        """The wait: what was sent is freed; a second buffer takes the received rows in the experts' order."""
        self._free("send", c=c)
        self._pass(received * row if self._regroups else 0)
        self._move("received", "rows", c)

    def _product(self, rows: ChunkRows) -> int:
        """Products are made expert by expert, and those of one expert are freed after those of the next are made."""
        return 2 * rows.largest * self._row if self._regroups else 0


class _ForwardLedger(_Ledger):
    def __init__(self, shape: LayerShape, rows: Sequence[ChunkRows], keep: str) -> None:
        super().__init__(shape, rows, keep)
        self._hold("output", 0, shape.tokens * self._row)
        self._hold("route", 0, shape.tokens * shape.top_k * _INDEX)

    @property
    def kept(self) -> int:
        """After the walk."""
        return self.now - self._held["output", 0] - self._held["route", 0]

    def P(self, c: int, rows: ChunkRows) -> None:
        self._hold("order", c, rows.sent * _INDEX, transient=rows.sent * _INDEX)
        self._hold("send", c, rows.sent * self._row, transient=rows.sent * _INDEX)

    def D(self, c: int, rows: ChunkRows) -> None:
        self._hold("received", c, rows.received * self._row)

    def E(self, c: int, rows: ChunkRows) -> None:
        self._arrived(c, self._row, rows.received)
        self._hold("fc1", c, rows.received * self._fc1_row)
        self._hold("activated", c, rows.received * self._activated_row)
        if self._keep != "activations":
            self._free("fc1", c=c)
        self._hold("send", c, rows.received * self._row, transient=self._product(rows))
        self._free("activated", c=c)
        if self._keep == "input":
            self._free("rows", c=c)

    def C(self, c: int, rows: ChunkRows) -> None:
        self._hold("received", c, rows.sent * self._row)

    def U(self, c: int, rows: ChunkRows) -> None:
        self._free("send", c=c)
        self._pass(rows.sent * _INDEX + max(rows.sent * _INDEX, rows.tokens * self._row))
        self._free("received", c=c)


class _BackwardLedger(_Ledger):
    """The kept bytes and the output stay until the end: the node's saved tensors are freed after it has run."""

    def __init__(self, shape: LayerShape, rows: Sequence[ChunkRows], keep: str, kept: int) -> None:
        super().__init__(shape, rows, keep)
        self._hold("kept and output", 0, kept + shape.tokens * self._row)
        self._hold("router gradient", 0, shape.tokens * shape.top_k * shape.element_size)
        _, self._out_row, self._back_row = row_bytes(shape, keep)

    def P(self, c: int, rows: ChunkRows) -> None:
        packed = rows.tokens * self._out_row
        self._hold("send", c, rows.sent * self._out_row, transient=packed + rows.sent * _INDEX)

    def D(self, c: int, rows: ChunkRows) -> None:
        self._hold("received", c, rows.received * self._out_row)

    def E(self, c: int, rows: ChunkRows) -> None:
        activated, fc1 = rows.received * self._activated_row, rows.received * self._fc1_row
        self._arrived(c, self._out_row, rows.received)
        again = self._keep != "activations"
        if again:
            self._hold("fc1 gradient", c, fc1)  # fc1 itself, to begin with
        self._hold("activated", c, activated)
        self._hold("activated gradient", c, activated, transient=self._row_dot(rows))
        if again:
            self._pass(activated)  # silu(gate): the gradient is in the buffer of fc1
        else:
            self._hold("fc1 gradient", c, fc1)
        self._free("activated gradient", c=c)
        self._hold("send", c, rows.received * self._back_row, transient=self._product(rows))
        if self._keep == "input":
            self._pass(self._weight_product())
            self._free("fc1 gradient", c=c)

    def C(self, c: int, rows: ChunkRows) -> None:
        self._hold("received", c, rows.sent * self._back_row)

    def W(self, c: int, rows: ChunkRows) -> None:
        self._pass(self._weight_product())
        self._free("rows", "activated", "fc1 gradient", c=c)

    def U(self, c: int, rows: ChunkRows) -> None:
        self._free("send", c=c)
        transient = rows.sent * _INDEX + rows.tokens * self._back_row
        if ("input gradient", 0) not in self._held:
            self._hold("input gradient", 0, self._shape.tokens * self._row, transient=transient)
        self._pass(transient)
        self._free("received", c=c)

    def _row_dot(self, rows: ChunkRows) -> int:
        """The products behind the router's gradient, in fp32 for narrower rows."""
        return rows.received * self._shape.intermediate * max(4, self._shape.element_size)

    def _weight_product(self) -> int:
        """A narrow weight gradient of one expert, made before it is added to the fp32 total."""
        if self._shape.element_size != 2:
            return 0
        return 2 * self._shape.hidden * self._shape.intermediate * self._shape.element_size
