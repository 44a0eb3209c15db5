"""One rank's MoE layer of the benchmark: its tensors and routing, what it computes, how long it takes, what it keeps.

T tokens here, H hidden, K experts a token, E experts, L experts here, I expert intermediate, F = 2I.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.moe.filler import Filler
from mindspeed_chunk.observe import observe
from mindspeed_chunk.tools import bench_values, devices
from mindspeed_chunk.tools.bench_cases import BenchCase, build
from mindspeed_chunk.tools.measure import sent_to_others
from mindspeed_chunk.wording import shortened

# relative to the largest value: sums in another order
TOLERANCES = {"float32": 1e-4, "float64": 1e-10, "bfloat16": 5e-2}
_RESULTS = ("the output", *(f"the gradient of {name}" for name in ("x", "the router weights", "fc1", "fc2")))
_SHARED = ("the gradient of the shared expert's first weight", "that of its second")
_POPULARITY_SEED = 1
_MEMORY_PASSES = 3
_MOST_EXPONENT = 10
_SETTLE_S = 0.01


class NoResult(RuntimeError):
    """A command has nothing to show; raised on every rank."""


class ValuesDiffer(NoResult):
    """The device computes a wrong value, or a case another one than the plain dispatcher."""

    def __str__(self) -> str:
        return f"{super().__str__()}; no times are shown"


class Residency(NamedTuple):
    """Bytes of a case, the most of any rank; see `BenchLayer.residency`."""

    kept: int
    peak: int


class Traffic(NamedTuple):
    """All-to-alls of rows in one call, and the bytes a rank sends to others in them, the most of any rank."""

    exchanges: int
    sent: int


def routing(options: argparse.Namespace, rank: int, ranks: int) -> torch.Tensor:
    """The expert ids of this rank's tokens, int64 `[T, K]`.

    Raises:
        ConfigError: for a routing that is neither known nor a file of expert ids that fits.
    """
    kind, _, exponent = options.routing.partition(":")
    if kind not in ("balanced", "zipf"):
        return _recorded(options, rank, ranks)
    try:
        power = 0.0 if kind == "balanced" else float(exponent or 1)
    except ValueError:
        power = math.nan
    if not 0 <= power <= _MOST_EXPONENT:
        raise _wrong(f"{options.routing!r}: the exponent must be a number from 0 to {_MOST_EXPONENT}")
    place_E = torch.randperm(options.experts, generator=torch.Generator().manual_seed(_POPULARITY_SEED))
    chance_E = (1.0 + place_E.double()) ** -power
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.multinomial(chance_E.expand(options.tokens, -1), options.top_k, generator=generator)


def _recorded(options: argparse.Namespace, rank: int, ranks: int) -> torch.Tensor:
    path = Path(options.routing)
    if not os.path.isfile(path):  # not Path's, which raises for a name that is too long
        raise _wrong(f"{options.routing!r}: must be balanced, zipf, zipf:EXPONENT or a file")
    try:
        index = torch.load(path, weights_only=True)
    except Exception as error:
        raise _wrong(f"{path} was not written by torch.save: {shortened(str(error).partition(chr(10))[0])}") from None
    if not isinstance(index, torch.Tensor) or index.is_floating_point() or index.dim() not in (2, 3):
        raise _wrong(f"{path} must hold one tensor of integers, [tokens, k] or [ranks, tokens, k]")
    if index.dim() == 2:
        index = index[: index.shape[0] // ranks * ranks].view(ranks, -1, index.shape[1])
    if index.shape[0] != ranks or index.numel() == 0:
        raise _wrong(f"{path} holds {tuple(index.shape)}, which does not fit {ranks} ranks")
    if index.min() < 0 or index.max() >= options.experts:
        raise _wrong(f"{path} holds ids up to {index.max()}, --experts is {options.experts}")
    return index[rank].to(torch.int64)


def _wrong(text: str) -> ConfigError:
    return ConfigError(f"--routing: {text}")


class BenchLayer:
    """One rank's tensors, random but for the routing.

    Args:
        group: the expert-parallel ranks, all of the world, or None for a layer that has all experts here.

    Attributes:
        kind, device: "cpu", "cuda" or "npu", and what all tensors are on.
        unit: bytes of the rows that this rank sends, T x K x H x element size; memory is in this unit.
    """

    def __init__(self, options: argparse.Namespace, group: dist.ProcessGroup | None) -> None:
        self.group, self.num_experts = group, options.experts
        self.kind, self.device = options.device, devices.here(options.device)
        rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self.index_TK = routing(options, rank, ranks).to(self.device)
        (tokens, top_k), self.forward_only = self.index_TK.shape, options.forward_only
        dtype, self.tolerance = getattr(torch, options.dtype), TOLERANCES[options.dtype]
        generator = torch.Generator().manual_seed(rank)
        local, hidden, width = options.experts // ranks, options.hidden, options.intermediate

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * scale).to(self.device, dtype).requires_grad_()

        self.x_TH = normal(tokens, hidden)
        self.weight_TK = normal(tokens, top_k)
        self.fc1_LHF = normal(local, hidden, 2 * width, scale=hidden**-0.5)
        self.fc2_LIH = normal(local, width, hidden, scale=width**-0.5)
        shared = options.shared_expert
        self.shared: tuple[torch.Tensor, ...]
        self.shared = (normal(hidden, 2 * shared, scale=hidden**-0.5), normal(shared, hidden)) if shared else ()
        self.grad_TH = normal(tokens, hidden).detach()
        self.unit = tokens * top_k * hidden * self.x_TH.element_size()

    def forward(self, case: BenchCase) -> torch.Tensor:
        shared = Filler(self._shared_expert)
        if self.shared and not case.fills:
            shared.run()
        with shared if self.shared else contextlib.nullcontext():
            routed_TH = case.dispatch(
                self.num_experts, self.weight_TK, self.index_TK, self.x_TH, self.fc1_LHF, self.fc2_LIH, self.group
            )
        return routed_TH + shared.result() if self.shared else routed_TH

    def _shared_expert(self) -> torch.Tensor:
        up_HF, down_FH = self.shared
        gate_TI, up_TI = (self.x_TH @ up_HF).chunk(2, dim=-1)
        return (F.silu(gate_TI) * up_TI) @ down_FH

    def backward(self, out_TH: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = (self.x_TH, self.weight_TK, self.fc1_LHF, self.fc2_LIH, *self.shared)
        return torch.autograd.grad(out_TH, inputs, self.grad_TH)

    @contextlib.contextmanager
    def around(self, case: BenchCase) -> Iterator[None]:
        """What must be active while the case runs."""
        with case.around, torch.set_grad_enabled(not self.forward_only):
            yield

    def run(self, case: BenchCase) -> tuple[torch.Tensor, ...]:
        """The output and, unless only the forward is asked for, all gradients."""
        with self.around(case):
            out_TH = self.forward(case)
            return (out_TH.detach(), *(() if self.forward_only else self.backward(out_TH)))

    def check(self, cases: list[BenchCase]) -> dict[str, float]:
        """Compare each case with the plain dispatcher.

        Returns:
            Each case's largest difference, relative to the largest value, on any rank.

        Raises:
            ValuesDiffer: on every rank, if it is over the tolerance on one.
        """
        expected, errors = self.run(build("alltoall")), {}
        for case in cases:
            found = most([_distance(got, want) for got, want in zip(self.run(case), expected, strict=True)])
            errors[case.name] = max(found)
            for what, error in zip((*_RESULTS, *_SHARED), found, strict=False):
                if not error <= self.tolerance:
                    raise ValuesDiffer(f"{case.name}: {what} is off the plain dispatcher's by {error:.1e} of the most")
        return errors

    def time(self, case: BenchCase, calls: int = 1) -> float:
        """Seconds per call, from a barrier to the end of the slower rank."""

        def run() -> None:
            for _ in range(calls):
                self.run(case)

        return seconds_of(run, self.device) / calls

    def residency(self, case: BenchCase) -> Residency:
        """Bytes of storages that come into being in the call, so without the layer's inputs and weights.

        kept: alive between forward and backward, without the output, which the next layer keeps. peak: the most
        alive at once in the forward, or in the backward less one buffer of the weights' gradients, whichever is more;
        with the output, which is held throughout, and the gradient of the input. Both are the least of several passes:
        gloo's threads release the rows that they have carried a moment after the wait. On a device: by its allocator.
        """
        passes = [self._residency(case) for _ in range(_MEMORY_PASSES)]
        return Residency(*(int(max_of_ranks) for max_of_ranks in most([min(each) for each in zip(*passes)])))

    def _residency(self, case: BenchCase) -> Residency:
        weight_grads = self.fc1_LHF.nbytes + self.fc2_LIH.nbytes
        devices.barrier()
        with self.around(case), devices.memory(self.device) as live:
            out_TH = self.forward(case)
            time.sleep(_SETTLE_S)
            kept, peak = live.now - out_TH.untyped_storage().nbytes(), live.peak
            if not self.forward_only:
                live.peak = live.now
                self.backward(out_TH)
                peak = max(peak, live.peak - weight_grads)
        return Residency(kept, peak)

    def traffic(self, case: BenchCase) -> Traffic | None:
        """None for MindSpeed-MM's code, which does not report it."""
        with observe() as events:
            self.run(case)
        calls = sum(event.kind == "all_to_all" for event in events)
        exchanges, sent = map(int, most([calls, sent_to_others(events)]))
        return Traffic(exchanges, sent) if exchanges else None


