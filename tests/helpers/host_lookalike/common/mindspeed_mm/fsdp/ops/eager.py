"""The plain road of one MoE layer, in autograd's own terms: sort, exchange, one matmul an expert, exchange, sum.

T tokens here, H hidden, I intermediate, K experts a token, R rows, E experts, L = E / ep experts here.
"""

import torch
import torch.distributed as dist


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RH, sent, received, group):
        ctx.way_back = received, sent, group
        out_RH = rows_RH.new_empty((sum(received), rows_RH.shape[1]))
        dist.all_to_all_single(out_RH, rows_RH.contiguous(), received, sent, group=group)
        return out_RH

    @staticmethod
    def backward(ctx, grad_RH):
        return _Exchange.apply(grad_RH, *ctx.way_back), None, None, None


def swiglu(fc1_RF, limit=0.0):
    gate_RI, up_RI = fc1_RF.chunk(2, dim=-1)
    if limit:
        gate_RI, up_RI = gate_RI.clamp(max=limit), up_RI.clamp(min=-limit, max=limit)
    return torch.nn.functional.silu(gate_RI) * up_RI


def count_rows(index_TK, num_experts, group):
    """Rows of each rank for each expert, `[ep, E]`."""
    counts_E = torch.bincount(index_TK.flatten(), minlength=num_experts)
    gathered = [torch.empty_like(counts_E) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, counts_E, group=group)
    return torch.stack(gathered)


def run_experts(rows_RH, rows_per_expert, fc1_LHF, fc2_LIH, activation):
    """Rows sorted by expert through their experts."""
    pieces = rows_RH.split(rows_per_expert)
    return torch.cat([activation(piece @ fc1) @ fc2 for piece, fc1, fc2 in zip(pieces, fc1_LHF, fc2_LIH)])


def alltoall(num_experts, weight, index_TK, x_TH, fc1_LHF, fc2_LIH, group, activation):
    """`[T, H]` in the dtype of `weight`, which is `[T, K]` or `[T, E]`."""
    if weight.shape != index_TK.shape:
        weight = weight.gather(1, index_TK)
    ep, rank = dist.get_world_size(group), dist.get_rank(group)
    if num_experts % ep:
        raise ValueError(f"Number of experts ({num_experts}) must be divisible by expert parallel size ({ep}).")
    local = num_experts // ep
    counts_SE = count_rows(index_TK, num_experts, group)
    counts_SL = counts_SE[:, rank * local : (rank + 1) * local]
    sent, received = counts_SE[rank].view(ep, local).sum(1).tolist(), counts_SL.sum(1).tolist()

    order_R = index_TK.flatten().argsort(stable=True)
    rows_RH = _Exchange.apply(x_TH[order_R // index_TK.shape[1]], sent, received, group)
    by_expert_R = torch.arange(local).repeat(ep).repeat_interleave(counts_SL.flatten()).argsort(stable=True)
    out_RH = run_experts(rows_RH[by_expert_R], counts_SL.sum(0).tolist(), fc1_LHF, fc2_LIH, activation)
    back_RH = _Exchange.apply(out_RH[by_expert_R.argsort()], received, sent, group)
    back_TKH = back_RH[order_R.argsort()].view(*index_TK.shape, -1).to(weight.dtype)
    return (back_TKH * weight[..., None]).sum(1)


def without_padding(skip, seq_mask, forward, weight, index_TK, x_TH):
    """`forward(weight, index_TK, x_TH)` of the tokens whose mask is not 0; the others come back as they are."""
    if not skip:
        return forward(weight, index_TK, x_TH)
    if seq_mask is None:
        raise ValueError("seq_mask must be provided when skip_moe_pad_tokens is enabled.")
    kept = seq_mask.view(-1) != 0
    return x_TH.index_put((kept.nonzero().flatten(),), forward(weight[kept], index_TK[kept], x_TH[kept]))
