"""A device, its links, and the seconds of a collective on the links that it crosses.

n ranks of a group, at most d and at least f of them on each node that it uses. Every device sends on its link inside
the node and on its own link between nodes at the same time, and the slower of the two decides. No algorithm needs less,
among those that send between nodes only what cannot stay inside one. For S bytes of the whole tensor (all-to-all: of
the rows that one rank sends, including those to itself), the busiest device sends:

    all-gather, reduce-scatter   inside  S (d - 1) / d        between  S (1 - f / n) / f
    all-reduce                   twice that
    all-to-all                   inside  S (d - 1) / n        between  S (n - f) / n
    point to point               S on the one link

In a gather the devices of a node first receive, together, the pieces of all devices of other nodes, each an equal part.
Then each gets the other pieces inside its node. A reduce-scatter is the reverse.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mindspeed_chunk.config import ConfigError

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
ALL_TO_ALL, POINT_TO_POINT = "all-to-all", "point-to-point"
RankGroups = tuple[tuple[int, ...], ...]  # ranks of each group


@dataclass(frozen=True, kw_only=True)
class Link:
    """Between two devices.

    Attributes:
        rate: bytes per second that one device sends.
        latency: additional seconds of every message.
        measured: (bytes, seconds) of single messages, in order of bytes. Between them the time is interpolated
            linearly. Beyond them it grows with the last slope and never falls. Below the first it is at least that
            one's share. Replaces the other two.
    """

    rate: float
    latency: float = 0.0
    measured: tuple[tuple[float, float], ...] = ()

    def seconds(self, nbytes: float) -> float:
        """Seconds of one message of `nbytes` bytes; 0 for no bytes."""
        if nbytes <= 0:
            return 0.0
        if not self.measured:
            return self.latency + nbytes / self.rate
        sizes = [size for size, _ in self.measured]
        right = min(max(bisect.bisect_left(sizes, nbytes), 1), len(sizes) - 1)
        (size, time), (next_size, next_time) = self.measured[right - 1 : right + 1]
        straight = time + (nbytes - size) * (next_time - time) / (next_size - size)
        return max(straight, time * nbytes / size if nbytes < size else min(time, next_time))


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device as a rank drives it.

    Attributes:
        memory: bytes.
        flops: dense floating-point operations per second by number format; a missing format is not supported.
        memory_rate: bytes per second.
        intra: the link inside a node.
        inter: the link between nodes.
        call: additional seconds of every action of a schedule.
        launch: seconds that the host needs to launch one operation; it does so ahead of the device.
        product, per_node: the machine that has it, and devices of its nodes; "" and 0 if that is not known.
        sources: where the numbers are from.
    """

    name: str
    memory: float
    flops: Mapping[str, float]
    memory_rate: float
    intra: Link
    inter: Link
    call: float = 0.0
    launch: float = 0.0
    product: str = ""
    per_node: int = 0
    sources: tuple[str, ...] = ()

    def rate(self, dtype: str) -> float:
        """Operations per second in `dtype`.

        Raises:
            ConfigError: if the device does not support it.
        """
        if dtype not in self.flops:
            way_out = f"use {', '.join(self.flops)}, or a device file with flops_{dtype}"
            raise ConfigError.about("dtype", dtype, f"{self.name} has no matrix unit for it", way_out)
        return self.flops[dtype]


class GroupShape(NamedTuple):
    """Ranks of a group, and how many of them are on one node.

    Attributes:
        per_node: on the node with the most.
        fewest: on the node with the fewest; 0: as many on each.
    """

    ranks: int
    per_node: int
    fewest: int = 0

    @classmethod
    def of(cls, groups: RankGroups, devices_per_node: int) -> GroupShape:
        """The span of the group that is busiest between nodes."""
        counts = (Counter(rank // devices_per_node for rank in group).values() for group in groups)
        return min((cls.counted(each) for each in counts), key=lambda shape: (shape.least, -shape.per_node))

    @classmethod
    def counted(cls, on_nodes: Collection[int]) -> GroupShape:
        """From the number of the group's ranks on each node."""
        most, least = max(on_nodes), min(on_nodes)
        return cls(sum(on_nodes), most, 0 if most == least else least)

    @property
    def least(self) -> int:
        """Ranks on the node with the fewest."""
        return self.fewest or self.per_node

    @property
    def crosses_nodes(self) -> bool:
        """Whether the group has ranks on more than one node."""
        return self.per_node < self.ranks


class LinkSeconds(NamedTuple):
    """Seconds for which collectives use the link inside a node, and the one between nodes."""

    inside: float = 0.0
    between: float = 0.0

    def plus(self, other: LinkSeconds, times: float = 1.0) -> LinkSeconds:
        return LinkSeconds(self.inside + times * other.inside, self.between + times * other.between)


def link_seconds(kind: str, nbytes: float, span: GroupShape, device: Device) -> LinkSeconds:
    """Of one collective on each link; the module's table explains `nbytes`."""
    inside, between = _parts(kind, nbytes, span)
    return LinkSeconds(device.intra.seconds(inside), device.inter.seconds(between))


def collective_seconds(kind: str, nbytes: float, span: GroupShape, device: Device) -> float:
    """Seconds of one collective."""
    return max(link_seconds(kind, nbytes, span, device))


def _parts(kind: str, nbytes: float, span: GroupShape) -> tuple[float, float]:
    """Bytes that the busiest device sends inside its node, and to other nodes."""
    n, d, f = span.ranks, span.per_node, span.least
    if n == 1:
        return 0.0, 0.0
    if kind == POINT_TO_POINT:
        return (0.0, nbytes) if span.crosses_nodes else (nbytes, 0.0)
    if kind == ALL_TO_ALL:
        return nbytes * (d - 1) / n, nbytes * (n - f) / n
    times = 2 if kind == ALL_REDUCE else 1
    return times * nbytes * (d - 1) / d, times * nbytes * (1 - f / n) / f
