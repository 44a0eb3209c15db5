"""What a layer call keeps, where it keeps it, and that it lets go of it."""

import gc
import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed as dist

from alive import growth
from launcher import HANG_S, run_ranks
from layer import Case, Layer, distance, recomputed
from mindspeed_chunk.config import KEEPS
from mindspeed_chunk.moe.activation import SwiGLU
from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher
from mindspeed_chunk.moe.experts import NeedsGrad, Totals, _row_dot
from mindspeed_chunk.ops import cpu
from mindspeed_chunk.tools.measure import LiveBytes


def leaves_of(layer):
    return layer.leaves(
        {"x": layer.x, "weight": layer.weight, "fc1": layer.local(layer.fc1_EHF), "fc2": layer.local(layer.fc2_EIH)}
    )


def saved_bytes(tensors, leaves):
    """Bytes of the distinct storages among `tensors` that are not a leaf's."""
    own = {leaf.untyped_storage().data_ptr() for leaf in leaves.values()}
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(size for pointer, size in found.items() if pointer not in own)


@pytest.mark.parametrize("chunks", [1, 3])
def test_exactly_what_the_mode_says_and_the_order_are_kept(chunks):
    for keep in KEEPS:
        case = Case(chunks=chunks, keep=keep, dtype=torch.float32)
        layer, saved = Layer(case), []
        leaves = leaves_of(layer)
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=saved: kept.append(t) or t, lambda t: t):
            layer.call(ChunkMoEDispatcher(case.config()), leaves)
        rows = case.tokens[0] * case.top_k
        width = {"activations": case.hidden + 2 * case.intermediate, "rows": case.hidden, "input": 0}
        columns = width[keep]
        assert saved_bytes(saved, leaves) == rows * columns * 4 + rows * 8  # no combine output among it


def test_rows_of_padded_tokens_are_not_kept_with_the_others():
    case = Case(chunks=1, padded=True, tokens=(100,), dtype=torch.float32)
    layer, saved = Layer(case), []
    layer.mask[10:] = 0
    leaves = leaves_of(layer)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer.call(ChunkMoEDispatcher(case.config()), leaves)
    rows = int(layer.mask.sum()) * case.top_k
    assert saved_bytes([t for t in saved if t.dim() == 2], leaves) == rows * (10 + 14) * 4 + len(layer.mask)


def test_nothing_is_kept_on_the_graph_but_through_saved_tensors():
    """Checkpoint and offload hooks see every tensor: each is swapped for a copy, and no other stays alive."""
    for activation in (None, "module"):
        layer = Layer(Case(chunks=3, activation=activation))
        expected = layer.fast()
        leaves, alive = leaves_of(layer), []

        def pack(tensor, alive=alive, leaves=leaves):
            if not any(tensor.data_ptr() == leaf.data_ptr() for leaf in leaves.values()):
                alive.append(weakref.ref(tensor.untyped_storage()))
                alive.append(weakref.ref(tensor))
            return tensor.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = layer.call(ChunkMoEDispatcher(layer.case.config()), leaves)
        gc.collect()
        assert alive and not any(reference() is not None for reference in alive)
        opened = out.grad_fn.opened
        for value in (*vars(out.grad_fn).values(), *vars(opened).values(), *vars(opened.call).values()):
            assert not isinstance(value, torch.Tensor)
        out.backward(layer.grad)
        assert max(distance(layer._results(out, leaves), expected).values()) == 0


def test_the_weights_themselves_are_kept_not_a_copy():
    """A cast or transposed copy would survive FSDP2's reshard."""
    for layout, autocast in (("LHF", False), ("LFH", False), ("LFH", True)):
        layer, saved = Layer(Case(chunks=2, layout=layout, dtype=torch.float32)), []
        leaves = leaves_of(layer)
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda t, kept=saved: kept.append(t) or t, lambda t: t),
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
        ):
            layer.call(ChunkMoEDispatcher(layer.case.config(), weight_layout=layout), leaves)
        pointers = [t.data_ptr() for t in saved]
        assert leaves["fc1"].data_ptr() in pointers and leaves["fc2"].data_ptr() in pointers
        sizes = {t.numel() for t in saved if t.data_ptr() not in {leaf.data_ptr() for leaf in leaves.values()}}
        assert not sizes & {leaves["fc1"].numel(), leaves["fc2"].numel()}


def count_saved(rank, world_size, cases):
    counts = []
    for case in cases:
        layer, saved = Layer(case, rank, world_size), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=saved: kept.append(t) or t, lambda t: t):
            layer.call(ChunkMoEDispatcher(case.config()), leaves_of(layer), dist.group.WORLD)
        counts.append(len(saved))
    return counts


def test_every_rank_saves_the_same_number_of_tensors_whatever_it_received():
    cases = [
        Case(chunks=3, keep=keep, **change)
        for keep in KEEPS
        for change in ({"routing": "one_rank"}, {"tokens": (9, 0)}, {"tokens": (1, 2)}, {"padded": True})
    ]
    first, second = run_ranks(count_saved, 2, cases)
    assert first == second


def run_steps(rank, world_size, keep, blockwise):
    layer = Layer(Case(chunks=3, keep=keep), rank, world_size)
    leaves, dispatcher = leaves_of(layer), ChunkMoEDispatcher(layer.case.config())

    def block(x):
        return layer.call(dispatcher, {**leaves, "x": x}, dist.group.WORLD)

    def step():
        out = recomputed(block, leaves["x"]) if blockwise else block(leaves["x"])
        out.backward(layer.grad)
        for leaf in leaves.values():
            leaf.grad = None

    return growth(step)


@pytest.mark.parametrize("keep, blockwise", [("activations", True), ("rows", True), ("input", False)])
def test_memory_is_flat_over_50_steps(keep, blockwise):
    assert run_ranks(run_steps, 2, keep, blockwise) == [0, 0]


def test_the_sums_of_narrow_weight_gradients_are_freed_one_at_a_time():
    fc1_LHF, fc2_LIH = torch.zeros(3, 8, 10, dtype=torch.bfloat16), torch.zeros(3, 5, 8, dtype=torch.bfloat16)
    needs = NeedsGrad(rows=True, weights=True, fc1=True, fc2=True, activation=False)
    with LiveBytes() as live:
        totals = Totals(needs, fc1_LHF, fc2_LIH, SwiGLU(cpu, 0.0), transposed=False)
        sums = live.peak = live.now
        grads = totals.grads(fc1_LHF, fc2_LIH)
        assert live.now == fc1_LHF.nbytes + fc2_LIH.nbytes and live.peak == sums + fc2_LIH.nbytes
    assert [grad.shape for grad in grads] == [fc1_LHF.shape, fc2_LIH.shape]


def test_the_router_gradient_of_narrow_rows_takes_one_wide_tensor():
    left_RI, right_RI = (torch.randn(64, 32, dtype=torch.bfloat16) for _ in range(2))
    with LiveBytes() as live:
        found_R = _row_dot(left_RI, right_RI)
        assert live.peak == 64 * 32 * 4 + 64 * 4
    assert torch.equal(found_R, (left_RI.float() * right_RI.float()).sum(-1))


def test_import_touches_no_device_and_no_process_group():
    code = (
        "import mindspeed_chunk.moe.dispatcher, mindspeed_chunk.moe.alltoall, mindspeed_chunk.ops.cpu, torch, os\n"
        "assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized()\n"
        "child = os.fork()\n"
        "if child == 0: torch.ones(3).sum(); os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_S)
