"""Whether a device computes the right values.

The functions of its back end and whole layers in bf16, compared with fp32 on the CPU; the offload; the waits of the
host; and the rows of an all-to-all between devices.

T tokens, K experts per token, E experts, H hidden, R rows, F output columns of fc1.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mindspeed_chunk import device as devices_of_torch
from mindspeed_chunk import ops
from mindspeed_chunk.config import KEEPS, SCHEDULES, ChunkMoEConfig
from mindspeed_chunk.dist import all_to_all
from mindspeed_chunk.mbs.offload import ActivationOffload
from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher
from mindspeed_chunk.moe.reference import moe_reference
from mindspeed_chunk.ops import BackEnd, cpu
from mindspeed_chunk.ops.groups import Groups
from mindspeed_chunk.tools import devices

T, K, E, H, WIDTH = 257, 4, 6, 128, 64
SOME = 700  # rows of fewer than the T x K pairs
COUNTS = ((17, 0, 40, 3, 1, 0), (5, 0, 0, 64, 2, 9), (0, 0, 31, 8, 8, 128))
MOVED, SAME = 0.0, 1e-5  # rows that only move; the same kernels on the same values, twice
COMPUTED, LAYER = 2e-2, 3e-2  # of the largest value: bf16 has 8 bits, and intermediate values are rounded to it
_WIRE_ROWS, _WIRE_WIDTH, _WIRE_ROUNDS = (4096, 64), 2048, 5  # rows on a device, and on a CPU


class Value(NamedTuple):
    """What was compared, the largest difference relative to the largest value, and the allowed one."""

    what: str
    error: float
    allowed: float

    @property
    def right(self) -> bool:
        return self.error <= self.allowed


def check(place: torch.device) -> Iterator[Value]:
    """All comparisons that need no other rank."""
    yield from functions(place)
    yield from layers(place)
    yield offload(place)
    yield from waits(place)


def _inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).bfloat16()

    rows = sum(map(sum, COUNTS))
    return {
        "x": normal(T, H),
        "route": torch.rand(T, E, generator=generator).topk(K).indices,
        "weight": torch.rand(T, K, generator=generator).bfloat16(),
        "rows": normal(rows, H),
        "sent": normal(T * K, H),
        "grad": normal(rows, 2 * WIDTH),
        "half": normal(rows, WIDTH),
        "fc1": normal(E, H, 2 * WIDTH, scale=H**-0.5),
        "fc2": normal(E, WIDTH, H, scale=WIDTH**-0.5),
    }


def _into(out: torch.Tensor, function: Callable[[torch.Tensor], object]) -> torch.Tensor:
    """What a function has written to `out`."""
    function(out)
    return out


def _strided(t: Any) -> torch.Tensor:
    """Rows for a product of `t.rows` in a wider buffer."""
    return t.rows.new_zeros(t.rows.shape[0], 2 * WIDTH + 8)[:, : 2 * WIDTH]


def _total(t: Any) -> torch.Tensor:
    return torch.zeros(E, H, 2 * WIDTH, device=t.rows.device)


# what, how far it may be off, and the function of a back end `b` on its inputs `t`
FUNCTIONS: tuple[tuple[str, float, Callable[[BackEnd, Any], torch.Tensor]], ...] = (
    ("count", MOVED, lambda b, t: b.count(t.route, E)),
    ("permute", MOVED, lambda b, t: b.permute(t.x, t.route)[0]),
    ("permute, some rows", MOVED, lambda b, t: b.permute(t.x, t.route, SOME)[0]),
    ("permute_backward", COMPUTED, lambda b, t: b.permute_backward(t.sent, t.order, K)),
    ("permute_backward, some rows", COMPUTED, lambda b, t: b.permute_backward(t.sent[:SOME], t.order, K)),
    ("unpermute", COMPUTED, lambda b, t: b.unpermute(t.sent, t.order, t.weight)),
    ("unpermute, some rows", COMPUTED, lambda b, t: b.unpermute(t.sent[:SOME], t.order, t.weight)),
    ("pairs", MOVED, lambda b, t: b.pairs(t.order)),
    ("unpermute_backward", MOVED, lambda b, t: b.unpermute_backward(t.x, b.pairs(t.order), K)),
    ("rows_of", MOVED, lambda b, t: b.rows_of(t.weight, b.pairs(t.order))),
    ("rows_of_backward", MOVED, lambda b, t: _into(
        torch.zeros_like(t.weight), lambda out: b.rows_of_backward(t.sent[:, 0], t.order, out))),
    ("regroup", MOVED, lambda b, t: b.regroup(t.rows, t.groups)),
    ("regroup_backward", MOVED, lambda b, t: b.regroup_backward(t.rows, t.groups)),
    ("operand", MOVED, lambda b, t: b.operand(t.rows[:, ::2])),
    ("grouped_mm", COMPUTED, lambda b, t: b.grouped_mm(t.rows, t.fc1, t.groups)),
    ("grouped_mm, into strided rows", COMPUTED, lambda b, t: _into(
        _strided(t), lambda out: b.grouped_mm(t.rows, t.fc1, t.groups, out=out))),
    ("grouped_mm, transposed", COMPUTED, lambda b, t: b.grouped_mm(t.grad, t.fc1.transpose(1, 2), t.groups)),
    ("grouped_mm_back", COMPUTED, lambda b, t: b.grouped_mm_back(t.rows, t.fc1, t.groups)),
    ("grouped_mm_back, into strided rows", COMPUTED, lambda b, t: _into(
        _strided(t), lambda out: b.grouped_mm_back(t.rows, t.fc1, t.groups, out=out))),
    ("grouped_mm_wgrad", COMPUTED, lambda b, t: _into(
        _total(t), lambda out: b.grouped_mm_wgrad(t.rows, t.grad, t.groups, out))),
    ("grouped_mm_wgrad, transposed", COMPUTED, lambda b, t: _into(
        _total(t).mT.contiguous().mT, lambda out: b.grouped_mm_wgrad(t.rows, t.grad, t.groups, out))),
    ("swiglu", COMPUTED, lambda b, t: b.swiglu(t.grad, 0.0)),
    ("swiglu, clamped", COMPUTED, lambda b, t: b.swiglu(t.grad, 0.5)),
    ("swiglu_backward", COMPUTED, lambda b, t: b.swiglu_backward(t.half.clone(), t.grad.clone(), 0.0, reuse=False)),
    ("swiglu_backward, clamped, in place", COMPUTED, lambda b, t: b.swiglu_backward(
        t.half.clone(), t.grad.clone(), 0.5, reuse=True)),
)  # fmt: skip


def functions(place: torch.device) -> Iterator[Value]:
    """Every function of the back end of this device, in bf16, compared with the CPU back end in fp32."""
    back_end, given = ops.resolve("auto", place), _inputs()
    wide = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in given.items()}
    moved = {name: tensor.to(place) for name, tensor in given.items()}
    sides = []
    for which, tensors, where in ((back_end, moved, place), (cpu, wide, torch.device("cpu"))):
        order = which.permute(tensors["x"], tensors["route"])[1]
        sides.append((which, SimpleNamespace(**tensors, order=order, groups=Groups.of(COUNTS, where))))
    for what, allowed, run in FUNCTIONS:
        got, want = (run(*side) for side in sides)
        yield _judged(what, [(got, want)], allowed)


def layers(place: torch.device) -> Iterator[Value]:
    """The layer with all experts on the device, in bf16, compared with the reference in fp32; output and gradients."""
    given = _inputs()
    tensors, grad_TH = [given[name] for name in ("x", "weight", "fc1", "fc2")], given["x"].flip(0)

    def run(call: Callable, where: torch.device | str, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [tensor.to(where, dtype).requires_grad_() for tensor in tensors]
        out = call(leaves, given["route"].to(where))
        return [out, *torch.autograd.grad(out, leaves, grad_TH.to(where, dtype))]

    expected = run(lambda t, route: moe_reference(t[0], route, *t[1:]), "cpu", torch.float32)
    for keep, schedule, number in itertools.product(KEEPS, SCHEDULES, (1, 4)):
        config = ChunkMoEConfig(moe_num_chunks=number, chunk_moe_keep=keep, chunk_moe_schedule=schedule)
        layer = ChunkMoEDispatcher(config)
        got = run(lambda t, route, layer=layer: layer(E, t[1], route, t[0], *t[2:]), place, torch.bfloat16)
        yield _judged(f"layer: {schedule}, N={number}, keep {keep}", zip(got, expected), LAYER)


def offload(place: torch.device) -> Value:
    """Gradients of blocks whose activations wait on the host, compared with the same blocks without."""
    x = _inputs()["x"].float().to(place)
    made = [torch.nn.Sequential(torch.nn.Linear(H, H), torch.nn.GELU(), torch.nn.LayerNorm(H)) for _ in range(4)]
    blocks, moved, found = torch.nn.ModuleList(made).to(place), ActivationOffload(), []
    for wrap in (lambda name, block: block, moved.wrap):
        hidden = x.clone().requires_grad_() * 1
        for number, block in enumerate(blocks):
            hidden = wrap(f"block {number}", block)(hidden)
        found.append(torch.autograd.grad(hidden.square().mean(), list(blocks.parameters())))
    return _judged("activation offload", zip(found[1], [grad.cpu() for grad in found[0]]), SAME)


def waits(place: torch.device) -> Iterator[Value]:
    """Whether a layer call makes the host wait for more than its plan, as the device's own debug mode reports it."""
    streams: Any = devices_of_torch.accelerator(place)
    if streams is None:
        return
    given = {name: tensor.to(place) for name, tensor in _inputs().items()}
    leaves = weight_TK, x_TH, fc1_LHF, fc2_LIH = [
        given[name].requires_grad_() for name in ("weight", "x", "fc1", "fc2")
    ]
    layer, found = ChunkMoEDispatcher(ChunkMoEConfig(moe_num_chunks=4)), ""
    for mode in ("default", "error"):
        streams.set_sync_debug_mode(mode)
        try:
            out = layer(E, weight_TK, given["route"], x_TH, fc1_LHF, fc2_LIH)
            torch.autograd.grad(out, leaves, torch.ones_like(out))
        except RuntimeError as error:
            found = f": {str(error).splitlines()[0]}"
        finally:
            streams.set_sync_debug_mode("default")
    yield Value(f"waits of the host other than the plan's{found}", float(bool(found)), MOVED)


