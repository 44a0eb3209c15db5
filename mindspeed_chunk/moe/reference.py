"""Chunk MoE in slow and readable code, without exchange, permutation and chunks. Tests compare every fast path with it.

T tokens, H hidden, K experts per token, E experts (all of them), F output columns of fc1 (2I), I expert intermediate.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

__all__ = ["moe_reference"]


def swiglu(fc1_RF: torch.Tensor, limit: float = 0.0) -> torch.Tensor:
    """silu(gate) * up; with a positive limit, gate is first clamped from above and up on both sides."""
    gate_RI, up_RI = fc1_RF.chunk(2, dim=-1)
    if limit > 0:
        gate_RI, up_RI = gate_RI.clamp(max=limit), up_RI.clamp(-limit, limit)
    return F.silu(gate_RI) * up_RI


def moe_reference(
    x_TH: torch.Tensor,
    index_TK: torch.Tensor,
    weight_TK: torch.Tensor,
    fc1_EHF: torch.Tensor,
    fc2_EIH: torch.Tensor,
    *,
    activation: Callable[[torch.Tensor], torch.Tensor] = swiglu,
    pad_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[t] = sum_k weight[t, k] * expert_{index[t, k]}(x[t]), and out[t] = x[t] where a token is padding.

    Differentiable by autograd in every floating-point argument. If experts are spread over ranks, each rank's output is
    this function of the rank's tokens and all experts; an expert's gradient is the sum over the ranks.

    Args:
        x_TH: hidden states, of the weights' dtype.
        index_TK, weight_TK: experts of each token, integers in [0, E), and their router weights, floating point.
        fc1_EHF, fc2_EIH: the experts' weights.
        activation: from rows `[n, F]` to `[n, I]`.
        pad_T: booleans, true for padding.

    Returns:
        `[T, H]` in the dtype of `weight_TK`, or of `x_TH` if `pad_T` is given.
    """
    out_TH = torch.zeros_like(x_TH, dtype=weight_TK.dtype)
    # every expert and every k, so that each expert's weights have a gradient, which is zero without tokens
    for expert in range(fc1_EHF.shape[0]):
        for k in range(index_TK.shape[1]):
            chosen = index_TK[:, k] == expert
            if pad_T is not None:
                chosen = chosen & ~pad_T
            rows_RH = activation(x_TH[chosen] @ fc1_EHF[expert]) @ fc2_EIH[expert]
            weighted_RH = rows_RH.to(weight_TK.dtype) * weight_TK[chosen, k, None]
            out_TH = out_TH.index_add(0, chosen.nonzero().flatten(), weighted_RH)
    if pad_T is None:
        return out_TH
    return torch.where(pad_T[:, None], x_TH, out_TH.to(x_TH.dtype))
