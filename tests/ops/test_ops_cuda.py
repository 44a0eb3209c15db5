"""The CUDA back end against the CPU one, on CPU tensors: each function, and the whole layer."""

import dataclasses
import itertools
import logging

import pytest
import torch
import torch.distributed as dist

import cuda_on_cpu
from cuda_on_cpu import cuda_ops
from launcher import run_ranks
from layer import Case, Layer, check, distance
from mindspeed_chunk import log
from mindspeed_chunk.config import KEEPS
from mindspeed_chunk.ops import cpu, cuda
from mindspeed_chunk.ops.groups import Groups

COUNTS = [
    ((2, 0, 3), (1, 4, 0)),
    ((0, 0), (0, 0)),
    ((3, 1, 2),),
    ((2,), (5,)),
    ((0, 2), (0, 1)),
    ((1, 2), (3, 0), (0, 4)),
]
# of the largest value; bf16: products are rounded to 8 bits, once
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-7}


@pytest.fixture(autouse=True)
def fresh_buffers_hold_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=[True, False], ids=["one kernel", "one matmul an expert"])
def kernel(request):
    with cuda_ops(kernel=request.param):
        yield request.param


def normal(*shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(got, expected):
    assert got.dtype == expected.dtype and got.shape == expected.shape
    if expected.numel() == 0:
        return True
    worst, largest = (tensor.double().abs().max() for tensor in (got.double() - expected.double(), expected))
    return worst <= TOLERANCE[got.dtype] * largest.clamp(min=1)


@pytest.mark.parametrize("shape", [(0, 3), (7, 3), (5,), (2**16, 2)])
def test_count(shape):
    keys = torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(0))
    got = cuda.count(keys, 13)
    assert got.dtype == torch.int64 and torch.equal(got, cpu.count(keys, 13))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_regrouping_moves_rows_bit_for_bit(counts, dtype):
    groups = Groups.of(counts)
    rows = normal(groups.num_rows, 4, dtype=dtype)
    for mine, theirs in ((cuda.regroup, cpu.regroup), (cuda.regroup_backward, cpu.regroup_backward)):
        assert torch.equal(mine(rows, groups), theirs(rows, groups))
        assert torch.equal(mine(rows[:, 0], groups), theirs(rows[:, 0].contiguous(), groups))
    assert torch.equal(cuda.regroup_backward(cuda.regroup(rows, groups), groups), rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strided, transposed", list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_grouped_matmuls(counts, strided, transposed, dtype, kernel):
    groups = Groups.of(counts)
    R, L, H, width = groups.num_rows, len(counts[0]), 16, 24
    rows = normal(R, H + 8, dtype=dtype)[:, :H] if strided else normal(R, H, dtype=dtype)
    weight = normal(L, H, width, dtype=dtype, seed=1)
    total = torch.ones(L, H, width)
    if transposed:
        weight, total = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (weight, total))
    for name in ("grouped_mm", "grouped_mm_back"):
        mine, theirs = getattr(cuda, name), getattr(cpu, name)
        assert close(mine(rows, weight, groups), theirs(rows, weight, groups))
        buffer = torch.full((R, width + 8), float("nan"), dtype=dtype)
        mine(rows, weight, groups, out=buffer[:, :width])
        assert torch.equal(buffer[:, :width], mine(rows, weight, groups)) and buffer[:, width:].isnan().all()
    back = cuda.regroup_backward(cuda.grouped_mm(rows, weight, groups), groups)
    assert torch.equal(cuda.grouped_mm_back(rows, weight, groups), back)

    grad, expected = normal(R, width, dtype=dtype, seed=2), total.clone()
    cpu.grouped_mm_wgrad(rows, grad, groups, expected)
    cuda.grouped_mm_wgrad(rows, grad, groups, total)
    assert torch.allclose(total, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * R)
    assert bool(cuda_on_cpu.calls) == (kernel and R > 0)


