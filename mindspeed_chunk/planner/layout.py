"""How a world of ranks is split: TP x CP x DP x PP, and EP inside of CP x DP; the groups of each kind.

Ranks are numbered as in Megatron-LM, whose order is `tp-cp-ep-dp-pp` (`initialize_model_parallel` and
`RankGenerator` in megatron/core/parallel_state.py, NVIDIA/Megatron-LM): the first name varies fastest, so

    rank = tp + TP (cp + CP (dp + DP pp))                 everything but the experts
    rank = tp + TP (ep + EP (edp + EDP pp))               the experts, EDP = CP x DP / EP

A group of a kind holds the ranks that differ in that coordinate alone. With TP = CP = PP = 1 this is the grid of
MindSpeed-MM's FSDP2 back end: consecutive ranks share the experts, and everything else is sharded over all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

Groups = tuple[tuple[int, ...], ...]
# kinds of groups, and the coordinates that vary inside of one; "dp_cp" is the one that sums gradients
DENSE_KINDS = {"tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp", "dp_cp": "cp dp"}
EXPERT_KINDS = {"ep": "ep", "edp": "edp"}
KINDS = (*DENSE_KINDS, *EXPERT_KINDS)


class Layout(NamedTuple):
    """Sizes of the five kinds of parallelism.

    Attributes:
        tp, cp, dp, pp: tensor, context, data and pipeline parallelism; their product is the number of ranks.
        ep: expert parallelism, inside of CP x DP.
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
        """Ranks that hold the same experts."""
        return self.cp * self.dp // self.ep

    def __str__(self) -> str:
        return " ".join(f"{kind.upper()}={size}" for kind, size in self._asdict().items() if size > 1) or "one rank"

    def size(self, kind: str) -> int:
        """Ranks in a group of one of `KINDS`."""
        return self.cp * self.dp if kind == "dp_cp" else getattr(self, kind)

    def groups(self, kind: str) -> Groups:
        """All groups of one of `KINDS`; every rank is in exactly one of them.

        Raises:
            ValueError: where the expert-parallel size does not divide CP x DP.
        """
        if kind in EXPERT_KINDS:
            if (self.cp * self.dp) % self.ep:
                raise ValueError(f"EP={self.ep} does not divide CP x DP = {self.cp * self.dp}")
            axes = (("tp", self.tp), ("ep", self.ep), ("edp", self.edp), ("pp", self.pp))
            return _groups(axes, EXPERT_KINDS[kind])
        axes = (("tp", self.tp), ("cp", self.cp), ("dp", self.dp), ("pp", self.pp))
        return _groups(axes, DENSE_KINDS[kind])

    def inside_node(self, kind: str, devices_per_node: int) -> bool:
        """Whether no group of this kind crosses from one node to another."""
        return nodes_of_group(self.groups(kind), devices_per_node) == 1


@functools.cache
def _groups(axes: tuple[tuple[str, int], ...], varying: str) -> Groups:
    inside, outside, stride = [0], [0], 1
    for name, size in axes:
        steps = range(0, size * stride, stride)
        if name in varying.split():
            inside = [low + step for step in steps for low in inside]
        else:
            outside = [low + step for step in steps for low in outside]
        stride *= size
    return tuple(tuple(start + offset for offset in inside) for start in outside)


def nodes_of_group(groups: Groups, devices_per_node: int) -> int:
    """The most nodes that one of the groups spans."""
    return max(len({rank // devices_per_node for rank in group}) for group in groups)


def layouts(
    world: int,
    *,
    heads: int | None = None,
    layers: int | None = None,
    experts: int | None = None,
) -> Iterator[Layout]:
    """All valid layouts of `world` ranks.

    Args:
        heads: attention heads, which TP divides.
        layers: which PP divides.
        experts: which EP divides.
    """
    for tp in _divisors(world, heads):
        for cp in _divisors(world // tp):
            for pp in _divisors(world // tp // cp, layers):
                dp = world // tp // cp // pp
                for ep in _divisors(cp * dp, experts):
                    yield Layout(tp, cp, ep, dp, pp)


def _divisors(number: int, also: int | None = None) -> list[int]:
    """Of `number`, and of `also` where it is given."""
    return [d for d in range(1, number + 1) if number % d == 0 and (also is None or also % d == 0)]
