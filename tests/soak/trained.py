"""What `train.py` runs on every rank: a trainer whose routing leans another way in each step, and what is seen of it.

T tokens, E experts, K experts a token.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from standalone_ranks import EXAMPLE, trainer

BLOCKS = "model.language_model.layers.{*}"
LAYERS = ("full_attention",) * 2
# of the noise on each element of the control's gradients, relative to it: about what is seen from the same weights
ROUNDING = 2.0**-22
SIZES = (
    "data.dataset_param.basic_parameters.cutoff_len=32",
    "training.micro_batch_size=4",
    # no units that matter to neither feature
    f"parallel.fsdp_plan.apply_modules=['{BLOCKS}','{BLOCKS}.mlp.experts']",
)
NUM_CHUNKS = 3
CHUNKED = (
    *SIZES,
    f"parallel.ep_plan.moe_num_chunks={NUM_CHUNKS}",
    "features.enable_chunk_mbs=true",
    "features.chunkmbs_plan.chunk_mbs=2",
    "features.enable_activation_offload=true",
)
PLAIN = (
    *SIZES,
    "parallel.ep_plan.dispatcher=alltoall",
    "parallel.ep_plan.moe_num_chunks=0",
    "features.recompute=false",
)
KINDS = ("routers", "experts", "others")
# of the bias on a router's logits: as they are, leaning, skewed, nearly all tokens to the same K experts
STRENGTHS = (0.0, 0.3, 1.0, 10.0)


@dataclasses.dataclass(frozen=True)
class Plan:
    """steps: of a run. probe: steps from one comparison from the same weights to the next. sample: from one look at
    the memory to the next. seed: of the skew and of the control's noise. model: its folder."""

    model: str
    steps: int
    probe: int
    sample: int
    seed: int


def write_model(folder: Path) -> str:
    """The example's model with two layers of the fast kind, for the sake of time. Returns its folder."""
    config = json.loads((EXAMPLE / "tiny" / "config.json").read_text(encoding="utf-8"))
    config["text_config"] |= {"layer_types": LAYERS, "num_hidden_layers": len(LAYERS)}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


class Skew:
    """Makes the routers of a model choose with a bias on their logits that is drawn for each step and layer.

    The router weights are those that the chosen experts have without it, so what is trained stays in reach.
    """

    def __init__(self, model: torch.nn.Module, seed: int) -> None:
        from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter  # seconds

        self._seed, self._biases = seed, []
        self._routers = [module for module in model.modules() if isinstance(module, Qwen3_5MoeTopKRouter)]
        self.chosen: list[list[torch.Tensor]] = []
        for layer, router in enumerate(self._routers):
            router.register_forward_hook(partial(self._lean, layer))

    def draw(self, step: int) -> None:
        """The biases of a step: the same on every rank, in every run."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        self._biases = []
        for router in self._routers:
            strength = STRENGTHS[torch.randint(len(STRENGTHS), (), generator=generator).item()]
            self._biases.append(strength * torch.randn(router.num_experts, generator=generator))
        self.chosen = [[] for _ in self._routers]

    def _lean(self, layer, router, args, output):
        logits_TE, weight_TK, _ = output
        index_TK = (logits_TE + self._biases[layer]).topk(router.top_k).indices
        share_TK = logits_TE.softmax(-1, dtype=torch.float32).gather(1, index_TK)
        self.chosen[layer].append(index_TK)
        return logits_TE, (share_TK / share_TK.sum(-1, keepdim=True)).to(weight_TK.dtype), index_TK

    def choices(self, num_tokens: int) -> torch.Tensor:
        """`[layers, T, K]`, sorted by expert. What a recompute chose stands behind the forward's, and is left out."""
        return torch.stack([torch.cat(layer)[:num_tokens] for layer in self.chosen]).sort(-1).values


class Memory:
    """Looks at this process between steps: at what garbage collection and the allocator cannot give back.

    Attributes:
        samples: (step, resident bytes, bytes of the storages of all tensors that Python can reach and that are younger
            than this object).
    """

    def __init__(self) -> None:
        self.samples: list[tuple[int, int, int]] = []
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)
        gc.collect()
        gc.freeze()  # what is there already need not be looked at again and again

    def look(self, step: int) -> None:
        gc.collect()
        self._trim(0)
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        storages = {}
        for thing in gc.get_objects():
            if type(thing) in (torch.Tensor, torch.nn.Parameter):
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        self.samples.append((step, resident, sum(storages.values())))


