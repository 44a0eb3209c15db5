"""What a dispatcher is called with, on one rank: what is refused, what may vary, and that it can be copied."""

import copy
import pickle
import sys

import pytest
import torch

from layer import Case, Layer, ScaledGate, distance, run
from mindspeed_chunk.config import ChunkMoEConfig
from mindspeed_chunk.moe.arguments import order_routing
from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher
from mindspeed_chunk.ops import npu_ops


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a: {"routing_weights": a.index, "selected_experts": a.weight}, "in the right order"),
        (lambda a: {"selected_experts": a.index[:-1]}, r"must be \[T, K\] with T = 13"),
        (lambda a: {"routing_weights": a.weight[:, :2]}, r"must be \[T, K\] = \(13, 3\) or \[T, E\] = \(13, 8\)"),
        (lambda a: {"fc1_weight": a.fc1_EHF.transpose(1, 2)}, "weight layout LHF"),
        (lambda a: {"fc2_weight": a.fc2_EIH[:4]}, "8 local experts"),
        (lambda a: {"fc2_weight": a.fc2_EIH[0]}, "must be 3, experts first"),
        (lambda a: {"fc1_weight": a.fc1_EHF.float()}, "must have the dtype of the rows"),
        (lambda a: {"skip_moe_pad_tokens": True}, "seq_mask: None"),
        (lambda a: {"skip_moe_pad_tokens": True, "seq_mask": torch.ones(3)}, "one for each of the 13 tokens"),
        (lambda a: {"ep_balance_strategy": object()}, "enable_ep_balance"),
        (lambda a: {"activation": lambda fc1: fc1 * 1}, r"expected \(1, 7\)"),
        (lambda a: {"activation": lambda fc1: fc1.new_zeros(len(fc1), 7)}, "does not depend on its input"),
        (lambda a: {"activation": lambda fc1: fc1.mul_(2)[:, :7]}, "failed on one row of zeros: RuntimeError"),
        (lambda a: {"activation": lambda fc1: 1 / 0}, "failed on one row of zeros: ZeroDivisionError"),
        (lambda a: {"fc1_weight": a.fc1_EHF[:, :, :-1]}, r"must be \(8, 10, 14\)"),
        (
            lambda a: {"activation": ScaledGate(torch.float64), "swiglu_limit": 1.0},
            "no effect with your own activation",
        ),
        (lambda a: {"selected_experts": a.index.masked_fill(a.index == 3, 8)}, r"outside \[0, 8\)"),
        (lambda a: {"selected_experts": a.index.masked_fill(a.index == 3, -1)}, r"outside \[0, 8\)"),
        (lambda a: {"selected_experts": a.index.masked_fill(a.index == 3, 2**40)}, r"outside \[0, 8\)"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    layer = Layer(Case(chunks=2))
    with pytest.raises(ValueError, match=message) as caught:
        run(layer, **change(layer))
    assert "\n" not in str(caught.value)
    run(layer)  # nothing is left behind that would spoil the next call


def test_padding_may_hold_any_id():
    """Routers do not care what a padded token's ids are."""
    for dense in (False, True):
        layer = Layer(Case(chunks=3, padded=True, dense_weights=dense))
        expected = layer.fast()
        layer.index = layer.index.masked_fill(layer.mask[:, None] == 0, 99)
        got = layer.fast()
        if dense:  # the weight that a padded token's id picks has no gradient, whichever it is
            assert got["weight"][layer.mask == 0].abs().max() == 0
        assert max(distance(got, expected).values()) == 0


def test_a_back_end_for_another_device_says_so():
    layer = Layer(Case(chunks=2))
    for name in ("cuda", "npu"):
        config = ChunkMoEConfig(moe_num_chunks=2, chunk_moe_backend=name)
        with pytest.raises(ValueError, match="the tensors are on cpu; use auto, or move"):
            layer.fast(ChunkMoEDispatcher(config))


def test_the_npu_back_end_says_what_it_misses(monkeypatch):
    npu_ops.require.cache_clear()
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(ValueError, match="chunk_moe_backend: 'npu': torch_npu cannot be imported .*; install the one"):
        npu_ops.require()


def test_weight_layout_is_checked():
    with pytest.raises(ValueError, match="must be one of LHF, LFH"):
        ChunkMoEDispatcher(ChunkMoEConfig(), weight_layout="HLF")


def test_ids_and_weights_are_told_apart_by_dtype():
    index, weight = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3)
    assert order_routing(index, weight) == (index, weight)
    assert order_routing(weight, index) == (index, weight)
    for pair in ((index, index), (weight, weight), (weight, weight.bool())):
        with pytest.raises(TypeError, match="one must hold expert ids"):
            order_routing(*pair)


def test_a_dispatcher_outlives_changing_shapes():
    """No shape is cached: T changes from call to call, the experts' own sizes too."""
    dispatcher = ChunkMoEDispatcher(ChunkMoEConfig(moe_num_chunks=3))
    for tokens, hidden in ((8, 10), (3, 10), (8, 6), (0, 6), (29, 10)):
        layer = Layer(Case(chunks=3, tokens=(tokens,), hidden=hidden))
        assert max(distance(layer.fast(dispatcher), layer.reference()).values()) < 1e-12


def test_dispatcher_can_be_copied_and_pickled():
    layer = Layer(Case(chunks=3, activation="module"))
    dispatcher = ChunkMoEDispatcher(layer.case.config())
    expected = layer.fast(dispatcher)
    for twin in (copy.deepcopy(dispatcher), pickle.loads(pickle.dumps(dispatcher))):
        assert max(distance(layer.fast(twin), expected).values()) == 0
