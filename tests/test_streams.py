"""Order on an accelerator, on a device that plays one: the layer, the plan's host copy, the offload.

Each wait that the code makes is also taken away on purpose, and that must be seen.
"""

import gc
import itertools
import threading
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from cuda_on_cpu import cuda_ops
from fake_device import Event, Line, Race, fake_device
from launcher import run_ranks
from layer import Case, Layer, check, distance
from mindspeed_chunk import device
from mindspeed_chunk.config import KEEPS, SCHEDULES
from mindspeed_chunk.dist import DONE
from mindspeed_chunk.mbs import offload as mbs_offload
from mindspeed_chunk.moe import executor
from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher
from mindspeed_chunk.moe.plan import Gather
from offloaded import ROWS, H, blocks, equal, make, rand, run

CASES = [
    *(
        Case(chunks=chunks, schedule=schedule, keep=keep)
        for chunks, schedule, keep in itertools.product((1, 2, 3), SCHEDULES, KEEPS)
    ),
    Case(chunks=3, padded=True),
    Case(chunks=3, routing="one_rank", tokens=(5, 0)),
    Case(chunks=0, chunk_size=4),
    Case(chunks=3, frozen=("x", "weight")),
]


def taken_away(owner, name, replacement):
    """A patch, made when it is entered; `replacement` is given what it replaces."""
    return lambda: mock.patch.object(owner, name, replacement(getattr(owner, name)))


def nothing(original):
    return lambda *args: None


def arrived_without_waiting(original):
    def arrived(chunk):
        chunk.work = DONE
        return original(chunk)

    return arrived


def arrived_after_letting_go(original):
    def arrived(chunk):
        chunk.send = None
        return original(chunk)

    return arrived


def copy_without_after(original):
    return lambda lane, target, source, after=DONE: original(lane, target, source)


def plan_without_row(original):
    def init(plan, *args, **kwargs):
        original(plan, *args, **kwargs)
        plan._row = None

    return init


# what is taken away, and what is then found
LAYER_SABOTAGE = {
    "the wait for rows on the wire": (
        taken_away(executor._Chunk, "arrived", arrived_without_waiting),
        "what an all-to-all on the wire uses",
    ),
    "the send buffer, before that wait": (
        taken_away(executor._Chunk, "arrived", arrived_after_letting_go),
        "freed while an all-to-all on the wire uses it",
    ),
    "the host's wait for the plan": (taken_away(Event, "synchronize", nothing), "copy_ on a side stream uses"),
    "the copy's wait for the gather": (
        taken_away(device.CopyLane, "copy", copy_without_after),
        "copy_ on a side stream reads what a gather on the wire uses",
    ),
    "the gathered row, before that wait": (
        taken_away(Gather, "__init__", plan_without_row),
        "freed while a gather on the wire uses it",
    ),
}


def never_dense(original):
    def init(saved, *args):
        original(saved, *args)
        saved._dense = False

    return init


OFFLOAD_SABOTAGE = {
    "the span of memory that is copied": (
        taken_away(mbs_offload._SavedTensor, "__init__", never_dense),
        "of what is not contiguous",
    ),
    "the wait for a copy": (taken_away(device.Copy, "wait", nothing), "copy_ on a side stream uses"),
    "a copy's wait for the computation": (
        taken_away(Line, "wait_stream", nothing),
        "copy_ on a side stream reads what",
    ),
    "the wait before a tensor goes": (
        taken_away(mbs_offload._SavedTensor, "release", lambda original: release_at_once),
        "freed while copy_ on a side stream uses it",
    ),
    "the wait when a graph is dropped": (
        taken_away(mbs_offload._SavedTensor, "__del__", nothing),
        "freed while copy_ on a side stream uses it",
    ),
}


def release_at_once(saved):
    if saved._host is not None:
        saved._tensor = None


def found(world, function):
    """What is wrong with what `function` does, or None."""
    try:
        function()
        gc.collect()
        world.check()
    except Race as race:
        return str(race)


def layers(rank, world_size):
    """Every case as it is; then with each thing taken away, what is found."""
    group = dist.group.WORLD
    for case, ours in itertools.product(CASES, (nullcontext, cuda_ops)):  # of which one reads the plan on the device
        with ours(), fake_device() as world:
            assert found(world, lambda case=case: check(case, rank, world_size, group)) is None
    told = {}
    for name, (patch, _) in LAYER_SABOTAGE.items():
        with fake_device() as world, patch():
            told[name] = found(world, lambda: check(CASES[4], rank, world_size, group))
    return told


def test_the_layer_waits_for_what_it_uses_and_every_wait_is_needed():
    for told in run_ranks(layers, 2):
        assert told.keys() == LAYER_SABOTAGE.keys()
        for name, (_, expected) in LAYER_SABOTAGE.items():
            assert told[name] is not None and expected in told[name], (name, told[name])


def backward_in_another_thread(rank, world_size):
    layer = Layer(Case(chunks=3, keep="rows"), rank, world_size)
    expected = layer.fast(group=dist.group.WORLD)
    dispatcher = ChunkMoEDispatcher(layer.case.config())
    leaves = layer.leaves(
        {"x": layer.x, "weight": layer.weight, "fc1": layer.local(layer.fc1_EHF), "fc2": layer.local(layer.fc2_EIH)}
    )
    with fake_device() as world:
        out = layer.call(dispatcher, leaves, dist.group.WORLD)

        def backward():
            with world:
                out.backward(layer.grad)

        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
        world.check()
    return max(distance(layer._results(out, leaves), expected).values())


def test_the_backward_may_run_in_another_thread():
    assert run_ranks(backward_in_another_thread, 2) == [0, 0]


def test_a_host_copy_without_peers_runs_behind_what_it_copies():
    def copied():
        tensor = torch.arange(5) * 2
        copy = device.HostCopy(tensor, "test")
        torch.ones(3).mul_(2)  # queued meanwhile
        assert copy._host.tolist() == [-1] * 5
        assert copy.wait().mul(1).tolist() == [0, 2, 4, 6, 8]

    with fake_device() as world:
        assert found(world, copied) is None
    with fake_device() as world, mock.patch.object(Line, "wait_stream", nothing(None)):
        assert "reads what mul on the main stream uses" in found(world, copied)


def offloaded_passes(recompute="", drop=False):
    offload = make()
    modules = blocks(offload, recompute=recompute)
    x = rand(ROWS, H).requires_grad_()
    if drop:  # a graph goes away while what its next block needs is on its way back
        hiddens = [x * 1]
        for module in modules:
            hiddens.append(module(hiddens[-1]))
        torch.autograd.grad(hiddens[-1].sum(), hiddens[-2])
        del hiddens, module
        gc.collect()
    return run(modules, x), run(blocks(recompute=recompute), x)


@pytest.mark.parametrize("recompute", ["", "block", "part"])
@pytest.mark.parametrize("drop", [False, True])
def test_the_offload_waits_for_its_copies(recompute, drop):
    with fake_device() as world:
        told = found(world, lambda: equal(*offloaded_passes(recompute, drop)))
    assert told is None


@pytest.mark.slow
@pytest.mark.parametrize("what", OFFLOAD_SABOTAGE)
def test_every_wait_of_the_offload_is_needed(what):
    patch, expected = OFFLOAD_SABOTAGE[what]
    with fake_device() as world, patch():
        told = found(world, lambda: offloaded_passes(drop=True))
    assert told is not None and expected in told, told
