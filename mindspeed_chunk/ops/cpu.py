"""The CPU back end: plain torch, one `mm` per expert, every operation with its backward as a plain function.

R rows routed, T tokens, K experts per token, P = T * K (token, k) pairs, H hidden, I expert intermediate, F = 2I, S
source ranks, L experts here.
`Groups` are read on the host. A row that is only moved stays bit-equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from mindspeed_chunk.ops.groups import Groups


def count(keys: torch.Tensor, num_bins: int) -> torch.Tensor:
    """Occurrences of each integer in [0, num_bins): int64 `[num_bins]`."""
    return torch.bincount(keys.reshape(-1), minlength=num_bins)


def permute(
    x_TH: torch.Tensor, route_TK: torch.Tensor, num_rows: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every token K times, in order of the ids, ties in token order; only the first `num_rows` rows of these.

    Returns:
        `[R, H]` rows, and int64 `[T * K]`: which of the T * K (token, k) pairs each row is. The pairs after the first
        R have no row. The functions below accept rows that are fewer than the pairs.
    """
    order_P = torch.sort(route_TK.reshape(-1), stable=True).indices
    return x_TH.index_select(0, order_P[:num_rows] // route_TK.shape[1]), order_P


def permute_backward(grad_RH: torch.Tensor, order_P: torch.Tensor, top_k: int) -> torch.Tensor:
    """The sum of each token's gradient rows, `[T, H]`."""
    if len(grad_RH) < len(order_P):
        return _sum_of_some(grad_RH, order_P, top_k)
    return F.embedding_bag(_inverse(order_P).view(-1, top_k), grad_RH, mode="sum")


def unpermute(rows_RH: torch.Tensor, order_P: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
    """The sum of each token's rows, weighted, in the dtype of the weights: `[T, H]`."""
    if len(rows_RH) < len(order_P):
        return _sum_of_some(rows_RH.to(weight_TK.dtype), order_P, weight_TK.shape[1], weight_TK)
    return F.embedding_bag(
        _inverse(order_P).view(weight_TK.shape),
        rows_RH.to(weight_TK.dtype),
        mode="sum",
        per_sample_weights=weight_TK.contiguous(),
    )


def pairs(order_P: torch.Tensor) -> torch.Tensor:
    """Which of the T * K (token, k) pairs each row is, integers `[T * K]`: `order_P` itself, in this back end.

    With fewer rows than pairs, the first R are those of the rows.
    """
    return order_P


def unpermute_backward(grad_TH: torch.Tensor, pair_R: torch.Tensor, top_k: int) -> torch.Tensor:
    """The token's row of `grad_TH` for each row, `[R, H]`: times w, it is the gradient of the row."""
    return grad_TH.index_select(0, pair_R // top_k)


def rows_of(value_TK: torch.Tensor, pair_R: torch.Tensor) -> torch.Tensor:
    """From one number per (token, k) pair, `[T, K]`, to one per row, `[R]`."""
    return value_TK.reshape(-1).index_select(0, pair_R)


def rows_of_backward(value_R: torch.Tensor, order_P: torch.Tensor, out_TK: torch.Tensor) -> None:
    """The reverse: one number per row, `[R]`, into the places of their pairs in `out_TK`, which is contiguous.

    The places of pairs without a row stay as they are.
    """
    out_TK.view(-1)[order_P[: len(value_R)]] = value_R


def regroup(rows_RH: torch.Tensor, groups: Groups) -> torch.Tensor:
    """From (source, expert) order, in which rows arrive, to (expert, source) order, which experts need.

    If the two orders are the same, this is `rows_RH` itself. The rows may be numbers, `[R]`.
    """
    return rows_RH if groups.in_one_order else _transposed(rows_RH, groups.counts)


def regroup_backward(rows_RH: torch.Tensor, groups: Groups) -> torch.Tensor:
    """The reverse: from (expert, source) order to (source, expert) order."""
    return rows_RH if groups.in_one_order else _transposed(rows_RH, list(zip(*groups.counts, strict=True)))


def _transposed(rows_RH: torch.Tensor, counts: Sequence[Sequence[int]]) -> torch.Tensor:
    pieces = rows_RH.split([n for row in counts for n in row])
    columns = len(counts[0])
    return torch.cat([piece for column in range(columns) for piece in pieces[column::columns]])


def operand(rows_RH: torch.Tensor) -> torch.Tensor:
    """Strided rows, or numbers `[R]`, that several kernels will read: contiguous if these would make copies of them.

    Here these are the rows themselves.
    """
    return rows_RH


def grouped_mm(
    rows_RH: torch.Tensor, weight_LHF: torch.Tensor, groups: Groups, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Each expert's rows times its weight: `[R, F]`, into `out` if it is given (its rows may be strided)."""
    if out is None:
        out = rows_RH.new_empty((rows_RH.shape[0], weight_LHF.shape[2]))
    start = 0
    for weight_HF, n in zip(weight_LHF.unbind(0), groups.rows_per_expert, strict=True):
        if n:
            torch.mm(rows_RH[start : start + n], weight_HF, out=out[start : start + n])
        start += n
    return out


def grouped_mm_back(
    rows_RH: torch.Tensor, weight_LHF: torch.Tensor, groups: Groups, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`grouped_mm`, then `regroup_backward`: the products `[R, F]` in (source, expert) order, ready to be sent back.

    Only one expert's products at a time are in the other order, so there are never two buffers of all rows.
    """
    if groups.in_one_order:
        return grouped_mm(rows_RH, weight_LHF, groups, out)
    if out is None:
        out = rows_RH.new_empty((rows_RH.shape[0], weight_LHF.shape[2]))
    experts = len(groups.rows_per_expert)
    places = out.split([n for counts in groups.counts for n in counts])
    start = 0
    for expert, (weight_HF, n) in enumerate(zip(weight_LHF.unbind(0), groups.rows_per_expert, strict=True)):
        if n:
            products = (rows_RH[start : start + n] @ weight_HF).split([counts[expert] for counts in groups.counts])
            for place, product in zip(places[expert::experts], products, strict=True):
                place.copy_(product)
        start += n
    return out


def grouped_mm_wgrad(rows_RH: torch.Tensor, grad_RF: torch.Tensor, groups: Groups, total_LHF: torch.Tensor) -> None:
    """Add each expert's rows^T times gradient rows to `total_LHF`, which may be of a wider dtype, or transposed."""
    start = 0
    for total_HF, n in zip(total_LHF.unbind(0), groups.rows_per_expert, strict=True):
        if n:
            rows_HR, grad_nF = rows_RH[start : start + n].t(), grad_RF[start : start + n]
            if total_HF.dtype == rows_HR.dtype:
                total_HF.addmm_(rows_HR, grad_nF)
            else:
                total_HF.add_(rows_HR @ grad_nF)
        start += n


def swiglu(fc1_RF: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(gate) * up of `[R, 2I]` = (gate, up): `[R, I]`.

    Args:
        limit: if positive, gate is first clamped from above and up on both sides, as in MindSpeed-MM.
    """
    gate_RI, up_RI = _gate_up(fc1_RF, limit)
    return F.silu(gate_RI).mul_(up_RI)


def swiglu_backward(grad_RI: torch.Tensor, fc1_RF: torch.Tensor, limit: float, *, reuse: bool) -> torch.Tensor:
    """The gradient of `swiglu`'s input, `[R, 2I]`.

    Args:
        grad_RI: the gradient of its output; overwritten.
        reuse: `fc1_RF` is not needed any more, and the gradient overwrites it.
    """
    gate_RI, up_RI = _gate_up(fc1_RF, limit)
    if limit > 0:
        raw_gate_RI, raw_up_RI = fc1_RF.chunk(2, dim=-1)
        gate_clamped_RI, up_clamped_RI = raw_gate_RI > limit, raw_up_RI.abs() > limit
    grad_RF = fc1_RF if reuse else torch.empty_like(fc1_RF)
    grad_gate_RI, grad_up_RI = grad_RF.chunk(2, dim=-1)
    # uses as little memory as possible: up may be overwritten only after gate has used it
    silu_RI = F.silu(gate_RI) if reuse else torch.ops.aten.silu.out(gate_RI, out=grad_up_RI)
    silu_RI.mul_(grad_RI)
    torch.ops.aten.silu_backward.grad_input(grad_RI.mul_(up_RI), gate_RI, grad_input=grad_gate_RI)
    if reuse:
        grad_up_RI.copy_(silu_RI)
    if limit > 0:
        grad_gate_RI.masked_fill_(gate_clamped_RI, 0)
        grad_up_RI.masked_fill_(up_clamped_RI, 0)
    return grad_RF


def _gate_up(fc1_RF: torch.Tensor, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    gate_RI, up_RI = fc1_RF.chunk(2, dim=-1)
    return (gate_RI.clamp(max=limit), up_RI.clamp(-limit, limit)) if limit > 0 else (gate_RI, up_RI)


def _inverse(order_R: torch.Tensor) -> torch.Tensor:
    inverse_R = torch.empty_like(order_R)
    inverse_R[order_R] = torch.arange(order_R.numel(), device=order_R.device)
    return inverse_R


def _sum_of_some(
    rows_RH: torch.Tensor, order_P: torch.Tensor, top_k: int, weight_TK: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum of each token's rows, `[T, H]`, if fewer than all pairs have a row. The others are not read at all."""
    num_tokens = len(order_P) // top_k
    if len(rows_RH) == 0:
        return rows_RH.new_zeros((num_tokens, rows_RH.shape[1]))
    pair_R, row_R = torch.sort(order_P[: len(rows_RH)])  # by token
    first_T = torch.searchsorted(pair_R, torch.arange(0, len(order_P), top_k, device=order_P.device))
    weight_R = None if weight_TK is None else weight_TK.reshape(-1).index_select(0, pair_R)
    return F.embedding_bag(row_R, rows_RH, first_T, mode="sum", per_sample_weights=weight_R)
