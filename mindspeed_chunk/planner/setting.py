"""What the planner chooses (a setting), and for what (a job)."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.hardware import Device
from mindspeed_chunk.moe.costs.rows import LayerShape, resolve_dispatch
from mindspeed_chunk.planner.compare.recipes import RECIPES
from mindspeed_chunk.planner.layout import Layout
from mindspeed_chunk.planner.model import ModelSize
from mindspeed_chunk.planner.precision import Recipe


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is given.

    Attributes:
        sequence: tokens per sample.
        global_batch: samples per optimizer step, on all ranks together.
        imbalance: rows that the busiest rank receives over the mean; in a layout, at most EP.
        chunk_loss: tokens of a micro batch whose logits exist at the same time; 0: all.
        reserve: share of the device's memory that a setting must leave free: for fragments, workspaces, the
            communication library's buffers, and images.
    """

    model: ModelSize
    device: Device
    nodes: int
    devices_per_node: int
    recipe: Recipe
    sequence: int = 4096
    global_batch: int = 0
    imbalance: float = 1.0
    chunk_loss: int = 1024
    reserve: float = 0.1
    train_vision: bool = True

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.nodes * self.devices_per_node

    @property
    def element_size(self) -> int:
        """Bytes of an activation: bf16 or fp16 with the fp8 recipes, too."""
        return 4 if self.recipe.compute == "fp32" else 2

    @property
    def budget(self) -> float:
        """Bytes that a setting may use."""
        return self.device.memory * (1 - self.reserve)

    @property
    def compute(self) -> str:
        """The number format whose rate is used, a key of `device.flops`."""
        return self.compute_of(self.recipe)

    @staticmethod
    def compute_of(recipe: Recipe) -> str:
        """`compute` with that recipe."""
        return {"fp16": "bf16"}.get(recipe.compute, recipe.compute)  # one rate for both


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is chosen.

    Attributes:
        backend: "fsdp2" (MindSpeed-MM's), or one to compare with, as in `compare/`.
        micro_batch: samples of one pass on one data-parallel rank.
        accumulation: passes per step.
        chunk_mbs: samples of a micro-chunk inside a pass; 0: ChunkMBS is off.
        policy: one of `activations.POLICIES`.
        num_chunks, schedule, keep, dispatch: as in ChunkMoEConfig.
    """

    layout: Layout
    backend: str = "fsdp2"
    micro_batch: int = 1
    accumulation: int = 1
    chunk_mbs: int = 0
    policy: str = "full"
    num_chunks: int = 1
    schedule: str = "rolling"
    keep: str = "activations"
    dispatch: str = "auto"
    context: str = "ulysses"

    @property
    def samples_at_once(self) -> int:
        """Samples whose activations a block has at the same time."""
        return self.chunk_mbs or self.micro_batch

    @property
    def micro_chunks(self) -> int:
        """Micro-chunks of a pass; 1 without ChunkMBS."""
        return -(-self.micro_batch // self.samples_at_once)

    def as_passes(self) -> Setting:
        """The same samples as passes instead of micro-chunks."""
        passes = self.accumulation * self.micro_chunks
        return dataclasses.replace(self, micro_batch=self.samples_at_once, accumulation=passes, chunk_mbs=0)

    def tokens(self, job: Job) -> int:
        """T: tokens that a block has at the same time on one rank."""
        return self.samples_at_once * job.sequence // self.layout.cp

    def loss_chunk(self, job: Job) -> int:
        """Tokens of each sample whose logits exist at the same time: `chunkloss_plan.chunk_size`.

        MindSpeed-MM cuts [B, S, H] along S (`torch.split(..., dim=1)` in fsdp/features/memory/chunkloss/chunkloss.py).
        So the same number of tokens of every sample of the micro batch exist. ChunkMBS does not include the head.
        """
        sequence = job.sequence // self.layout.cp
        return min(max(1, job.chunk_loss // self.micro_batch), sequence) if job.chunk_loss else sequence

    def layer(self, job: Job) -> LayerShape:
        """The MoE layer call; TP splits the experts' intermediate size."""
        model, layout = job.model, self.layout
        return _layer(
            self.dispatch,
            tokens=self.tokens(job),
            hidden=model.hidden_size,
            intermediate=model.moe_intermediate_size // layout.tp,
            experts=model.num_experts,
            top_k=model.num_experts_per_tok,
            ep=layout.ep,
            element_size=job.element_size,
        )

    def brief(self) -> str:
        """What is chosen for the layout, for a narrow column: batch, recompute, N, keep."""
        batch = (
            f"{self.micro_batch} by {self.chunk_mbs}" if self.chunk_mbs else f"{self.micro_batch} x {self.accumulation}"
        )
        return f"{batch}, {self.policy}, N={self.num_chunks}, {self.keep}"

    def title(self) -> str:
        """Everything that is chosen, in one line."""
        batch = f"batch {self.micro_batch}"
        batch += f", micro-chunks of {self.chunk_mbs}" if self.chunk_mbs else ""
        batch += f" x {self.accumulation}" if self.accumulation > 1 or not self.chunk_mbs else ""
        return f"{self.layout}, {batch}, recompute {self.policy}, N={self.num_chunks}, keep {self.keep}"


@functools.lru_cache(maxsize=4096)
def _layer(dispatch: str, **sizes: Any) -> LayerShape:
    shape = LayerShape(**sizes)
    return dataclasses.replace(shape, dispatch=resolve_dispatch(dispatch, shape))


def check_job(job: Job) -> None:
    """Raise ConfigError for sizes with which the planner cannot work."""
    if job.global_batch % job.world and job.world % job.global_batch:
        rule = f"neither a multiple nor a divisor of the {job.world} ranks"
        raise ConfigError.about("--global-batch", job.global_batch, rule, f"take {job.world * 4}, for example")
    if job.compute not in job.device.flops:
        rule = f"{job.device.name} has no matrix unit for {job.compute}"
        possible = ", ".join(name for name, recipe in RECIPES.items() if job.compute_of(recipe) in job.device.flops)
        way_out = f"use {possible}" if possible else "use another device"
        way_out += f", or a device file with flops_{job.compute}"
        raise ConfigError.about("--precision", job.recipe.name, rule, way_out)
