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

from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.tools.host_probe import HOMES

HOME = HOMES["mindspeed_mm"]
_FUNCTIONS = {"host:alltoall": "ep_forward", "host:allgather": "ep_allgather_forward"}
CASES = tuple(_FUNCTIONS)
_PACKAGES = ("mindspeed_mm", "mindspeed")  # in the order in which they are asked for
_MODULE = "mindspeed_mm.fsdp.distributed.expert_parallel.ep_dispatcher"
_DEVICE_MODULE = "mindspeed_mm.fsdp.utils.device"
# what the ranks need in their environment before torch is imported
ENVIRONMENT = {"NON_MEGATRON": "true", "MINDSPEED_CHUNK_DEVICE": "cpu"}


def check() -> None:
    """Raises ConfigError unless both checkouts are there."""
    for package in _PACKAGES:
        variable = HOMES[package]
        home = os.environ.get(variable)
        if not home:
            raise ConfigError(f"{', '.join(CASES)}: set {variable} to a checkout that has the package {package}")
        if not (Path(home) / package).is_dir():
            raise ConfigError(f"{variable}: {home}: there is no package {package} in it")


def load(case: str) -> Callable:
    """The host's function of that case; sets up its environment in this process."""
    from mindspeed_chunk.patches import install

    os.environ.update(ENVIRONMENT)
    for home in (os.environ[HOMES[package]] for package in _PACKAGES):
        if home not in sys.path:
            sys.path.insert(0, home)
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
    def with_other_rows(
        permuted_tokens: Any, sorted_indices: Any, probs: Any = None, restore_shape: Any = None, fused: bool = True
    ) -> torch.Tensor:
        missing = sorted_indices.numel() - permuted_tokens.shape[0]
        if missing:
            permuted_tokens = torch.nn.functional.pad(permuted_tokens, (0, 0, 0, missing))
        return unpermute(permuted_tokens, sorted_indices, probs=probs, fused=False)

    return with_other_rows
