"""The split of all ranks: TP x CP x DP x PP, and EP inside CP x DP; the groups of each kind.

Ranks are numbered as in Megatron-LM, whose order is `tp-cp-ep-dp-pp` (`initialize_model_parallel` and
`RankGenerator` in megatron/core/parallel_state.py, NVIDIA/Megatron-LM): the first name varies fastest, so

    rank = tp + TP (cp + CP (dp + DP pp))                 everything except the experts
    rank = tp + TP (ep + EP (edp + EDP pp))               the experts, EDP = CP x DP / EP

The ranks of a group differ only in the coordinate of that kind. With TP = CP = PP = 1 this is the grid of
MindSpeed-MM's FSDP2 back end: consecutive ranks share the experts, and everything else is sharded over all ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

from mindspeed_chunk.hardware import GroupShape, RankGroups

# "dp_cp" is the one that sums gradients
KINDS = ("tp", "cp", "dp", "pp", "dp_cp", "ep", "edp")


class Layout(NamedTuple):
    """Sizes of the five kinds of parallelism.

    Attributes:
        tp, cp, dp, pp: tensor, context, data and pipeline parallelism; their product is the number of ranks.
        ep: expert parallelism, inside CP x DP.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def edp(self) -> int:
        """Number of ranks with the same experts."""
        return self.cp * self.dp // self.ep

    def __str__(self) -> str:
        return " ".join(f"{kind.upper()}={size}" for kind, size in self._asdict().items() if size > 1) or "one rank"

    def size(self, kind: str) -> int:
        """Number of ranks in a group of one of `KINDS`."""
        return self.cp * self.dp if kind == "dp_cp" else getattr(self, kind)

    def groups(self, kind: str) -> RankGroups:
        """All groups of one of `KINDS`; every rank is in exactly one of them.

        Raises:
            ValueError: if the expert-parallel size does not divide CP x DP.
        """
        stride, size = self._steps(kind)
        block = stride * size
        firsts = (start + place for start in range(0, self.world, block) for place in range(stride))
        return tuple(tuple(range(first, first + block, stride)) for first in firsts)

    def span(self, kind: str, devices_per_node: int) -> GroupShape:
        """The same as `GroupShape.of` for `groups(kind)`, but without a list of all ranks.

        Raises:
            ValueError: as `groups` does.
        """
        return _span(*self._steps(kind), self.world, devices_per_node)

    def inside_node(self, kind: str, devices_per_node: int) -> bool:
        """Whether no group of this kind crosses from one node to another."""
        return not self.span(kind, devices_per_node).crosses_nodes

    def _steps(self, kind: str) -> tuple[int, int]:
        """The distance from one rank of a group to the next one, and the number of its ranks."""
        if kind in ("ep", "edp"):
            if (self.cp * self.dp) % self.ep:
                raise ValueError(f"EP={self.ep} does not divide CP x DP = {self.cp * self.dp}")
            return (self.tp, self.ep) if kind == "ep" else (self.tp * self.ep, self.edp)
        strides = {"tp": 1, "cp": self.tp, "dp": self.tp * self.cp, "pp": self.tp * self.cp * self.dp}
        return strides["cp" if kind == "dp_cp" else kind], self.size(kind)


@functools.lru_cache(maxsize=4096)
def _span(stride: int, size: int, world: int, devices_per_node: int) -> GroupShape:
    """The busiest span of groups of `size` ranks with distance `stride`; a block of stride x size ranks has `stride` of
    them.
    """
    block, each = stride * size, devices_per_node // stride
    if stride >= devices_per_node:
        return GroupShape(size, 1)
    if devices_per_node % stride == 0 and (size % each == 0 or each % size == 0):
        return GroupShape(size, min(size, each))  # groups begin where a node or an equal part of it begins
    # the places of blocks in their first nodes are repeated
    starts = range(0, min(world, math.lcm(block, devices_per_node)), block)
    groups = tuple(tuple(range(start + place, start + block, stride)) for start in starts for place in range(stride))
    return GroupShape.of(groups, devices_per_node)


def layouts(
    world: int,
    *,
    heads: int | None = None,
    layers: int | None = None,
    experts: int | None = None,
) -> Iterator[Layout]:
    """All valid layouts of `world` ranks.

    Args:
        heads: number of attention heads; TP must divide it.
        layers: PP must divide it.
        experts: EP must divide it.
    """
    for tp in _divisors(world, heads):
        for cp in _divisors(world // tp):
            for pp in _divisors(world // tp // cp, layers):
                dp = world // tp // cp // pp
                for ep in _divisors(cp * dp, experts):
                    yield Layout(tp, cp, ep, dp, pp)


@functools.lru_cache(maxsize=4096)
def _divisors(number: int, also: int | None = None) -> tuple[int, ...]:
    """Divisors of `number`, and of `also` if it is given."""
    number = math.gcd(number, also or number)
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return (*low, *(number // d for d in reversed(low) if d * d < number))
