"""The comparisons of device_check.py: operations and layers in bf16 on a device with fp32 on the CPU, and the offload.

T tokens, K experts per token, H hidden, R rows, F output columns of fc1, L experts, S source ranks.
"""

import itertools
from types import SimpleNamespace

import torch

from mindspeed_chunk.config import KEEPS, SCHEDULES, ChunkMoEConfig
from mindspeed_chunk.mbs.offload import ActivationOffload
from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher
from mindspeed_chunk.moe.reference import moe_reference
from mindspeed_chunk.ops import cpu, cuda
from mindspeed_chunk.ops.groups import Groups

T, K, E, H, WIDTH = 257, 4, 6, 128, 64
COUNTS = ((17, 0, 40, 3, 1, 0), (5, 0, 0, 64, 2, 9), (0, 0, 31, 8, 8, 128))
MOVED = 0.0
SAME = 1e-5  # the same kernels on the same values, twice
COMPUTED = 2e-2  # of the largest value; bf16 has 8 bits, and intermediate values are rounded to it
LAYER = 3e-2


def inputs():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator).bfloat16()

    rows = sum(map(sum, COUNTS))
    return {
        "x": normal(T, H),
        "route": torch.rand(T, E, generator=generator).topk(K).indices,
        "weight": torch.rand(T, K, generator=generator).bfloat16(),
        "rows": normal(rows, H),
        "sent": normal(T * K, H),
        "grad": normal(rows, 2 * WIDTH),
        "half": normal(rows, WIDTH),
        "fc1": normal(E, H, 2 * WIDTH),
        "numbers": normal(T * K),
    }


def computed_at(out, function):
    """What a function has written to `out`."""
    function(out)
    return out


def total(t, ops, transposed):
    zeros = torch.zeros(E, H, 2 * WIDTH, device=t.rows.device)
    if transposed:
        zeros = zeros.transpose(1, 2).contiguous().transpose(1, 2)
    return computed_at(zeros, lambda out: ops.grouped_mm_wgrad(t.rows, t.grad, t.groups, out))


def strided(t, function):
    buffer = torch.zeros(t.rows.shape[0], 2 * WIDTH + 8, dtype=t.rows.dtype, device=t.rows.device)
    return computed_at(buffer, lambda out: function(t.rows, t.fc1, t.groups, out=out[:, : 2 * WIDTH]))


# what, how far it may be off, and the operation on the inputs `t` of a back end
OPERATIONS = (
    ("count", MOVED, lambda ops, t: ops.count(t.route, E)),
    ("permute", MOVED, lambda ops, t: ops.permute(t.x, t.route)[0]),
    ("its order", MOVED, lambda ops, t: ops.permute(t.x, t.route)[1]),
    ("permute_backward", COMPUTED, lambda ops, t: ops.permute_backward(t.sent, t.order, K)),
    ("unpermute", COMPUTED, lambda ops, t: ops.unpermute(t.sent, t.order, t.weight)),
    ("unpermute_backward", MOVED, lambda ops, t: ops.unpermute_backward(t.x, t.order, K)),
    ("rows_of", MOVED, lambda ops, t: ops.rows_of(t.weight, t.order)),
    (
        "rows_of_backward",
        MOVED,
        lambda ops, t: computed_at(t.weight.clone(), lambda out: ops.rows_of_backward(t.numbers, t.order, out)),
    ),
    ("regroup", MOVED, lambda ops, t: ops.regroup(t.rows, t.groups)),
    ("regroup_backward", MOVED, lambda ops, t: ops.regroup_backward(t.rows, t.groups)),
    ("grouped_mm", COMPUTED, lambda ops, t: ops.grouped_mm(t.rows, t.fc1, t.groups)),
    ("grouped_mm, into strided rows", COMPUTED, lambda ops, t: strided(t, ops.grouped_mm)),
    ("grouped_mm, transposed", COMPUTED, lambda ops, t: ops.grouped_mm(t.grad, t.fc1.transpose(1, 2), t.groups)),
    ("grouped_mm_back", COMPUTED, lambda ops, t: ops.grouped_mm_back(t.rows, t.fc1, t.groups)),
    ("grouped_mm_back, into strided rows", COMPUTED, lambda ops, t: strided(t, ops.grouped_mm_back)),
    ("grouped_mm_wgrad", COMPUTED, lambda ops, t: total(t, ops, False)),
    ("grouped_mm_wgrad, transposed", COMPUTED, lambda ops, t: total(t, ops, True)),
    ("swiglu", COMPUTED, lambda ops, t: ops.swiglu(t.grad, 0.0)),
    ("swiglu, clamped", COMPUTED, lambda ops, t: ops.swiglu(t.grad, 0.5)),
    (
        "swiglu_backward",
        COMPUTED,
        lambda ops, t: ops.swiglu_backward(t.half.clone(), t.grad.clone(), 0.0, reuse=False),
    ),
    (
        "swiglu_backward, clamped, in place",
        COMPUTED,
        lambda ops, t: ops.swiglu_backward(t.half.clone(), t.grad.clone(), 0.5, reuse=True),
    ),
)


