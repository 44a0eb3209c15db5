"""Seconds of a collective on the links that it crosses.

n ranks of a group, d of them on each node it touches, n / d nodes; every device sends on its link inside of the node
and on its own link between nodes at the same time, and the slower of the two decides. Of the algorithms that send no
byte between nodes which could stay inside of one, none needs less. For S bytes of the whole tensor (all-to-all: of the
rows that one rank sends, itself included):

    all-gather, reduce-scatter   inside  S (d - 1) / d        between  S (1 - d / n) / d
    all-reduce                   twice that
    all-to-all                   inside  S (d - 1) / n        between  S (n - d) / n
    point to point               S on the one link

In a gather each device takes in what the devices at its place on the other nodes hold; it then has n / d of the n
pieces, S / d bytes, and gets the others' S (d - 1) / d inside of its node. A reduce-scatter runs it backwards.
"""

from __future__ import annotations

from mindspeed_chunk.planner.device import Device
from mindspeed_chunk.planner.layout import Span

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
ALL_TO_ALL, POINT_TO_POINT = "all-to-all", "point-to-point"


def collective_seconds(kind: str, nbytes: float, span: Span, device: Device) -> float:
    """Seconds of one collective; see the module's table for what `nbytes` is."""
    inside, between = _parts(kind, nbytes, span)
    return max(device.intra.seconds(inside), device.inter.seconds(between))


def _parts(kind: str, nbytes: float, span: Span) -> tuple[float, float]:
    """Bytes that one device sends inside of its node, and to other nodes."""
    n, d = span
    if n == 1:
        return 0.0, 0.0
    if kind == POINT_TO_POINT:
        return (0.0, nbytes) if span.crosses_nodes else (nbytes, 0.0)
    if kind == ALL_TO_ALL:
        return nbytes * (d - 1) / n, nbytes * (n - d) / n
    times = 2 if kind == ALL_REDUCE else 1
    return times * nbytes * (d - 1) / d, times * nbytes * (1 - d / n) / d
