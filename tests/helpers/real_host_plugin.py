"""Imported by the real trainer through `training.plugin`: data sets for tests, and every digit of what it computes."""

import json
import os
import traceback
from pathlib import Path

import torch
from mindspeed_mm.fsdp.data.dataloader.data_collator import DATA_COLLATOR
from mindspeed_mm.fsdp.distributed.expert_parallel import ep_dispatcher
from mindspeed_mm.fsdp.train.train_engine import TrainEngine
from mindspeed_mm.fsdp.utils.register import data_register
from tiny_data import StandardLibrary

import mindspeed_chunk
from mindspeed_chunk import patches

OURS = [str(Path(package.__file__).resolve().parent) for package in (mindspeed_chunk, patches)]


@data_register.register("padded_text")
def padded_text(basic_param, **_):
    return PaddedText(basic_param["cutoff_len"])


class PaddedText(StandardLibrary):
    """Samples of different lengths: the tail is padding, without a label."""

    def collate_fn(self, rows):
        batch = super().collate_fn(rows)
        for row, (mask, labels) in enumerate(zip(batch["attention_mask"], batch["labels"])):
            length = mask.numel() // (2 + row % 3) + int(rows[row][0]) % 7
            mask[length:], labels[length:] = 0, -100
        return batch


@data_register.register("batched_text")
def batched_text(basic_param, **_):
    return Batches(StandardLibrary(basic_param["cutoff_len"]), 4)


@data_register.register("padded_batches")
def padded_batches(basic_param, **_):
    return Batches(PaddedText(basic_param["cutoff_len"]), 4)


@data_register.register("single_text")
def single_text(basic_param, **_):
    return Batches(StandardLibrary(basic_param["cutoff_len"]), 1)


class Batches(torch.utils.data.Dataset):
    """Whole batches, another one for each rank: for the data loader that shards nothing and takes single items."""

    def __init__(self, samples, size):
        self._samples, self._size = samples, size

    def __len__(self):
        return 4

    def __getitem__(self, index):
        first = self._size * (index * int(os.environ["WORLD_SIZE"]) + int(os.environ["RANK"]))
        return self._samples.collate_fn([self._samples[first + number] for number in range(self._size)])


DATA_COLLATOR["only_item"] = lambda **_: lambda items: items[0]


def record(**row):
    if os.environ["RANK"] == "0":
        with open(os.environ["REAL_HOST_RECORD"], "a") as file:
            print(json.dumps(row), file=file)


def also(owner, name, act):
    """After `owner.name`, call `act` with its result and its arguments."""
    original = getattr(owner, name)

    def wrapper(*args, **kwargs):
        result = original(*args, **kwargs)
        act(result, *args, **kwargs)
        return result

    setattr(owner, name, wrapper)


def record_step(_, engine, iteration, elapsed, lr, consumed, losses, norm):
    record(loss=[*losses.values()], norm=float(norm), collectives=[*collectives.values()])


def record_frames(*_, **__):
    """Who is on the road of an MoE layer, once."""
    if not seen:
        seen.append(True)
        record(frames=[frame.name for frame in traceback.extract_stack() if frame.filename.startswith(tuple(OURS))])


def count(name):
    """Of the calls that carry parameters or gradients, which are floating-point."""

    def counted(result, *args, **kwargs):
        collectives[name] += [*args, *kwargs.values()][0].is_floating_point()

    return counted


def unpermute(permuted_tokens, sorted_indices, probs=None, restore_shape=None, fused=True):
    """As an NPU does it: rows that went to experts of other ranks count as zeros. The host's eager one raises."""
    if restore_shape is not None:
        rows = sorted_indices.numel() - len(permuted_tokens)
        permuted_tokens = torch.nn.functional.pad(permuted_tokens, (0, 0, 0, rows))
    return host_unpermute(permuted_tokens, sorted_indices, probs, None, fused)


seen, collectives = [], dict.fromkeys(("all_gather_into_tensor", "reduce_scatter_tensor"), 0)
host_unpermute, ep_dispatcher.unpermute = ep_dispatcher.unpermute, unpermute
also(TrainEngine, "training_log", record_step)
also(TrainEngine, "evaluate", lambda result, *_: record(validation=float(result[0])))
also(torch.distributed, "all_to_all_single", record_frames)
for name in collectives:
    also(torch.distributed, name, count(name))
