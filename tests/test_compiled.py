"""A compiled model with a chunked layer in it: the same values, and nothing of ours in a graph.

Graphs are run as they are recorded, so that no compiler is needed.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import mindspeed_chunk
from host_lookalike import ranks as host
from launcher import run_ranks
from layer import Case, Layer
from mindspeed_chunk.config import ChunkMBSConfig
from mindspeed_chunk.mbs.block import ChunkMBS
from mindspeed_chunk.mbs.offload import ActivationOffload
from mindspeed_chunk.moe.alltoall import AllToAllDispatcher
from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher
from mindspeed_chunk.moe.filler import Filler
from mindspeed_chunk.moe.replay import replay_contexts

CASE = Case(chunks=2, dtype=torch.float64)
KINDS = ("plain", "alltoall", "shared expert", "recompute", "ChunkMBS", "offload", "ChunkMBS and offload")
TIMEOUT_S = 240
# not its name alone: a checkout has that name, too
OURS = str(Path(mindspeed_chunk.__file__).parent) + os.sep


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(CASE.hidden, CASE.hidden, dtype=CASE.dtype)

    def forward(self, x):
        return torch.tanh(self.linear(x)) * 0.5


class Block(nn.Module):
    def __init__(self, kind, group=None):
        super().__init__()
        layer = Layer(CASE, *((dist.get_rank(group), dist.get_world_size(group)) if group else ()))
        self.inner, self.router = Scaled(), nn.Linear(CASE.hidden, CASE.experts, dtype=CASE.dtype)
        self.fc1, self.fc2 = (nn.Parameter(layer.local(one).clone()) for one in (layer.fc1_EHF, layer.fc2_EIH))
        self.dispatch = AllToAllDispatcher() if kind == "alltoall" else ChunkMoEDispatcher(CASE.config())
        self.kind, self.group = kind, group

    def experts(self, x_TH):
        weight, index = self.router(x_TH).softmax(-1).topk(CASE.top_k)
        return self.dispatch(CASE.experts, weight, index, x_TH, self.fc1, self.fc2, self.group)

    def forward(self, x):
        x_TH = self.inner(x).reshape(-1, CASE.hidden)
        if self.kind == "shared expert":
            shared = Filler(lambda: torch.sigmoid(x_TH) * x_TH)
            with shared:
                out_TH = self.experts(x_TH)
            out_TH = out_TH + shared.result()
        else:
            out_TH = self.experts(x_TH)
        return (x_TH + out_TH).sin().reshape(x.shape)


class Model(nn.Module):
    def __init__(self, kind, group=None):
        super().__init__()
        torch.manual_seed(1)
        self.blocks, self.kind = nn.ModuleList(Block(kind, group) for _ in range(2)), kind
        offload, chunk_mbs = ActivationOffload(), ChunkMBS(ChunkMBSConfig(chunk_mbs=2))
        for number, block in enumerate(self.blocks):
            own = block.forward
            if "offload" in kind:
                block.forward = offload.wrap(f"{number}", block)
            if "ChunkMBS" in kind:
                block.forward = chunk_mbs.wrap(f"{number}", block.forward, own)

    def forward(self, x):
        for block in self.blocks:
            if self.kind == "recompute":
                x = checkpoint(block, x, use_reentrant=False, context_fn=replay_contexts)
            else:
                x = block(x)
        return x.square()


class Graphs:
    """A back end that keeps what it is given, and runs it as it is."""

    def __init__(self):
        self.traces = []

    def __call__(self, graph, inputs):
        self.traces += [node.stack_trace or "" for node in graph.graph.nodes if node.op != "placeholder"]
        return graph.forward


def results(model, forward, x, backward=True):
    model.zero_grad()
    out = forward(x)
    if backward:
        out.sum().backward()
    return [out.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def step(model):
    def forward_and_backward(x):
        out = model(x)
        out.sum().backward()
        return out

    return forward_and_backward


def compiled(kind, what, group=None, backend=None):
    """Results without and with torch.compile, twice, and where the operations in its graphs stand in the source."""
    torch._dynamo.reset()
    model, backend = Model(kind, group), backend or Graphs()
    x = torch.randn(4, 5, CASE.hidden, dtype=CASE.dtype, generator=torch.Generator().manual_seed(2))
    expected = results(model, model, x)
    run = model
    if what == "model":
        run = torch.compile(model, backend=backend)
    elif what == "step":
        run = torch.compile(step(model), backend=backend)
    else:
        for block in model.blocks:
            (block.inner if what == "inner" else block).compile(backend=backend)
    found = [results(model, run, x, backward=what != "step") for _ in range(2)]
    return expected, found, getattr(backend, "traces", [])


def check(expected, found, traces):
    for once in found:
        assert len(once) == len(expected) and all(map(torch.equal, once, expected))
    assert not [trace for trace in traces if OURS in trace]


@pytest.mark.parametrize("what", ["model", "block", "inner", "step"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_without_and_no_graph_has_anything_of_ours(kind, what):
    """`step`: with the backward inside, where torch also looks at the nodes of the graph and at hooks."""
    expected, found, traces = compiled(kind, what)
    check(expected, found, traces)
    if kind in ("plain", "alltoall", "shared expert") or what == "inner":
        assert any("test_compiled.py" in trace for trace in traces), "the rest of the model is compiled"


@pytest.mark.parametrize("kind", ["plain", "shared expert", "ChunkMBS"])
def test_with_autograd_compiled_too(kind):
    check(*compiled(kind, "model", backend="aot_eager"))


def test_a_whole_graph_is_refused_by_torch():
    model = torch.compile(Model("plain"), backend=Graphs(), fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        model(torch.randn(4, 5, CASE.hidden, dtype=CASE.dtype))


def test_a_compiled_forward_runs_on_micro_chunks():
    """What stands in `forward` when ChunkMBS wraps it may be compiled: it sees micro-chunks."""
    torch._dynamo.reset()
    block, backend, batches = Block("plain"), Graphs(), []
    x = torch.randn(4, 5, CASE.hidden, dtype=CASE.dtype)
    expected, own = block(x), block.forward
    inside = torch.compile(own, backend=backend)

    def forward(x):
        batches.append(len(x))
        return inside(x)

    block.forward = ChunkMBS(ChunkMBSConfig(chunk_mbs=2)).wrap("0", forward, own)
    assert torch.allclose(block(x), expected, rtol=1e-12, atol=0) and batches == [2, 2]
    assert any("test_compiled.py" in trace for trace in backend.traces)


def test_importing_the_layer_does_not_import_dynamo():
    """It takes a second."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "import mindspeed_chunk.moe.dispatcher, mindspeed_chunk.mbs.block\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def on_ranks(rank, world_size, kind, what):
    check(*compiled(kind, what, group=dist.group.WORLD))


@pytest.mark.parametrize("kind, what", [("plain", "model"), ("plain", "step"), ("shared expert", "model")])
def test_on_two_ranks(kind, what):
    run_ranks(on_ranks, 2, kind, what, timeout=TIMEOUT_S)


def in_the_host(rank, world_size):
    """The difference that torch.compile of the host's block makes, by name, and where its graphs come from."""
    host.start("master")
    ep_plan = host.plan("chunkmoe", moe_num_chunks=2)
    backend, expected = Graphs(), host.run(host.build("qwen3_5_moe", ep_plan))
    block = host.build("qwen3_5_moe", ep_plan)
    block.compile(backend=backend)
    found = host.run(block)
    return [name for name in expected if not torch.equal(expected[name], found[name])], backend.traces


def test_the_hosts_block_is_compiled_around_the_layer():
    pytest.importorskip("pydantic")
    for differing, traces in run_ranks(in_the_host, 2, timeout=TIMEOUT_S):
        assert differing == [] and traces
        assert not [trace for trace in traces if OURS in trace or "ep_dispatcher" in trace]
