"""Times of an MoE layer's chunks: a cost for each action, put through the schedule simulator of `moe/schedule.py`.

T tokens, S rows sent, R rows received, H hidden, I expert intermediate, L experts here, s bytes per element.

    P, U           (T + S) H s and (S + T) H s bytes at the memory's rate
    D, C           the all-to-all of S H s bytes on the links of the expert-parallel group (`hardware.py`); in the
                   backward rows are packed, and with `chunk_moe_keep: input` a dispatched one has 2H columns
    E forward      6 R H I operations and a SwiGLU
    E backward     6 R H I, and 4 R H I more if fc1 is computed again
    W              6 R H I, then the sums of the gradients are read and written: 6 L H I numbers in fp32

A matmul takes as long as the slower of its operations and its bytes. So every chunk pays for reading the local experts'
weights (3 L H I s bytes) and for the sums again, which limits N. So does the host, which launches operations one by one
(`Device.launch`). Imbalance multiplies R, by at most EP; the busiest rank decides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mindspeed_chunk.hardware import ALL_TO_ALL, Device, GroupShape, LinkSeconds, link_seconds
from mindspeed_chunk.moe.costs.rows import PER_EXPERT, PER_RANK, ChunkRows, LayerShape, balanced_rows, row_bytes
from mindspeed_chunk.moe.schedule import Action, Timeline, build, simulate

_TOTAL_SIZE = 4  # bytes of an element of the weight gradients' totals
# Operations that the host launches for actions of each kind, in the forward and in the backward: (once in a call, for
# each chunk), as counted in tests/ascend on torch_npu's operators, with `chunk_moe_keep: activations`. P has those
# before the schedule, too.
LAUNCHES: dict[str, tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]]]] = {
    PER_EXPERT: (
        {"P": (11, 2), "D": (1, 0), "E": (14, 5), "C": (0, 0), "U": (0, 2)},
        {"P": (2, 8), "D": (0, 0), "E": (3, 16), "C": (0, 0), "W": (2, 2), "U": (0, 4)},
    ),
    PER_RANK: (
        {"P": (43, 6), "D": (1, 0), "E": (1, 15), "C": (0, 0), "U": (0, 2)},
        {"P": (2, 5), "D": (0, 0), "E": (0, 21), "C": (0, 0), "W": (2, 4), "U": (0, 5)},
    ),
}


class ChunkTimes(NamedTuple):
    """Simulated forward and backward of one layer call, in seconds.

    Attributes:
        links: how long the exchanges of each of the two use the links.
    """

    forward: Timeline
    backward: Timeline
    links: tuple[LinkSeconds, LinkSeconds]

    @property
    def total(self) -> float:
        """Seconds of both directions."""
        return self.forward.total + self.backward.total

    @property
    def exposed(self) -> float:
        """Seconds in which the device waits for the wire."""
        return self.forward.exposed + self.backward.exposed

    @property
    def communication(self) -> float:
        """Seconds of all all-to-alls, hidden or not."""
        return self.forward.communication + self.backward.communication


def chunk_times(
    shape: LayerShape,
    device: Device,
    span: GroupShape | None = None,
    *,
    num_chunks: int = 1,
    schedule: str = "rolling",
    keep: str = "activations",
    lookahead: int = 1,
    dtype: str = "bf16",
    imbalance: float = 1.0,
    rows: Sequence[ChunkRows] | None = None,
) -> ChunkTimes:
    """Times of one layer call of one rank.

    Args:
        span: of the expert-parallel group; without it, all its ranks are on one node.
        schedule, keep, lookahead: `chunk_moe_schedule`, `chunk_moe_keep`, `chunk_moe_lookahead`.
        dtype: of the experts' computation; a key of `device.flops`.
        imbalance: rows that the busiest rank receives over the mean; a larger value than EP counts as EP.
        rows: of each chunk, if they are known, instead of `num_chunks`.

    Raises:
        ConfigError: for a dtype for which the device has no rate.
    """
    rows = rows or balanced_rows(shape, num_chunks, imbalance)
    costs = _Costs(shape, device, span or GroupShape(shape.ep, shape.ep), device.rate(dtype), keep, tuple(rows))
    forward, backward = (
        simulate(
            build(schedule, len(rows), lookahead=lookahead, backward=bool(direction)),
            costs.of(by_kind),
            functools.partial(costs.issue, direction),
        )
        for direction, by_kind in enumerate((costs.forward(), costs.backward()))
    )
    return ChunkTimes(forward, backward, costs.links())


@dataclass(frozen=True)
class _Costs:
    shape: LayerShape
    device: Device
    span: GroupShape
    flops: float
    keep: str
    rows: tuple[ChunkRows, ...]

    def of(self, by_kind: dict[str, Callable[[ChunkRows], float]]) -> Callable[[Action], float]:
        @functools.cache  # most chunks have as many rows as the others
        def cost_of(kind: str, rows: ChunkRows) -> float:
            return by_kind[kind](rows) + (0.0 if kind in "DC" else self.device.call)

        return lambda action: cost_of(action.kind, self.rows[action.chunk])

    def issue(self, direction: int, action: Action) -> float:
        """Seconds of the host; `direction`: 0 forward, 1 backward.

        What comes before the first dispatch of the forward is launched while the device still runs the layers before.
        There the host waits for the plan, so it is not ahead any more.
        """
        once, each = LAUNCHES[self.shape.dispatch][direction][action.kind]
        ahead = direction == 0 and action.kind == "P"
        return (each if ahead or action.chunk else once + each) * self.device.launch

    def forward(self) -> dict[str, Callable[[ChunkRows], float]]:
        out, row, _, _ = row_bytes(self.shape, self.keep)
        return {
            "P": lambda rows: self._moved((rows.tokens + rows.sent) * out + self._packed(rows, out)),
            "D": lambda rows: self._exchange(rows.sent, rows.received, out),
            "E": lambda rows: self._regroup(rows, row, passes=2) + self._matmuls(rows, 6) + self._activation(rows, 3),
            "C": lambda rows: self._exchange(rows.received, rows.sent, row),
            "U": lambda rows: self._moved((rows.tokens + rows.sent) * row),
        }

    def backward(self) -> dict[str, Callable[[ChunkRows], float]]:
        _, _, out, back = row_bytes(self.shape, self.keep)
        again = 0 if self.keep == "activations" else 4
        return {
            "P": lambda rows: self._moved((rows.tokens + rows.sent) * out),
            "D": lambda rows: self._exchange(rows.sent, rows.received, out),
            "E": lambda rows: (
                self._regroup(rows, out, passes=2 + again // 4)
                + self._matmuls(rows, 6 + again)
                + self._activation(rows, 22 if self.shape.element_size == 2 else 16)
            ),
            "C": lambda rows: self._exchange(rows.received, rows.sent, back),
            "W": lambda rows: self._matmuls(rows, 6, totals=True) + self._expanded(rows),
            "U": lambda rows: self._moved((rows.tokens + rows.sent) * back),
        }

    def _moved(self, nbytes: float) -> float:
        return nbytes / self.device.memory_rate

    def _exchange(self, sent: int, received: int, row: float) -> float:
        return max(self._on_links(sent, received, row))

    def _on_links(self, sent: int, received: int, row: float) -> LinkSeconds:
        # a link has two directions: the fuller one decides
        return link_seconds(ALL_TO_ALL, max(sent, received) * row, self.span, self.device)

    def links(self) -> tuple[LinkSeconds, LinkSeconds]:
        """Of all exchanges of the forward, and of the backward."""
        out, row, out_back, row_back = row_bytes(self.shape, self.keep)
        total = [LinkSeconds(), LinkSeconds()]
        for rows in self.rows:
            for direction, widths in enumerate(((out, row), (out_back, row_back))):
                for ends, width in zip(((rows.sent, rows.received), (rows.received, rows.sent)), widths):
                    total[direction] = total[direction].plus(self._on_links(*ends, width))
        return total[0], total[1]

    def _packed(self, rows: ChunkRows, row: float) -> float:
        """Tokens are copied next to their routing before they are permuted."""
        return 2 * rows.tokens * row if self.shape.per_rank else 0

    def _expanded(self, rows: ChunkRows) -> float:
        """The received rows, put in the experts' order."""
        if not self.shape.per_rank:
            return 0.0
        return self._moved((rows.received + rows.at_experts) * self.shape.hidden * self.shape.element_size)

    def _regroup(self, rows: ChunkRows, row: float, passes: int) -> float:
        """Into the experts' order and back: one pass, or several between the received rows and the experts'."""
        if self.shape.per_rank:
            return passes * self._expanded(rows)
        copied = 2 * rows.received * row if self.shape.ep > 1 and self.shape.local_experts > 1 else 0
        return self._moved(copied)

    def _matmuls(self, rows: ChunkRows, per_row: int, *, totals: bool = False) -> float:
        """`per_row` H I operations per row and bytes of the weights; then those of the gradients' totals."""
        shape = self.shape
        if not rows.received:
            return 0.0
        operations = per_row * rows.at_experts * shape.hidden * shape.intermediate
        weights = 0 if totals else shape.weight_elements * shape.element_size * per_row / 6
        touched = rows.at_experts * 2 * (shape.hidden + 3 * shape.intermediate) * shape.element_size
        added = 2 * shape.weight_elements * _TOTAL_SIZE if totals else 0
        return max(operations / self.flops, self._moved(weights + touched)) + self._moved(added)

    def _activation(self, rows: ChunkRows, passes: int) -> float:
        """`passes` times [R, I] read or written, in elements of the rows.

        SwiGLU reads two and writes one, its gradient reads three and writes two. The backward computes it again (3),
        multiplies both by the router weights (4), and sums products for their gradients: 4, or 10 in fp32 for bf16.
        """
        return self._moved(passes * rows.at_experts * self.shape.intermediate * self.shape.element_size)
