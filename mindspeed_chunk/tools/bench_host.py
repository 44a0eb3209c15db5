"""MindSpeed-MM's own expert-parallel forward as a case of the benchmark, from the checkouts that two variables name.

On a CPU it runs with its plain kernels (`fused=False`) and with what `mindspeed_chunk.patches.on_cpu` adds. Its
plain `unpermute` cannot put back a part of the rows, as its allgather dispatcher wants it: there the other rows are
added as zeros, which costs that case a copy.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HOME = "MINDSPEED_MM_HOME"
_FUNCTIONS = {"host:alltoall": "ep_forward", "host:allgather": "ep_allgather_forward"}
CASES = tuple(_FUNCTIONS)
_HOMES = {HOME: "mindspeed_mm", "MINDSPEED_HOME": "mindspeed"}
_MODULE = "mindspeed_mm.fsdp.distributed.expert_parallel.ep_dispatcher"
_DEVICE_MODULE = "mindspeed_mm.fsdp.utils.device"
# what the ranks need in their environment before torch is imported
ENVIRONMENT = {"NON_MEGATRON": "true", "MINDSPEED_CHUNK_DEVICE": "cpu"}


class HostError(ValueError):
    """MindSpeed-MM is not where it is looked for; the message is one line."""


def check() -> None:
    """Raises HostError unless both checkouts are there."""
    for variable, package in _HOMES.items():
        home = os.environ.get(variable)
        if not home:
            raise HostError(f"{', '.join(CASES)}: set {variable} to a checkout that has the package {package}")
        if not (Path(home) / package).is_dir():
            raise HostError(f"{variable}: {home}: there is no package {package} in it")


def load(case: str) -> Callable:
    """The host's function of that case; sets up its environment in this process."""
    from mindspeed_chunk.patches import install

    os.environ.update(ENVIRONMENT)
    for variable in _HOMES:
        if os.environ[variable] not in sys.path:
            sys.path.insert(0, os.environ[variable])
    install()
    # MindSpeed's all-to-all asks torch.accelerator for its device, which the trainer has set up so
    device = importlib.import_module(_DEVICE_MODULE)
    device.set_accelerator_compatible(device.get_torch_device())
    module: Any = importlib.import_module(_MODULE)
    if not hasattr(module.unpermute, "__wrapped__"):
        module.unpermute = _with_other_rows(module.unpermute)
    return functools.partial(getattr(module, _FUNCTIONS[case]), fused=False)


def _with_other_rows(unpermute: Callable) -> Callable:
    @functools.wraps(unpermute)
    def with_other_rows(permuted_tokens, sorted_indices, probs=None, restore_shape=None, fused=True):
        missing = sorted_indices.numel() - permuted_tokens.shape[0]
        if missing:
            permuted_tokens = torch.nn.functional.pad(permuted_tokens, (0, 0, 0, missing))
        return unpermute(permuted_tokens, sorted_indices, probs=probs, fused=False)

    return with_other_rows
