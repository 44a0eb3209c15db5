"""One MoE layer as a test case: inputs of every rank, the fast path, the reference, and how far they are apart."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from mindspeed_chunk.config import ChunkMoEConfig
from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher
from mindspeed_chunk.moe.reference import moe_reference, swiglu
from mindspeed_chunk.moe.replay import replay_contexts, replayed

# Relative to the largest value of what is compared. fp32 and fp64: sums in another order. bf16: 8 bits of mantissa, and
# the reference, computed in fp32 from the same bf16 inputs, does not round between the matmuls: a few units in the last
# place (2^-8) of each of the 4 to 6 rounded intermediates.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
NOTHING: Mapping[str, float] = MappingProxyType({})
NAMES = ("out", "x", "weight", "fc1", "fc2", "activation")


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes all differ, so that a transposed weight cannot fit by chance.

    tokens: one number a rank, reused in turn.
    routing: "random", "balanced", "first" or "last" (all rows to that expert), "one_rank" (all to the last rank's
        experts), "alternate" (token t only to experts of rank t // 2 % ranks, so that ranks are empty in turn).
    lookahead, keep: see ChunkMoEConfig.
    frozen: names out of `NAMES` that need no gradient.
    router_dtype: of the router weights, if not the rows'.
    """

    chunks: int = 0
    chunk_size: int = 0
    schedule: str = "rolling"
    lookahead: int = 1
    keep: str = "activations"
    layout: str = "LHF"
    tokens: tuple[int, ...] = (13, 9)
    hidden: int = 10
    intermediate: int = 7
    experts: int = 8
    top_k: int = 3
    dtype: torch.dtype = torch.float64
    router_dtype: torch.dtype | None = None
    routing: str = "random"
    frozen: tuple[str, ...] = ()
    limit: float = 0.0
    padded: bool = False
    dense_weights: bool = False
    activation: str | None = None
    seed: int = 0

    def config(self) -> ChunkMoEConfig:
        return ChunkMoEConfig(
            moe_num_chunks=self.chunks,
            moe_chunk_size=self.chunk_size,
            chunk_moe_keep=self.keep,
            chunk_moe_schedule=self.schedule,
            chunk_moe_lookahead=self.lookahead,
        )


