"""Random numbers: an activation's in the backward and in a recompute, those behind the layer, those of the trial."""

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from launcher import run_ranks
from layer import Case, Layer, recomputed
from mindspeed_chunk import device
from mindspeed_chunk.config import KEEPS, ChunkMoEConfig
from mindspeed_chunk.moe import draws
from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher
from mindspeed_chunk.moe.draws import Draws

# around the layer: nothing, or one of torch's checkpoints
AROUND = {
    "plain": lambda block, x: block(x),
    "recomputed": recomputed,
    "reentrant": lambda block, x: recomputed(block, x, reentrant=True),
    "generators not kept": lambda block, x: recomputed(block, x, preserve_rng_state=False),
}


class Dropping(nn.Module):
    """Dropout, of 0.5 while it draws, behind a gate."""

    def __init__(self, p=0.5):
        super().__init__()
        self.p = p

    def forward(self, fc1_RF):
        gate_RI, up_RI = fc1_RF.chunk(2, -1)
        return nn.functional.dropout(torch.tanh(gate_RI) * up_RI, self.p)


def slopes(rank, ranks, keep, around, activation, behind, skip=False):
    """The sum over ranks of the directional derivative of each input: by gradient, and by central differences.

    The generator starts each forward at the same place, so that masks are part of the function.
    """
    layer = Layer(Case(chunks=2, tokens=(13, 9), keep=keep), rank, ranks)
    layer.activation = activation
    group = dist.group.WORLD if ranks > 1 else None
    dispatcher = ChunkMoEDispatcher(ChunkMoEConfig(moe_num_chunks=2, chunk_moe_keep=keep, chunk_moe_skip_unread=skip))
    at = {"x": layer.x, "weight": layer.weight, "fc1": layer.local(layer.fc1_EHF), "fc2": layer.local(layer.fc2_EIH)}
    draw = torch.Generator().manual_seed(rank + 77)
    towards = {name: torch.randn(tensor.shape, generator=draw, dtype=tensor.dtype) for name, tensor in at.items()}

    def loss(leaves, around="plain"):
        torch.manual_seed(5 + rank)
        # twice: the first step tries the activation, the second knows it; and what is behind draws after both
        block = lambda x: behind(x, layer.call(dispatcher, {**leaves, "x": x}, group))  # noqa: E731
        for _ in range(2):
            out = AROUND[around](block, leaves["x"])
        return (out * layer.grad).sum()

    leaves = layer.leaves(at)
    loss(leaves, around).backward()
    told = {}
    for name, direction in towards.items():
        by_grad = (leaves[name].grad * direction).sum()
        with torch.no_grad():
            ends = [loss({**at, name: at[name] + step * direction}) for step in (1e-6, -1e-6)]
        pair = torch.stack([by_grad, (ends[0] - ends[1]) / 2e-6]).detach()
        if group is not None:
            dist.all_reduce(pair)
        told[name] = pair.tolist()
    return told


def compared(told):
    for name, (by_grad, by_difference) in told.items():
        assert by_grad == pytest.approx(by_difference, rel=1e-5, abs=1e-5), (name, told)


def alone(x, y):
    return y


def with_dropout_behind(x, y):
    """Keeps nothing of `y`, so that a recompute may leave it out; draws behind the layer."""
    return y + nn.functional.dropout(x.sin())


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("keep", KEEPS)
def test_dropout_in_an_activation_has_the_masks_of_its_forward(keep, around):
    compared(slopes(0, 1, keep, around, Dropping(), alone))


def slopes_of_all(rank, ranks, combinations):
    return [slopes(rank, ranks, *combination) for combination in combinations]


def test_dropout_in_an_activation_has_the_masks_of_its_forward_on_ranks():
    combinations = list(itertools.product(KEEPS, AROUND, [Dropping()], [alone]))
    for told in run_ranks(slopes_of_all, 2, combinations)[0]:
        compared(told)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("keep", KEEPS)
def test_dropout_behind_the_layer_has_the_mask_of_its_forward(keep, skip):
    """Whatever a recompute leaves out: the trial of an activation, or the activation with all that draws in it."""
    for around, activation in itertools.product(("recomputed", "reentrant"), (Dropping(), Dropping().forward, Gate())):
        compared(slopes(0, 1, keep, around, activation, with_dropout_behind, skip))


class Gate(nn.Module):
    """Draws nothing."""

    def forward(self, fc1_RF):
        return fc1_RF.chunk(2, -1)[0].tanh()


@pytest.mark.parametrize("as_module", [True, False])
def test_the_trial_of_an_activation_leaves_the_generator_alone(as_module):
    layer = Layer(Case(chunks=2))
    module = Dropping()
    dispatcher, outs = ChunkMoEDispatcher(layer.case.config()), []
    leaves = {"x": layer.x, "weight": layer.weight, "fc1": layer.fc1_EHF, "fc2": layer.fc2_EIH}
    layer.activation = module if as_module else module.forward
    for _ in range(2):  # a module is tried in the first call only
        torch.manual_seed(3)
        outs.append(layer.call(dispatcher, leaves))
    assert torch.equal(*outs)
    layer.activation = None
    state = torch.get_rng_state()
    layer.call(dispatcher, leaves)
    assert torch.equal(torch.get_rng_state(), state)


def test_where_an_activation_draws_nothing_states_are_only_compared():
    layer = Layer(Case(chunks=3))
    layer.activation = Gate()
    dispatcher = ChunkMoEDispatcher(layer.case.config())
    leaves = layer.leaves({"x": layer.x, "weight": layer.weight, "fc1": layer.fc1_EHF, "fc2": layer.fc2_EIH})
    layer.call(dispatcher, leaves)  # its trial
    with mock.patch.object(draws, "set_generator_states") as set_again:
        for around in AROUND.values():
            around(lambda x: layer.call(dispatcher, {**leaves, "x": x}), leaves["x"]).sum().backward()
    assert not set_again.called


class OwnGenerator:
    """A device's module as far as random numbers go: torch.cuda and torch.npu have these two functions."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(1)

    def get_rng_state(self, device):
        return self.generator.get_state()

    def set_rng_state(self, state, device):
        self.generator.set_state(state)


def test_the_generator_of_the_device_is_watched_beside_the_cpus():
    own, kept = OwnGenerator(), Draws(torch.device("cuda"))

    def draw():
        return torch.rand(3, generator=own.generator).tolist() + torch.rand(2).tolist()

    with mock.patch.object(device, "accelerator", lambda device: own):
        with kept.of(0):
            first = draw()
        with kept.of(1):
            pass
        with kept.of(2):
            third = torch.rand(3, generator=own.generator).tolist()
        behind = draw()
        with kept.again(2):
            assert torch.rand(3, generator=own.generator).tolist() == third
        with kept.again(0):
            assert draw() == first
        other = draw()
        assert other != behind  # `again` left the generators where they were
        with kept.again(0):
            kept.skip()
            assert draw() == behind
        with kept.again(1):  # drew nothing: the generators go on
            goes_on = draw()
        assert goes_on not in (first, behind, other)
