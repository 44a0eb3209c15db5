"""The recipes that MindSpeed-MM's FSDP2 yaml can select, and others to compare with."""

from __future__ import annotations

from mindspeed_chunk.planner.precision import FSDP2_RECIPES, ZERO, Recipe

_MEGATRON = "NVIDIA/Megatron-LM, docs on the distributed optimizer: bf16 parameters, fp32 gradients: 18 bytes"
_TE = "NVIDIA Transformer Engine, documentation on fp8: weights kept in high precision, cast to fp8 for the matmuls"
_DEEPSEEK = "DeepSeek-V3 Technical Report, arXiv:2412.19437, section 3.3: fp32 master and gradients, bf16 moments"

_OTHERS = (
    Recipe("bf16-megatron", 2, 4, 4, 8, 2, "bf16", False, _MEGATRON),
    Recipe("fp16", 2, 4, 2, 8, 2, "fp16", True, ZERO),
    Recipe("fp8-tensorwise", 2, 4, 4, 8, 1, "fp8", False, _TE),
    Recipe("fp8-blockwise", 1, 4, 4, 4, 1, "fp8", False, _DEEPSEEK),
)
RECIPES: dict[str, Recipe] = FSDP2_RECIPES | {recipe.name: recipe for recipe in _OTHERS}