class ScaledGate(torch.nn.Module):
    """An activation with parameters, not SwiGLU: the halves the other way round, each with a learnt scale."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([0.7, 1.3], dtype=dtype))
        self.shift = torch.nn.Parameter(torch.tensor(0.1, dtype=dtype))

    def forward(self, fc1_RF: torch.Tensor) -> torch.Tensor:
        up_RI, gate_RI = fc1_RF.chunk(2, dim=-1)
        return torch.tanh(gate_RI * self.scale[0]) * (up_RI * self.scale[1] + self.shift)


class Layer:
    """The tensors of one rank: its tokens, and its slice of experts that every rank draws alike."""

    def __init__(self, case: Case, rank: int = 0, ranks: int = 1) -> None:
        self.case, self.rank, self.ranks = case, rank, ranks
        shared = torch.Generator().manual_seed(case.seed)
        own = torch.Generator().manual_seed(1000 * case.seed + rank + 1)
        tokens, width, dtype = case.tokens[rank % len(case.tokens)], case.intermediate, case.dtype

        def normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> torch.Tensor:
            # drawn in fp64, so that all dtypes start from the same numbers
            return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

        self.fc1_EHF = normal(shared, case.experts, case.hidden, 2 * width, scale=case.hidden**-0.5)
        self.fc2_EIH = normal(shared, case.experts, width, case.hidden, scale=width**-0.5)
        self.x = normal(own, tokens, case.hidden)
        self.index = self._route(tokens, own)
        router_dtype = case.router_dtype or dtype
        shape = (tokens, case.experts if case.dense_weights else case.top_k)
        self.weight = (torch.rand(shape, generator=own, dtype=torch.float64) + 0.1).to(router_dtype)
        self.grad = normal(own, tokens, case.hidden).to(dtype if case.padded else router_dtype)
        self.mask = (torch.rand(tokens, generator=own) > 0.4).to(torch.int64) if case.padded else None
        self.activation = ScaledGate(dtype) if case.activation == "module" else None
        if self.activation is not None and "activation" in case.frozen:
            self.activation.requires_grad_(False)

    def _route(self, tokens: int, generator: torch.Generator) -> torch.Tensor:
        case, local = self.case, self.case.experts // self.ranks
        scores = torch.rand(tokens, case.experts, generator=generator)
        if case.routing == "balanced":
            return (torch.arange(tokens * case.top_k) % case.experts).view(tokens, case.top_k)
        if case.routing in ("first", "last"):
            assert case.top_k == 1
            return torch.full((tokens, 1), 0 if case.routing == "first" else case.experts - 1)
        if case.routing == "one_rank":
            scores[:, : case.experts - local] -= 1
        if case.routing == "alternate":
            favourite = torch.arange(tokens)[:, None] // 2 % self.ranks
            scores[torch.arange(case.experts)[None] // local != favourite] -= 1
        return scores.topk(case.top_k).indices

    def local(self, weight: torch.Tensor) -> torch.Tensor:
        """This rank's experts, in the case's layout."""
        count = self.case.experts // self.ranks
        weight = weight[self.rank * count : (self.rank + 1) * count]
        return weight.transpose(1, 2).contiguous() if self.case.layout == "LFH" else weight

    def leaves(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: tensor.detach().clone().requires_grad_(name not in self.case.frozen)
            for name, tensor in tensors.items()
        }

    def fast(self, dispatcher=None, group=None) -> dict[str, torch.Tensor]:
        """The dispatcher's output and gradients, by name."""
        dispatcher = dispatcher or ChunkMoEDispatcher(self.case.config(), weight_layout=self.case.layout)
        leaves = self.leaves(
            {"x": self.x, "weight": self.weight, "fc1": self.local(self.fc1_EHF), "fc2": self.local(self.fc2_EIH)}
        )
        out = self.call(dispatcher, leaves, group)
        if out.requires_grad:
            out.backward(self.grad)
        return self._results(out, leaves)

    def call(self, dispatcher, leaves: dict[str, torch.Tensor], group=None) -> torch.Tensor:
        return dispatcher(
            self.case.experts,
            leaves["weight"],
            self.index,
            leaves["x"],
            leaves["fc1"],
            leaves["fc2"],
            ep_group=group,
            swiglu_limit=self.case.limit,
            skip_moe_pad_tokens=self.case.padded,
            seq_mask=self.mask,
            activation=self.activation,
        )

    def behind(self, out: torch.Tensor) -> torch.Tensor:
        """What stands behind the layer in its block, on the reference's road; a subclass's `call` must do the same."""
        return out

    def reference(self, group=None, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """The reference's, over all ranks' tokens, in `dtype`; by default in the case's, and bf16 cases in fp32."""
        wide = dtype or (torch.float32 if self.case.dtype == torch.bfloat16 else self.case.dtype)
        leaves = self.leaves(
            {
                "x": self.x.to(wide),
                "weight": self.weight.to(wide),
                "fc1": self.fc1_EHF.to(wide),
                "fc2": self.fc2_EIH.to(wide),
            }
        )
        activation = functools.partial(swiglu, limit=self.case.limit)
        if self.activation is not None:
            self.activation.zero_grad()
            activation = self.activation
        weight = leaves["weight"].gather(1, self.index) if self.case.dense_weights else leaves["weight"]
        pad = None if self.mask is None else self.mask == 0
        out = self.behind(
            moe_reference(
                leaves["x"], self.index, weight, leaves["fc1"], leaves["fc2"], activation=activation, pad_T=pad
            )
        )
        if out.requires_grad:
            out.backward(self.grad.to(out.dtype))
        results = self._results(out, leaves)
        for name in ("fc1", "fc2", "activation"):
            if name in results and group is not None:
                dist.all_reduce(results[name], group=group)
        return results | {name: self.local(results[name]) for name in ("fc1", "fc2") if name in results}

    def _results(self, out: torch.Tensor, leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        results = {"out": out.detach()} | {name: leaf.grad for name, leaf in leaves.items() if leaf.requires_grad}
        if self.activation is not None and "activation" not in self.case.frozen:
            results["activation"] = torch.cat([p.grad.flatten() for p in self.activation.parameters()])
            self.activation.zero_grad(set_to_none=True)
        return results


def recomputed(block, *inputs, reentrant=False, **options):
    """The block's output under torch's checkpoint, with the routes of its forward replayed."""
    if reentrant:
        return checkpoint(replayed(block), *inputs, use_reentrant=True, **options)
    return checkpoint(block, *inputs, use_reentrant=False, context_fn=replay_contexts, **options)


def distance(
    got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], least: Mapping[str, float] = NOTHING
) -> dict[str, float]:
    """The largest difference of each result, relative to the largest expected value; NaN counts as infinite.

    least: by name, what differences are relative to where nothing larger is expected; 1e-3 for names not in it.
    """
    assert got.keys() == want.keys(), (got.keys(), want.keys())
    told = {}
    for name, expected in want.items():
        assert got[name] is not None, f"{name} has no gradient"
        assert got[name].shape == expected.shape, (name, got[name].shape, expected.shape)
        if expected.numel() == 0:
            told[name] = 0.0
            continue
        scale = expected.abs().max().clamp_min(least.get(name, 1e-3)).to(torch.float64)
        told[name] = (
            ((got[name].to(torch.float64) - expected.to(torch.float64)).abs().max() / scale)
            .nan_to_num(float("inf"))
            .item()
        )
    return told


def check(case: Case, rank: int = 0, ranks: int = 1, group=None, dispatcher=None) -> dict[str, float]:
    """Compare Chunk MoE, or `dispatcher`, with the reference; raise where they differ by more than the dtype allows."""
    layer = Layer(case, rank, ranks)
    errors = compare(layer, *both(layer, dispatcher, group))
    assert max(errors.values()) <= TOLERANCE[case.dtype], f"{case}: {errors}"
    return errors


def both(layer: Layer, dispatcher=None, group=None) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Results of the fast path and of the reference: all collectives of a comparison."""
    fast = layer.fast(dispatcher, group)
    if "activation" in fast and group is not None:
        dist.all_reduce(fast["activation"], group=group)  # a rank's share comes from the rows at its own experts
    return fast, layer.reference(group)


def compare(
    layer: Layer, fast: dict[str, torch.Tensor], want: dict[str, torch.Tensor], least: Mapping[str, float] = NOTHING
) -> dict[str, float]:
    """Distances of the results; raise where a dtype is wrong."""
    case, errors = layer.case, distance(fast, want, least)
    assert fast["out"].dtype == (layer.x if case.padded else layer.weight).dtype
    for name in ("x", "weight"):
        if name in fast:
            assert fast[name].dtype == getattr(layer, name).dtype, (name, fast[name].dtype)
    return errors


def run(layer: Layer, **change) -> torch.Tensor:
    """The layer's output with some of the dispatcher's arguments changed."""
    arguments = {
        "num_experts": layer.case.experts,
        "routing_weights": layer.weight,
        "selected_experts": layer.index,
        "hidden_states": layer.x,
        "fc1_weight": layer.fc1_EHF,
        "fc2_weight": layer.fc2_EIH,
    }
    return ChunkMoEDispatcher(layer.case.config())(**{**arguments, **change})
