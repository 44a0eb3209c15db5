"""A link to peers that do not exist, for a rank that has the only device: all of them do the same as this rank.

The rows that "arrive" are copies, and they are late by the time that the link would take: on a device the stream that
copies them sleeps, on a CPU the wait does. The values of a layer on this link are of no use.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from mindspeed_chunk import device
from mindspeed_chunk import dist as chunk_dist
from mindspeed_chunk.dist import DONE, Work
from mindspeed_chunk.moe import agreement
from mindspeed_chunk.tools.link import bits_per_second

# what is printed with every result
NOTE = (
    "stand-in link: one rank; its peers are copies and sleeps on this device. Not shown: what a collective takes from "
    "the matmuls (cores, memory bandwidth), the start of a message, uneven ranks. A real link hides less"
)
_CYCLES = 50_000_000
_links: list[Link] = []


class Link:
    """The collectives of torch.distributed that a layer uses, with one rank that does what all others do.

    Attributes:
        rate: bits per second, None for no limit.
    """

    def __init__(self, place: torch.device) -> None:
        self.rate: float | None = None
        self._place, self._free_at = place, 0.0
        self._streams: Any = device.accelerator(place)
        if self._streams is not None:
            self._side = self._streams.Stream(place)
            self._cycles_per_s = self._calibrate()

    def all_to_all_single(
        self, received: torch.Tensor, rows: torch.Tensor, recv_splits: Sequence[int], send_splits: Sequence[int],
        **_: object,
    ) -> Work:  # fmt: skip
        on_link = max(sum(send_splits[1:]), sum(recv_splits[1:])) * chunk_dist.row_bytes(rows)
        seconds = 8 * on_link / self.rate if self.rate else 0.0
        if self._streams is None:
            _fill(received, rows)
            self._free_at = max(self._free_at, time.perf_counter()) + seconds
            return _Late(self._free_at)
        self._side.wait_stream(self._streams.current_stream(self._place))
        with self._streams.stream(self._side):
            if seconds:
                self._streams._sleep(int(seconds * self._cycles_per_s))
            _fill(received, rows)
            return device.Copy(self._streams, self._place, self._side.record_event())

    def all_gather(self, gathered: torch.Tensor, local: torch.Tensor, **_: object) -> Work:
        gathered.view(-1, local.numel()).copy_(local.expand(gathered.numel() // local.numel(), -1))
        return DONE

    def _calibrate(self) -> float:
        """Cycles per second of a sleep."""
        for _ in range(2):  # the first one raises the clock rate
            self._streams.synchronize()
            start = time.perf_counter()
            self._streams._sleep(_CYCLES)
            self._streams.synchronize()
        return _CYCLES / (time.perf_counter() - start)


class _Late:
    def __init__(self, end: float) -> None:
        self._end = end

    def wait(self) -> None:
        time.sleep(max(0.0, self._end - time.perf_counter()))


def _fill(received: torch.Tensor, rows: torch.Tensor) -> None:
    n = min(len(received), len(rows))
    received[:n].copy_(rows[:n])
    received[n:].zero_()


def is_played() -> bool:
    return bool(_links)


def set_rate(rate: str | None) -> None:
    """In the words of `--link`; None for no limit."""
    _links[-1].rate = bits_per_second(rate) if rate else None


@contextlib.contextmanager
def played(place: torch.device, ranks: int, rate: str | None) -> Iterator[None]:
    """The default process group is one of `ranks` ranks on such a link."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    link = Link(place)
    _links.append(link)
    set_rate(rate)
    with (
        mock.patch.object(dist, "all_to_all_single", link.all_to_all_single),
        mock.patch.object(dist, chunk_dist._ALL_GATHER, link.all_gather),
        # it would find that the wrong rows arrive
        mock.patch.object(agreement, "check_all_to_all", lambda group, device: None),
    ):
        yield
    _links.remove(link)