def check_device(options: argparse.Namespace) -> dict[str, Any]:
    """Compare the device's values with those of a CPU, and then send rows between the devices.

    Returns:
        `values` and `wire_gb_per_s`, of the slowest rank, for a record.

    Raises:
        ValuesDiffer: on every rank, if a value is wrong on one.
    """
    place = devices.here(options.device)
    values, rate = list(bench_values.check(place)), None
    _refuse_wrong(values)
    if not options.stand_in:
        arrived, seconds_per_gb = bench_values.wire(place)
        _refuse_wrong([arrived])
        values, rate = [*values, arrived], 1 / most([seconds_per_gb])[0]
    return {"values": [each._asdict() for each in values], "wire_gb_per_s": rate}


def _refuse_wrong(values: list[bench_values.Value]) -> None:
    wrong = [f"{each.what}: off by {each.error:.1e}, allowed {each.allowed:.0e}" for each in values if not each.right]
    if most([len(wrong)])[0]:
        raise ValuesDiffer("; ".join(wrong) or "another rank has wrong values")


def check_cases(options: argparse.Namespace, layer: BenchLayer, cases: list[BenchCase]) -> dict[str, float]:
    """`BenchLayer.check`; on a stand-in link, where no right rows arrive, of a smaller layer without peers."""
    if options.stand_in:
        experts, tokens = options.experts // options.ranks, -(-options.tokens // options.ranks)
        small = {"experts": experts, "tokens": tokens, "top_k": min(options.top_k, experts), "routing": "balanced"}
        layer = BenchLayer(argparse.Namespace(**{**vars(options), **small}), None)
    return layer.check(cases)


def most(values: list[float]) -> list[float]:
    """Each value's largest over the ranks; infinite if one is NaN."""
    largest = torch.tensor(values, dtype=torch.float64).nan_to_num(nan=float("inf"))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.tolist()


def seconds_of(function: Callable[[], object], place: torch.device) -> float:
    """Of the slowest rank, from a barrier to the end of what the function has queued."""
    devices.barrier()
    devices.synchronize(place)
    start = time.perf_counter()
    function()
    devices.synchronize(place)
    return most([time.perf_counter() - start])[0]


def _distance(got: torch.Tensor, want: torch.Tensor) -> float:
    if got.shape != want.shape:
        return float("inf")
    difference, largest = (got - want).abs().max().item(), want.abs().max().item()
    if difference == 0:  # of zeros, too, as the gradients of experts without rows are
        return 0.0
    return difference / largest if largest else float("inf")
