"""The training loop."""

import time
from collections import Counter
from contextlib import nullcontext
from typing import Any, TextIO

import torch
import torch.distributed as dist

from mindspeed_chunk.observe import emit, observe
from mindspeed_chunk.standalone.blocks import wrap_model
from mindspeed_chunk.standalone.log import RunLog, traffic_per_layer
from mindspeed_chunk.standalone.model import BalanceLoss, use_dispatcher
from mindspeed_chunk.standalone.parallel import build_meshes, clip_gradients, hoist_units, shard_model
from mindspeed_chunk.standalone.prepare import Prepared


class Trainer:
    """One rank's model, optimizer and position in the stream of samples. Needs an initialised process group."""

    def __init__(self, prepared: Prepared) -> None:
        """Changes the prepared model in place: dispatcher, recompute, sharding."""
        config, model, modules = prepared.config, prepared.model, prepared.modules
        self.config, self.data = config, prepared.data
        self.model: Any = model  # has the methods of FSDP2, too
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.num_moe_layers = len(modules.experts)
        meshes = build_meshes(config.ep_size)
        use_dispatcher(modules.experts, config, meshes.ep_group)
        self.balance = BalanceLoss(model) if config.router_aux_loss_coef else None
        self.offload = wrap_model(config, modules, [self.balance.recorded] if self.balance else [])
        shard_model(model, modules.fsdp, modules.experts, config.fsdp, meshes)
        for block in modules.chunk.values():
            hoist_units(block)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        experts = {p for module in modules.experts for p in module.parameters()}
        # two groups, because the optimizer's fused loops need parameters of one mesh
        groups = [[p for p in self.parameters if p not in experts], [p for p in self.parameters if p in experts]]
        training = config.training
        self.optimizer = torch.optim.AdamW(
            [{"params": group} for group in groups if group],
            lr=training.lr,
            betas=(training.adam_beta1, training.adam_beta2),
            eps=training.adam_eps,
            weight_decay=training.weight_decay,
        )

    def train(self, metrics: TextIO | None = None) -> None:
        """Run all iterations; rank 0 logs and writes `metrics`."""
        training = self.config.training
        # Traffic is counted in the second iteration: the first also has events that happen only once.
        counted = min(1, training.train_iters - 1) if self.num_moe_layers else None
        with RunLog(training, self.config.global_batch_size(self.world_size), metrics, self.rank) as log:
            for iteration in range(training.train_iters):
                dist.barrier()
                start = time.perf_counter()
                with observe() if iteration == counted else nullcontext() as events:
                    losses, grad_norm = self.step(iteration)
                dist.barrier()
                elapsed_ms = (time.perf_counter() - start) * 1000
                per_layer = None
                if events is not None:
                    per_layer = traffic_per_layer(events, self.num_moe_layers * training.gradient_accumulation_steps)
                log.iteration(iteration + 1, losses, grad_norm, elapsed_ms, per_layer)

    def step(self, iteration: int) -> tuple[dict[str, float], float]:
        """One optimizer step. Returns (losses by name, norm of the gradients before clipping)."""
        losses = self.backward(iteration)
        grad_norm = clip_gradients(self.parameters, self.config.training.clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses, grad_norm

    def backward(self, iteration: int) -> dict[str, float]:
        """Forward and backward of all micro batches; leaves the gradients of the mean over the global batch.

        iteration: counted from 0. Returns the losses of `forward` as floats, means over ranks and micro batches.
        """
        steps, size = self.config.training.gradient_accumulation_steps, self.config.training.micro_batch_size
        totals: Any = Counter()  # of tensors
        for step in range(steps):
            first = ((iteration * steps + step) * self.world_size + self.rank) * size
            self.model.set_requires_gradient_sync(step == steps - 1)
            emit("phase", "forward")
            losses = self.forward(self.data.batch(first, size))
            emit("phase", "backward")
            # every gradient is reduced by a plain sum, so the mean over ranks and micro batches is computed here
            (losses["loss"] / (steps * self.world_size)).backward()
            totals.update({name: loss.detach() for name, loss in losses.items()})
        means = torch.stack(list(totals.values())) / (steps * self.world_size)
        dist.all_reduce(means)
        return dict(zip(totals, means.tolist()))

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Losses of int64 [B, S] tokens, fp32 scalars by name.

        "loss" is the loss of the training; "aux_loss", if its coefficient is set, is the routers' part without it.
        """
        if self.balance is None:
            return {"loss": self.model(input_ids=tokens, labels=tokens, use_cache=False).loss}
        self.balance.start()
        loss = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        aux_loss = self.balance.finish()
        return {"loss": loss + self.config.router_aux_loss_coef * aux_loss, "aux_loss": aux_loss}