def op_errors(device):
    """Every operation of the CUDA back end on `device`, in bf16, against the CPU back end in fp32."""
    given = inputs()
    order = cpu.permute(given["x"], given["route"])[1]
    wide = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in given.items()}
    theirs = SimpleNamespace(**wide, order=order, groups=Groups.of(COUNTS))
    moved = {name: tensor.to(device) for name, tensor in given.items()}
    mine = SimpleNamespace(**moved, order=order.to(device), groups=Groups.of(COUNTS, device))
    return [judged(name, [(run(cuda, mine), run(cpu, theirs))], allowed) for name, allowed, run in OPERATIONS]


def layer_errors(device):
    """The layer with all experts on `device`, in bf16, against the reference in fp32; output and gradients."""
    given = inputs()
    fc2 = torch.randn(E, WIDTH, H, generator=torch.Generator().manual_seed(1)).bfloat16()
    tensors = [given["x"], given["weight"], given["fc1"] * H**-0.5, fc2 * WIDTH**-0.5]
    grad = given["x"].flip(0)

    def run(call, place, dtype):
        leaves = [tensor.to(place, dtype).requires_grad_() for tensor in tensors]
        out = call(leaves, given["route"].to(place))
        return [out, *torch.autograd.grad(out, leaves, grad.to(place, dtype))]

    expected = run(lambda t, route: moe_reference(t[0], route, *t[1:]), "cpu", torch.float32)
    told = []
    for keep, schedule, number in itertools.product(KEEPS, SCHEDULES, (1, 4)):
        dispatch = ChunkMoEDispatcher(
            ChunkMoEConfig(moe_num_chunks=number, chunk_moe_keep=keep, chunk_moe_schedule=schedule)
        )
        got = run(lambda t, route, dispatch=dispatch: dispatch(E, t[1], route, t[0], *t[2:]), device, torch.bfloat16)
        told.append(judged(f"layer: {schedule}, N={number}, keep {keep}", zip(got, expected), LAYER))
    return told


def offload_error(device):
    """Gradients of blocks whose activations wait on the host, against the same blocks without."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(T, H, generator=generator).to(device)
    made = [torch.nn.Sequential(torch.nn.Linear(H, H), torch.nn.GELU(), torch.nn.LayerNorm(H)) for _ in range(4)]
    blocks = torch.nn.ModuleList(made).to(device)
    offload, found = ActivationOffload(), []
    for run in (lambda i: blocks[i], lambda i: offload.wrap(f"block {i}", blocks[i])):
        hidden = x.clone().requires_grad_() * 1
        for i in range(len(blocks)):
            hidden = run(i)(hidden)
        found.append(torch.autograd.grad(hidden.square().mean(), list(blocks.parameters())))
    return judged("activation offload", zip(found[1], [grad.cpu() for grad in found[0]]), SAME)


def waits(device):
    """Whether a layer call makes the host wait for more than its plan: CUDA itself says so."""
    if device.type != "cuda":
        return []
    given = {name: tensor.to(device) for name, tensor in inputs().items()}
    fc2 = torch.zeros(E, WIDTH, H, dtype=torch.bfloat16, device=device)
    leaves = [tensor.requires_grad_() for tensor in (given["weight"], given["x"], given["fc1"], fc2)]
    dispatch, found = ChunkMoEDispatcher(ChunkMoEConfig(moe_num_chunks=4)), None
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            out = dispatch(E, leaves[0], given["route"], leaves[1], leaves[2], leaves[3])
            torch.autograd.grad(out, leaves, given["x"])
        except RuntimeError as error:
            found = str(error).splitlines()[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    what = "waits of the host other than the plan's" + (f": {found}" if found else "")
    return [{"what": what, "error": float(found is not None), "allowed": 0.0, "right": found is None}]


def judged(what, pairs, allowed):
    errors = []
    for got, want in pairs:
        got, want = got.detach().cpu().double(), want.detach().double()
        errors.append(((got - want).abs().max() / want.abs().max()).nan_to_num(float("inf")).item())
    return {"what": what, "error": max(errors), "allowed": allowed, "right": max(errors) <= allowed}
