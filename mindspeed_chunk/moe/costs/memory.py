"""Bytes that one Chunk MoE layer call keeps and holds at most, counted by walking the executor's own schedule.

T tokens here, H hidden, K experts per token, R rows at the experts, I expert intermediate, F = 2I, L experts here,
s bytes per element. Every buffer is entered in a ledger when the executor makes it and taken out when the executor
frees it (`moe/executor.py`, `moe/dispatch.py`, `moe/experts.py`, `ops/cpu.py`); nothing is fitted to a measurement. Not
counted: the layer's input, the weights, and what a library allocates inside one operation.

In formulas: kept are K (H + 2I) s per token with "activations", K H s with "rows", nothing with "input", and 8 bytes
per row for the order of the rows. With N chunks of ceil(T / N) tokens, two of them are between their dispatch and their
combine, and three own buffers. Each additional chunk that is dispatched ahead adds one to both numbers. With a dispatch
per rank, D rows per token are received and kept, and the experts' rows are made from them whenever they are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mindspeed_chunk.moe.costs.rows import ID, ChunkRows, LayerShape, balanced_rows, row_bytes
from mindspeed_chunk.moe.schedule import Schedule, build

_INDEX = 8  # bytes of an int64
_TOTAL = 4  # bytes of an element of the totals of narrow weights' gradients: fp32


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
    """A ledger of named bytes, and a method for each kind of action, as in the executor."""

    def __init__(self, shape: LayerShape, rows: Sequence[ChunkRows], keep: str) -> None:
        self._shape, self._rows, self._keep, self._bytes = shape, rows, keep, row_bytes(shape, keep)
        self._row = shape.hidden * shape.element_size
        self._fc1_row = 2 * shape.intermediate * shape.element_size
        self._activated_row = shape.intermediate * shape.element_size
        # otherwise the rows arrive in the order that experts need
        self._regroups = not shape.per_rank and shape.ep > 1 and shape.local_experts > 1
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

    def _regroup(self, c: int, row: int, received: int) -> None:
        """The received rows are put in the experts' order through a second buffer."""
        self._pass(received * row if self._regroups else 0)
        self._held["rows", c] = self._held.pop(("received", c))

    def _permute_received(self, name: str, c: int, rows: ChunkRows) -> None:
        """The rows of the received tokens in the order of the experts; the ids are sorted for it."""
        pairs = rows.received * self._shape.top_k
        self._hold("pairs", c, pairs * _INDEX, transient=2 * pairs * ID)
        self._hold(name, c, rows.at_experts * self._row, transient=rows.at_experts * _INDEX + pairs * ID)

    def _sum(self, rows: int, tokens: int) -> int:
        """The sum of each token's rows, if some pairs have no row: indices of the rows by token, and of each token."""
        return 2 * rows * _INDEX + 3 * tokens * _INDEX

    def _product(self, rows: ChunkRows) -> int:
        """Products are made expert by expert. Those of one expert are freed when the next one's exist."""
        return 2 * rows.largest * self._row if self._regroups else 0


class _ForwardLedger(_Ledger):
    def __init__(self, shape: LayerShape, rows: Sequence[ChunkRows], keep: str) -> None:
        super().__init__(shape, rows, keep)
        self._hold("output", 0, shape.tokens * self._row)
        self._hold("route", 0, shape.tokens * shape.top_k * _INDEX)
        if shape.per_rank:
            self._hold("targets", 0, shape.tokens * min(shape.top_k, shape.ep) * ID)
        self._planned = False

    @property
    def kept(self) -> int:
        """At the end of the walk; the route is kept to be sent again."""
        again = self._shape.per_rank and self._keep == "input"
        gone = self._held["output", 0] + self._held.get(("targets", 0), 0)
        return self.now - gone - (0 if again else self._held["route", 0])

    def P(self, c: int, rows: ChunkRows) -> None:
        row, pairs, sent = self._bytes.dispatch, rows.sent, rows.sent
        packed = 0
        if self._shape.per_rank:
            pairs = rows.tokens * min(self._shape.top_k, self._shape.ep)
            sent, packed = sent if self._planned else pairs, rows.tokens * row
        self._hold("order", c, pairs * _INDEX, transient=packed + pairs * _INDEX)
        self._hold("send", c, sent * row, transient=packed + sent * _INDEX)

    def D(self, c: int, rows: ChunkRows) -> None:
        self._planned = True
        self._hold("received", c, rows.received * self._bytes.dispatch)

    def E(self, c: int, rows: ChunkRows) -> None:
        computed = rows.at_experts
        self._free("send", c=c)
        if self._shape.per_rank:
            self._permute_received("rows", c, rows)
        else:
            self._regroup(c, self._row, rows.received)
        self._hold("fc1", c, computed * self._fc1_row)
        if self._shape.per_rank:
            self._free("rows", c=c)
        self._hold("activated", c, computed * self._activated_row)
        if self._keep != "activations":
            self._free("fc1", c=c)
        if self._shape.per_rank:
            self._hold("product", c, computed * self._row)
            self._free("activated", c=c)
            weights = (rows.received * self._shape.top_k + computed) * self._shape.element_size
            transient = self._sum(computed, rows.received) + weights
            self._hold("send", c, rows.received * self._row, transient=transient)
            self._free("product", c=c)
        else:
            self._hold("send", c, rows.received * self._row, transient=self._product(rows))
            self._free("activated", c=c)
        if self._keep == "input":
            self._free("rows", "received", "pairs", c=c)

    def C(self, c: int, rows: ChunkRows) -> None:
        self._hold("returned", c, rows.sent * self._row)

    def U(self, c: int, rows: ChunkRows) -> None:
        self._free("send", c=c)
        order = self._sum(rows.sent, rows.tokens) if self._shape.per_rank else rows.sent * _INDEX
        self._pass(order + max(rows.sent * _INDEX, rows.tokens * self._row))
        self._free("returned", c=c)


