"""Activations of the caller's own, on one rank: parameters, autocast, what is refused."""

import dataclasses
import functools

import pytest
import torch

from layer import Case, Layer, ScaledGate, run
from mindspeed_chunk.config import ChunkMoEConfig
from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher


def test_gradcheck_of_activation_parameters():
    layer = Layer(Case(tokens=(5,), hidden=4, intermediate=3, experts=4, top_k=2))
    activation = ScaledGate(torch.float64)
    dispatcher = ChunkMoEDispatcher(ChunkMoEConfig(moe_num_chunks=2))

    def function(x, weight, *parameters):
        return dispatcher(4, weight, layer.index, x, layer.fc1_EHF, layer.fc2_EIH, activation=activation)

    inputs = [layer.x.clone().requires_grad_(), layer.weight.clone().requires_grad_(), *activation.parameters()]
    assert torch.autograd.gradcheck(function, inputs)


def test_autocast_state_of_an_activation_is_restored_in_the_backward():
    seen = []

    def activation(fc1_RF):
        if fc1_RF.shape[0] > 1:
            seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return fc1_RF.chunk(2, dim=-1)[0].tanh()

    layer = Layer(Case(tokens=(40,), chunks=2, dtype=torch.float32))
    x = layer.x.clone().requires_grad_()
    dispatcher = ChunkMoEDispatcher(ChunkMoEConfig(moe_num_chunks=2, chunk_moe_recompute=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = dispatcher(8, layer.weight, layer.index, x, layer.fc1_EHF, layer.fc2_EIH, activation=activation)
    assert not torch.is_autocast_enabled("cpu")
    out.sum().backward()
    assert seen == [(True, torch.bfloat16)] * 4  # two chunks, forward and backward


def test_activation_as_a_method_and_in_a_partial():
    layer = Layer(Case(chunks=2, activation="module"))
    expected = layer.fast()
    module = layer.activation
    for activation in (module.forward, functools.partial(module), functools.partial(module.forward)):
        module.zero_grad(set_to_none=True)
        leaves = layer.leaves({"x": layer.x, "weight": layer.weight, "fc1": layer.fc1_EHF, "fc2": layer.fc2_EIH})
        layer.activation = activation
        layer.call(ChunkMoEDispatcher(layer.case.config()), leaves).backward(layer.grad)
        got = torch.cat([p.grad.flatten() for p in module.parameters()])
        assert torch.equal(got, expected["activation"])
        layer.activation = module


def test_an_activation_that_hides_a_parameter_is_refused_unless_no_gradient_is_asked_for():
    scale = torch.ones((), dtype=torch.float64)
    layer, dispatcher = Layer(Case(chunks=2)), ChunkMoEDispatcher(ChunkMoEConfig(moe_num_chunks=2))
    layer.activation = lambda fc1: fc1.chunk(2, -1)[0] * scale
    leaves = layer.leaves({"x": layer.x, "weight": layer.weight, "fc1": layer.fc1_EHF, "fc2": layer.fc2_EIH})
    layer.call(dispatcher, leaves)
    scale.requires_grad_()  # a callable may change from call to call
    with pytest.raises(ValueError, match="gradient would be lost"):
        layer.call(dispatcher, leaves)
    with torch.no_grad():
        layer.call(dispatcher, leaves)


def test_callables_that_cannot_be_hashed_or_referenced_weakly_are_activations_too():
    @dataclasses.dataclass
    class Unhashable:
        scale: float = 2.0

        def __call__(self, fc1):
            return fc1.chunk(2, -1)[0] * self.scale

    class Slotted:
        __slots__ = ()

        def __call__(self, fc1):
            return fc1.chunk(2, -1)[0] * 2

    layer = Layer(Case(chunks=2))
    assert torch.equal(run(layer, activation=Unhashable()), run(layer, activation=Slotted()))


def test_an_activation_with_a_matmul_has_its_gradient_when_the_backward_runs_under_autocast_too():
    """The forward must not leave casts without a graph in autocast's cache for the backward to find."""

    class Projected(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(14, 7)

        def forward(self, fc1_RF):
            return self.linear(fc1_RF)

    torch.manual_seed(0)
    layer, activation = Layer(Case(chunks=2, dtype=torch.float32)), Projected()
    norms = []
    for inside in (False, True):
        activation.zero_grad()
        layer.activation = activation
        leaves = layer.leaves({"x": layer.x, "weight": layer.weight, "fc1": layer.fc1_EHF, "fc2": layer.fc2_EIH})
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = layer.call(ChunkMoEDispatcher(layer.case.config()), leaves)
            if inside:
                out.backward(layer.grad)
        if not inside:
            out.backward(layer.grad)
        norms.append(activation.linear.weight.grad.norm().item())
    assert norms[0] > 1 and norms[0] == pytest.approx(norms[1], rel=1e-3)