def wire(place: torch.device) -> tuple[Value, float]:
    """Send rows of a real width there and back, with uneven splits, some of them zero.

    Some software stacks report success and deliver zeros.

    Returns:
        Whether each row arrived, bit for bit, and this rank's seconds for each 1e9 bytes that it sends to others.
    """
    rank, size, rows = dist.get_rank(), dist.get_world_size(), _WIRE_ROWS[place.type == "cpu"]
    splits = [(rank + peer) % 3 * rows // 2 for peer in range(size)]  # symmetric
    sent = torch.randn(sum(splits), _WIRE_WIDTH, device=place).bfloat16()
    sent[:, 0] = rank  # bf16 has integers up to 256
    senders = torch.repeat_interleave(torch.arange(size), torch.tensor(splits)).to(place, torch.bfloat16)
    seconds, wrong = [], 0.0
    for _ in range(_WIRE_ROUNDS):
        devices.synchronize(place)
        start = time.perf_counter()
        there, work = all_to_all(sent, splits, splits, dist.group.WORLD, "there")
        work.wait()
        back, work = all_to_all(there, splits, splits, dist.group.WORLD, "back")
        work.wait()
        devices.synchronize(place)
        seconds.append(time.perf_counter() - start)
        wrong += not torch.equal(back, sent) or not torch.equal(there[:, 0], senders)
    nbytes = 2 * (sum(splits) - splits[rank]) * _WIRE_WIDTH * sent.element_size()
    return Value("all-to-all, there and back", wrong, MOVED), 1e9 * sorted(seconds)[_WIRE_ROUNDS // 2] / nbytes


def _judged(what: str, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], allowed: float) -> Value:
    errors = []
    for got, want in pairs:
        got, want = got.detach().cpu().double(), want.detach().double()
        errors.append(((got - want).abs().max() / want.abs().max()).nan_to_num(float("inf")).item())
    return Value(what, max(errors), allowed)
