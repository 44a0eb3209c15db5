"""A trainer as small as it gets: same seed everywhere for the weights, a stream of tokens a rank, plain SGD."""

import importlib
import json
import os

import torch
import torch.distributed as dist
from mindspeed_mm import lookalike
from mindspeed_mm.fsdp.distributed.parallel_state import init_parallel_state
from mindspeed_mm.fsdp.distributed.torch_parallelize import ParallelApplier
from mindspeed_mm.fsdp.features.apply_features import FeaturesApplier
from mindspeed_mm.fsdp.log import set_log_level
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from torch.distributed.tensor import DTensor

LENGTH = 7


class Trainer:
    def __init__(self, args):
        set_log_level()
        torch.set_num_threads(1)
        torch.manual_seed(args.training.seed)
        for name in args.training.plugin:
            importlib.import_module(name)
        dist.init_process_group("gloo")
        init_parallel_state(**vars(args.parallel))
        self.args = args
        model = ModelHub.build(args.model, getattr(args, "features", None))
        if hasattr(FeaturesApplier, "pre_fully_shard_apply"):
            FeaturesApplier(args.features).pre_fully_shard_apply(model)
            self.model = ParallelApplier(args.parallel, args.training)(model)
        else:
            self.model = ParallelApplier(args.parallel, args.training)(model)
            FeaturesApplier(args.model)(self.model)

    def train(self):
        tokens = torch.Generator().manual_seed(100 + dist.get_rank())
        vocabulary = self.model.embed.num_embeddings
        batch_size = self.args.training.micro_batch_size
        for step in range(self.args.training.train_iters):
            batch = torch.randint(vocabulary, (batch_size, LENGTH + 1), generator=tokens)
            mask = torch.ones(batch_size, LENGTH)
            mask[-1, -2:] = 0
            logits = self.model(batch[:, :-1], mask)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss = loss + self.model.auxiliary_loss(mask)
            loss.backward()
            self.step()
            dist.all_reduce(loss.detach_())
            if dist.get_rank() == 0:
                print(f"step {step} loss {loss.item() / dist.get_world_size():.17g}", flush=True)
        if dist.get_rank() == 0:
            stack = sorted(name for name in lookalike.stack_modules if name.startswith("mindspeed_chunk"))
            told = {"ran": sorted(set(lookalike.ran)), "stack": stack, "offloaded": sorted(set(lookalike.offloaded))}
            print("lookalike", json.dumps(told), flush=True)
        dist.barrier()
        dist.destroy_process_group()
        os._exit(0)  # gloo's threads may abort a process that ends by itself

    def step(self):
        """Experts have met the rows of all ranks already; everything else is averaged."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                gradient, parameter.grad = parameter.grad, None
                if isinstance(parameter, DTensor):
                    gradient, parameter = gradient.to_local(), parameter.to_local()
                else:
                    dist.all_reduce(gradient)
                parameter -= self.args.training.lr * gradient / dist.get_world_size()
