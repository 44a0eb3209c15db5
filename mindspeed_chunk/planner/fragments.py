"""A setting as the keys of MindSpeed-MM's yaml that it decides; the rest of a stock file stays as it is."""

from __future__ import annotations

from typing import Any

import yaml

from mindspeed_chunk.config import KEEPS
from mindspeed_chunk.planner.setting import Job, Setting
from mindspeed_chunk.planner.state import BLOCKS, FSDP_MODULES, VISION

_EXPERTS = f"{BLOCKS}.mlp.experts"
_VISION_BLOCKS = f"{VISION}.blocks.{{*}}"


def fragments(job: Job, setting: Setting) -> str:
    """The sections `parallel`, `features`, `training` and `data`; `model` if something of it changes.

    A list replaces that of the stock file, so the vision tower's blocks are in it, too, as they are there.
    """
    model: dict[str, Any] = {} if job.train_vision else {"freeze": [VISION]}
    if setting.layout.cp > 1:
        model["attn_implementation"] = "flash_attention_2"  # what the stock yamls ask for with Ulysses
    content: dict[str, Any] = {"model": model} if model else {}
    content |= {
        "parallel": _parallel(job, setting),
        "features": _features(job, setting),
        "training": {
            "micro_batch_size": setting.micro_batch,
            "gradient_accumulation_steps": setting.accumulation,
        },
        "data": {"dataset_param": {"basic_parameters": {"cutoff_len": job.sequence}}},
    }
    return yaml.safe_dump(content, sort_keys=False)


def _parallel(job: Job, setting: Setting) -> dict[str, Any]:
    layout = setting.layout
    ep_plan: dict[str, Any] = {"apply_modules": [_EXPERTS], "dispatcher": "alltoall"}
    if layout.ep > 1:
        ep_plan |= {"dispatcher": "chunkmoe", "moe_num_chunks": setting.num_chunks}
        if setting.keep != KEEPS[0]:
            ep_plan["chunk_moe_keep"] = setting.keep
    return {
        "fully_shard_parallel_size": "auto",
        "fsdp_plan": {
            "apply_modules": [*FSDP_MODULES, "mtp"],
            "hook_modules": [BLOCKS],
            "param_dtype": "fp32" if job.recipe.compute == "fp32" else "bf16",
            "reduce_dtype": "fp32",
            "num_to_forward_prefetch": 1,
            "num_to_backward_prefetch": 1,
        },
        "ulysses_parallel_size": layout.cp,
        "expert_parallel_size": layout.ep,
        "ep_plan": ep_plan,
    }


def _features(job: Job, setting: Setting) -> dict[str, Any]:
    recompute, offload = setting.policy != "none", setting.policy == "offload"
    blocks = [_VISION_BLOCKS, BLOCKS] if job.train_vision else [BLOCKS]
    features: dict[str, Any] = {"recompute": recompute}
    if recompute:
        features["recompute_plan"] = {"apply_modules": blocks}
    features["enable_activation_offload"] = offload
    if offload:
        features["activation_offload_plan"] = {"apply_modules": list(blocks)}
    features["enable_chunk_mbs"] = bool(setting.chunk_mbs)
    if setting.chunk_mbs:
        features["chunkmbs_plan"] = {"apply_modules": [BLOCKS], "chunk_mbs": setting.chunk_mbs}
    if job.chunk_loss:
        features["enable_chunk_loss"] = True
        features["chunkloss_plan"] = {"apply_module": "lm_head", "chunk_size": setting.loss_chunk(job)}
    return features
