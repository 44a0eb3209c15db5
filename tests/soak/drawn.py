"""A configuration of the fuzz run: one line of text, a test case of the layer, and its comparison on a rank."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

from layer import TOLERANCE, Case, Layer, both, compare, distance, recomputed
from mindspeed_chunk import dist as wire
from mindspeed_chunk.config import ChunkMoEConfig
from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher

# With 8 bits, sizes of 1 or 2 and terms that cancel, an error may be larger than what the fixed cases are held to: then
# it may be this much of the error that the reference itself makes in bf16.
BF16 = 5e-2
BF16_TO_REFERENCE = 8.0


@dataclasses.dataclass(frozen=True)
class Drawn(Case):
    """
    ranks: of the expert-parallel group; one rank has no group.
    routing: also "zipf", where expert e is chosen with a weight of 1 / (1 + e)^2.
    checkpoint: around the layer and what is behind it. "no"; "replay" and "reentrant", torch's two kinds.
    follower: what is behind the layer: "nothing", "negation" (keeps nothing of its input), "silu" (keeps it; its
        derivative changes little with a large input's rounding, unlike a sine's).
    incoming: how the gradient of the output lies in memory: "dense", "transposed", "strided" (a part of each row of
        something wider), "expanded" (one row for all tokens).
    transposed: rows, router weights and expert ids lie in memory column by column.
    again: a second call of the same dispatcher, with other numbers of tokens.
    pieces: exchanges go in messages of two rows.
    auto, max_rows, skip_unread: see ChunkMoEConfig.
    """

    ranks: int = 1
    checkpoint: str = "no"
    follower: str = "nothing"
    incoming: str = "dense"
    transposed: bool = False
    again: bool = False
    pieces: bool = False
    auto: bool = False
    max_rows: int = 0
    skip_unread: bool = False

    def config(self) -> ChunkMoEConfig:
        return dataclasses.replace(
            super().config(),
            chunk_moe_auto=self.auto,
            chunk_moe_max_rows=self.max_rows,
            chunk_moe_skip_unread=self.skip_unread,
        )

    def least(self) -> dict[str, float]:
        """What errors are relative to at least: how large a result is where its terms do not happen to cancel.

        All inputs are of the size of 1, so the root of the number of rows that are summed, or of their values.
        """
        rows = max(1, sum(self.tokens) * self.top_k)
        sums = {"fc1": rows, "fc2": rows, "activation": rows * self.intermediate}
        return {"out": 1.0, "x": 1.0, "weight": 1.0} | {name: terms**0.5 for name, terms in sums.items()}

    def line(self) -> str:
        """JSON of what is not as by default."""
        changed = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default
        }
        return json.dumps(changed, default=lambda dtype: str(dtype).removeprefix("torch."))

    @classmethod
    def read(cls, line: str) -> Drawn:
        changed = json.loads(line)
        for name in ("dtype", "router_dtype"):
            if name in changed:
                changed[name] = getattr(torch, changed[name])
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in changed.items()})


class DrawnLayer(Layer):
    """The layer of a Drawn."""

    def __init__(self, case: Drawn, rank: int, ranks: int) -> None:
        super().__init__(case, rank, ranks)
        if case.transposed:
            self.x, self.weight, self.index = map(_transposed, (self.x, self.weight, self.index))
        if case.incoming == "transposed":
            self.grad = _transposed(self.grad)
        elif case.incoming == "strided":
            self.grad = self.grad.repeat_interleave(2, 1)[:, ::2]
        elif case.incoming == "expanded" and self.grad.shape[0]:
            self.grad = self.grad[:1].expand(self.grad.shape)

    def _route(self, tokens: int, generator: torch.Generator) -> torch.Tensor:
        if self.case.routing != "zipf":
            return super()._route(tokens, generator)
        share_E = (1.0 + torch.arange(self.case.experts)) ** -2
        race_TE = torch.empty(tokens, self.case.experts).exponential_(generator=generator) / share_E
        return race_TE.topk(self.case.top_k, largest=False).indices

    def behind(self, out: torch.Tensor) -> torch.Tensor:
        return {"nothing": lambda same: same, "negation": torch.neg, "silu": F.silu}[self.case.follower](out)

    def call(self, dispatcher, leaves: dict[str, torch.Tensor], group=None) -> torch.Tensor:
        def block(*tensors):
            return self.behind(super(DrawnLayer, self).call(dispatcher, dict(zip(leaves, tensors)), group))

        if self.case.checkpoint == "no":
            return block(*leaves.values())
        return recomputed(block, *leaves.values(), reentrant=self.case.checkpoint == "reentrant")


def compare_on_rank(rank: int, world_size: int, line: str) -> tuple[str, dict[str, float]]:
    """What is wrong with the results of the configuration on this rank ("" for nothing), and its errors by name.

    Errors are told in units of what the dtype allows.
    """
    logging.getLogger("mindspeed_chunk").setLevel(logging.ERROR)  # chunks that max_rows cannot make small enough
    case = Drawn.read(line)
    group = dist.group.WORLD if world_size > 1 else None
    layers = [DrawnLayer(case, rank, world_size)]
    if case.again:
        other = dataclasses.replace(case, tokens=(*case.tokens[1:], case.tokens[0] + 1), seed=case.seed + 1)
        layers.append(DrawnLayer(other, rank, world_size))
    dispatcher = ChunkMoEDispatcher(case.config(), weight_layout=case.layout)
    in_pieces = mock.patch.object(wire, "GLOO_PIECE_BYTES", 2 * case.hidden * case.dtype.itemsize)
    with in_pieces if case.pieces else contextlib.nullcontext():
        results = [both(layer, dispatcher, group) for layer in layers]
    narrow = [layer.reference(group, case.dtype) if case.dtype == torch.bfloat16 else None for layer in layers]
    # all that the ranks do together is behind them: from here on one may fail alone
    worst: dict[str, float] = {}
    try:
        for layer, (fast, want), own in zip(layers, results, narrow, strict=True):
            least, allowed = layer.case.least(), dict.fromkeys(want, TOLERANCE[case.dtype])
            if own is not None:
                rounding = distance(own, want, least)
                allowed = {name: max(BF16, BF16_TO_REFERENCE * rounding[name]) for name in want}
            for name, error in compare(layer, fast, want, least).items():
                worst[name] = max(worst.get(name, 0.0), error / allowed[name])
    except AssertionError as wrong:
        return f"rank {rank}: {wrong}", worst
    over = {name: error for name, error in worst.items() if error > 1}
    told = ", ".join(f"{name} by {error:.3g} times what is allowed" for name, error in over.items())
    return f"rank {rank}: off: {told}" if over else "", worst


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().t()