@pytest.mark.parametrize(
    "dtype, hidden, start, reason",
    [
        (torch.bfloat16, 20, 0, "rows are not a multiple of 16 bytes"),
        (torch.bfloat16, 16, 1, "does not start at a multiple of 16 bytes"),
        (torch.float64, 16, 0, "not this dtype"),
    ],
)
def test_what_the_kernel_refuses_goes_through_the_loop_and_is_told_once(dtype, hidden, start, reason, caplog):
    groups = Groups.of(((2, 1, 3),))
    flat = normal(start + 7 * hidden, dtype=dtype)
    weight = normal(3, hidden, 8, dtype=dtype)
    log._said.clear()
    with cuda_ops(), caplog.at_level(logging.INFO, "mindspeed_chunk"):
        for num_rows in (6, 6, 6):
            rows = flat[start : start + num_rows * hidden].view(num_rows, hidden)
            assert close(cuda.grouped_mm(rows, weight, groups), cpu.grouped_mm(rows, weight, groups))
        cuda.grouped_mm(flat[start : start + 4 * hidden].view(4, hidden), weight, Groups.of(((4, 0, 0),)))
        assert not cuda_on_cpu.calls
    assert len(caplog.messages) == 1 and reason in caplog.text


def test_which_devices_have_the_kernel(monkeypatch):
    gpu, bf16 = torch.device("cuda", 0), torch.bfloat16
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(cuda, "_grouped_mm", cuda_on_cpu.strict_grouped_mm)
    for capability, taken in (((8, 0), False), ((9, 0), True), ((10, 3), True), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, told=capability: told)
        assert (cuda._device_refusal(gpu, bf16) is None) == taken
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert "bfloat16" in cuda._device_refusal(gpu, torch.float16)
    assert "bfloat16" in cuda._device_refusal(gpu, None)  # operands of two dtypes
    assert "NVIDIA" in cuda._device_refusal(torch.device("cpu"), bf16)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "NVIDIA" in cuda._device_refusal(gpu, bf16)
    monkeypatch.setattr(cuda, "_grouped_mm", None)
    assert "2.9" in cuda._device_refusal(gpu, bf16)


# widths that a kernel takes; all sizes differ
FITS = {"hidden": 24, "intermediate": 8, "experts": 6, "top_k": 3}


def layer_cases():
    for keep, dtype, layout in itertools.product(KEEPS, (torch.float32, torch.bfloat16), ("LHF", "LFH")):
        yield Case(chunks=3, keep=keep, dtype=dtype, layout=layout, **FITS)
    for change in (
        {"schedule": "pair"},
        {"padded": True},
        {"limit": 0.5},
        {"router_dtype": torch.float32, "dtype": torch.bfloat16},
        {"tokens": (0, 5)},
        {"tokens": (3,), "chunks": 8},
        {"frozen": ("x", "weight")},
        {"frozen": ("fc1", "fc2")},
        {"activation": "module"},
        {"chunk_size": 4, "chunks": 0},
    ):
        yield Case(**{"chunks": 3, "dtype": torch.float32, **FITS, **change})


def test_the_whole_layer(kernel):
    for case in layer_cases():
        check(case)


def layers_on_ranks(rank, world_size, kernel):
    with cuda_ops(kernel=kernel):
        for case in layer_cases():
            for routing in ("random", "one_rank"):
                check(dataclasses.replace(case, routing=routing), rank, world_size, dist.group.WORLD)
        return len(cuda_on_cpu.calls)


@pytest.mark.parametrize("with_kernel", [True, False], ids=["one kernel", "one matmul an expert"])
def test_the_whole_layer_on_ranks(with_kernel):
    assert all((calls > 0) == with_kernel for calls in run_ranks(layers_on_ranks, 2, with_kernel))


def test_rows_that_are_only_moved_are_those_of_the_cpu_back_end():
    """The same layer in fp64, where both take the same matmuls: not a bit differs."""
    layer = Layer(Case(chunks=3, experts=6, padded=True))
    expected = layer.fast()
    with cuda_ops():
        assert max(distance(layer.fast(), expected).values()) == 0