class Run:
    """A trainer with its skew."""

    def __init__(self, overrides: tuple[str, ...], plan: Plan) -> None:
        self.plan, self.trainer = plan, trainer(*overrides, f"model.model_name_or_path={plan.model}")
        self.skew = Skew(self.trainer.model, plan.seed)
        self.kinds = [_kind(name) for name, p in self.trainer.model.named_parameters() if p.requires_grad]

    def train(self, steps: int, between=lambda step: None) -> dict:
        """Losses and memory of some steps. `between` is called before each of them."""
        memory, losses = Memory(), []
        for step in range(steps):
            between(step)
            self.skew.draw(step)
            told, _ = self.trainer.step(step)
            losses.append(told["loss"])
            if (step + 1) % self.plan.sample == 0:
                memory.look(step + 1)
        return {"losses": losses, "memory": memory.samples}

    def gradients(self, step: int) -> tuple[float, list[torch.Tensor]]:
        """The loss and this rank's shards of the gradients, from the weights as they are."""
        self.skew.draw(step)
        losses = self.trainer.backward(step)
        shards = [parameter.grad.to_local().clone() for parameter in self.trainer.parameters]
        self.trainer.optimizer.zero_grad()
        return losses["loss"], shards

    def round_gradients(self, generator: torch.Generator) -> None:
        """From now on, in front of each optimizer step, add to this rank's gradients what rounding might."""

        def add_noise(*_):
            for parameter in self.trainer.parameters:
                shard = parameter.grad.to_local()
                shard.mul_(1 + ROUNDING * torch.randn(shard.shape, generator=generator))

        self.trainer.optimizer.register_step_pre_hook(add_noise)

    def shards(self) -> list[torch.Tensor]:
        """This rank's shards of the weights themselves."""
        return [parameter.detach().to_local() for parameter in self.trainer.parameters]


class Probe:
    """Compares two runs from the same weights, those of the second.

    Attributes:
        results: a dictionary a probe: "step"; "loss", the relative difference; for each of `KINDS` of parameters, the
            norm of the difference of their gradients, relative to that of the gradients; "parted", (layer, token) pairs
            of all ranks whose experts were not the same: near ties that fell the other way.
    """

    def __init__(self, run: Run, base: Run) -> None:
        self._run, self._base, self.results = run, base, []

    def __call__(self, step: int) -> None:
        if step % self._run.plan.probe:
            return
        for own, other in zip(self._run.shards(), self._base.shards(), strict=True):
            own.copy_(other)
        loss, shards = self._run.gradients(step)
        base_loss, base_shards = self._base.gradients(step)
        squares = torch.zeros(len(KINDS), 2, dtype=torch.float64)
        for kind, shard, base_shard in zip(self._base.kinds, shards, base_shards, strict=True):
            squares[kind, 0] += (shard.double() - base_shard.double()).square().sum()
            squares[kind, 1] += base_shard.double().square().sum()
        num_tokens = sum(index.shape[0] for index in self._base.skew.chosen[0])
        choices = [run.skew.choices(num_tokens) for run in (self._run, self._base)]
        parted = (choices[0] != choices[1]).any(-1).sum()
        dist.all_reduce(squares)
        dist.all_reduce(parted)
        off = (squares[:, 0] / squares[:, 1]).sqrt().tolist()
        told = {"step": step, "loss": abs(loss / base_loss - 1), **dict(zip(KINDS, off)), "parted": parted.item()}
        self.results.append(told)


def _kind(name: str) -> int:
    return KINDS.index("routers" if ".mlp.gate." in name else "experts" if ".mlp.experts." in name else "others")


def soak(rank: int, world_size: int, plan: Plan) -> dict:
    """Every run of `train.py`, one after the other in this process, the one that is looked at most closely first.

    Returns:
        "chunked", "alltoall", and "control", which is `alltoall` with noise of the size of rounding on its gradients:
        losses and memory. "probes": see `Probe`.
    """
    chunked = Run(CHUNKED, plan)
    told = {"chunked": chunked.train(plan.steps)}
    plain = Run(PLAIN, plan)
    probe = Probe(chunked, plain)
    told["alltoall"] = plain.train(plan.steps, between=probe)
    told["probes"] = probe.results
    del probe, chunked, plain
    control = Run(PLAIN, plan)
    control.round_gradients(torch.Generator().manual_seed(plan.seed * world_size + rank))
    told["control"] = control.train(-(-plan.steps // 2))  # enough to see how far apart equal runs are
    return told