class _BackwardLedger(_Ledger):
    """The kept bytes and the output stay until the end: the node's saved tensors are freed after it has run."""

    def __init__(self, shape: LayerShape, rows: Sequence[ChunkRows], keep: str, kept: int) -> None:
        super().__init__(shape, rows, keep)
        self._hold("kept and output", 0, kept + shape.tokens * self._row)
        self._hold("router gradient", 0, shape.tokens * shape.top_k * shape.element_size)

    def P(self, c: int, rows: ChunkRows) -> None:
        row = self._bytes.backward_dispatch
        packed = 0 if self._shape.per_rank and self._keep != "input" else rows.tokens * row
        self._hold("send", c, rows.sent * row, transient=packed + rows.sent * _INDEX)

    def D(self, c: int, rows: ChunkRows) -> None:
        self._hold("received", c, rows.received * self._bytes.backward_dispatch)

    def E(self, c: int, rows: ChunkRows) -> None:
        computed = rows.at_experts
        activated, fc1 = computed * self._activated_row, computed * self._fc1_row
        self._free("send", c=c)
        expanded = 0  # the rows that arrive once are put in the experts' order whenever they are used
        if not self._shape.per_rank:
            self._regroup(c, self._bytes.backward_dispatch, rows.received)
        else:
            expanded = computed * self._row
            if self._keep == "input":
                self._permute_received("gradients", c, rows)
            else:
                self._hold("gradients", c, expanded, transient=computed * _INDEX)
                self._free("received", c=c)
        again = self._keep != "activations"
        if again:
            self._hold("fc1 gradient", c, fc1, transient=expanded)  # fc1 itself, to begin with
        self._hold("activated", c, activated)
        self._hold("activated gradient", c, activated, transient=self._row_dot(computed))
        if again:
            self._pass(activated)  # silu(gate): the gradient is in the buffer of fc1
        else:
            self._hold("fc1 gradient", c, fc1)
        self._free("activated gradient", c=c)
        self._hold("send", c, rows.received * self._bytes.backward_combine, transient=self._product(rows))
        if self._shape.per_rank:
            router = computed * self._shape.element_size  # the gradients of the router weights
            self._pass(expanded + self._sum(computed, rows.received) + rows.received * self._row + router)
        if self._keep == "input":
            self._pass(self._weight_product() + expanded)
            self._free("fc1 gradient", c=c)
            if self._shape.per_rank:
                self._free("received", "pairs", c=c)

    def C(self, c: int, rows: ChunkRows) -> None:
        self._hold("returned", c, rows.sent * self._bytes.backward_combine)

    def W(self, c: int, rows: ChunkRows) -> None:
        expanded = self._shape.per_rank and self._keep != "input"
        self._pass(self._weight_product() + (rows.at_experts * self._row if expanded else 0))
        self._free("rows", "gradients", "activated", "fc1 gradient", c=c)

    def U(self, c: int, rows: ChunkRows) -> None:
        self._free("send", c=c)
        order = self._sum(rows.sent, rows.tokens) if self._shape.per_rank else rows.sent * _INDEX
        transient = order + rows.tokens * self._bytes.backward_combine
        if ("input gradient", 0) not in self._held:
            self._hold("input gradient", 0, self._shape.tokens * self._row, transient=transient)
        self._pass(transient)
        self._free("returned", c=c)

    def _row_dot(self, computed: int) -> int:
        """The products behind the router's gradient, in fp32 for narrower rows."""
        return computed * self._shape.intermediate * max(4, self._shape.element_size)

    def _weight_product(self) -> int:
        """A narrow weight gradient of one expert, made before it is added to the fp32 total."""
        if self._shape.element_size != 2:
            return 0
        return 2 * self._shape.hidden * self._shape.intermediate * self._shape.element_size
