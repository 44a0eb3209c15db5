"""One layer call waits for the device once, for its plan, on the NPU back end too."""

import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist

from ascend import rig
from launcher import run_ranks
from layer_cases import call_cases, watched


def watch(rank, world_size, folder):
    with rig.back_end(rig.install(folder)):
        for case, checkpointed in itertools.product(call_cases(), (False, True)):
            case = dataclasses.replace(case, dtype=torch.bfloat16 if case.dtype == torch.float64 else case.dtype)
            copies = watched(case, checkpointed=checkpointed, rank=rank, ranks=world_size, group=dist.group.WORLD)
            assert copies == (2 if case.chunk_size and world_size > 1 else 1), case


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_layer_call_waits_once(wheel_folder, ranks):
    run_ranks(watch, ranks, wheel_folder)
