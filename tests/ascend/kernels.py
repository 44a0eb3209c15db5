"""The ops on CPU tensors, written from their documentation, and as strict as it is.

Sources: `_op_plugin_docs.py` of the wheels, the published documentation of the same ops and of aclnn, and, for the
gradient ops, which have none, their definition in op-plugin. What nothing promises is NaN here, or refused.
"""

import inspect
import re

import torch
import torch.nn.functional as F

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def check(holds: bool, rule: str) -> None:
    if not holds:
        caller = inspect.stack()[1].function
        raise ValueError(f"{caller}: {rule}")


def documented_dtypes(op: str, parameter: str) -> set[torch.dtype]:
    """Floating-point dtypes that the wheel's documentation names where it describes a parameter."""
    import torch_npu

    (line,) = (line for line in getattr(torch_npu, op).__doc__.splitlines() if line.startswith(f"{parameter}("))
    names = set(re.findall("b?float[0-9]+", line))
    return {dtype for dtype in (BF16, FP16, FP32) if str(dtype).removeprefix("torch.") in names}


def npu_moe_token_permute(tokens, indices, num_out_tokens=None, padded_mode=False):
    check(tokens.dtype in documented_dtypes("npu_moe_token_permute", "tokens"), f"tokens of {tokens.dtype}")
    check(tokens.dim() == 2 and tokens.numel() > 0, "tokens must be [tokens, hidden], and not empty")
    check(indices.dtype == torch.int64, f"indices of {indices.dtype}: all versions take int64, some nothing else")
    check(indices.dim() == 2 and len(indices) == len(tokens), "indices must be [tokens, top_k]")
    check(indices.numel() < 16777215 and indices.shape[1] <= 512, "too many indices")
    check(0 <= indices.min() and indices.max() < 16777215, "indices must be in [0, 16777215)")
    check(not num_out_tokens and not padded_mode, "not described here")
    places = indices.flatten().argsort(stable=True).argsort(stable=True)
    permuted = tokens.new_empty(indices.numel(), tokens.shape[1])
    permuted[places] = tokens.repeat_interleave(indices.shape[1], 0)
    return permuted, places.to(torch.int32)


def npu_moe_token_permute_grad(tokens, grad_permuted_tokens, indices, sorted_indices, padded_mode=False):
    check(tokens.dtype == grad_permuted_tokens.dtype, "the gradient must have the tokens' dtype")
    check(tokens.dtype in documented_dtypes("npu_moe_token_permute", "tokens"), f"tokens of {tokens.dtype}")
    check(tokens.numel() > 0 and tokens.shape[1] == grad_permuted_tokens.shape[1], "tokens and gradient must match")
    check(indices.shape == (len(tokens), indices.numel() // len(tokens)), "indices must be [tokens, top_k]")
    _check_places(sorted_indices, grad_permuted_tokens)
    check(sorted_indices.numel() == indices.numel() and not padded_mode, "one place for each index")
    return _summed(grad_permuted_tokens, sorted_indices, indices.shape[1])


def npu_moe_token_unpermute(permuted_tokens, sorted_indices, probs=None, padded_mode=False, restore_shape=None):
    dtypes = documented_dtypes("npu_moe_token_unpermute", "permuted_tokens")
    check(permuted_tokens.dtype in dtypes, f"permuted_tokens of {permuted_tokens.dtype}")
    check(permuted_tokens.dim() == 2 and permuted_tokens.numel() > 0, "permuted_tokens must be [rows, hidden]")
    _check_places(sorted_indices, permuted_tokens)
    check(not padded_mode and restore_shape is None, "not supported")
    if probs is None:
        return permuted_tokens[sorted_indices.long()]
    check(probs.dtype == permuted_tokens.dtype, f"probs of {probs.dtype}, rows of {permuted_tokens.dtype}")
    check(probs.dim() == 2 and probs.numel() == len(sorted_indices) and probs.shape[1] <= 512, "probs: [tokens, top_k]")
    return _summed(permuted_tokens, sorted_indices, probs.shape[1], probs)


def npu_grouped_matmul(x, weight, *, group_list, split_item, group_type, group_list_type):
    check(len(x) == len(weight) == 1, "a tensor each")
    (x,), (weight,) = x, weight
    check(x.dtype == weight.dtype and x.dtype in (FP16, BF16, FP32), f"x of {x.dtype}, weight of {weight.dtype}")
    check(split_item in (2, 3) and group_list_type == 1, "one output, and sizes of groups")
    _check_groups(group_list)
    check(len(group_list) > 1, "a list of sizes must be longer than 1")
    check(x.numel() > 0 and weight.numel() > 0, "empty matrices are not described")
    check(group_type in (0, 2), f"group_type {group_type}")
    if group_type == 0:
        check(x.dim() == 2 and x.is_contiguous(), "x may not be transposed, no other strides are described")
        check(weight.dim() == 3 and weight.shape[:2] == (len(group_list), x.shape[1]), "weight must be [groups, k, n]")
        transposed = weight.transpose(1, 2).is_contiguous() and not weight.is_contiguous()
        check(weight.is_contiguous() or transposed, "weight may be transposed, no other strides are described")
        check(x.shape[1] < 65536 and weight.shape[1 if transposed else 2] < 65536, "inner sizes must be below 65536")
        check(int(group_list.sum()) == len(x), f"groups of {int(group_list.sum())} rows, x of {len(x)}")
        return [torch.cat([part.float() @ w.float() for part, w in _parts(x, group_list, weight)]).to(x.dtype)]
    check(x.dim() == 2 and x.t().is_contiguous(), "x must be transposed")
    check(weight.dim() == 2 and weight.is_contiguous() and len(weight) == x.shape[1], "weight must be [k, n]")
    check(x.shape[0] < 65536 and weight.shape[1] < 65536, "inner sizes must be below 65536")
    check(int(group_list.sum()) == len(weight), f"groups of {int(group_list.sum())} rows, x of {len(weight)}")
    return [torch.stack([_product(part, w) for part, w in _parts(x.t(), group_list, weight)]).to(x.dtype)]


def npu_grouped_matmul_add_(
    self, x, weight, group_list, *, transpose_x=True, transpose_weight=False, group_type=2, group_list_type=0
):
    check(self.dtype == FP32 and self.is_contiguous(), "the sum must be float32, no strides are described")
    check(x.dtype == weight.dtype and x.dtype in (FP16, BF16), f"x of {x.dtype}, weight of {weight.dtype}")
    check(x.dim() == weight.dim() == 2 and len(x) == len(weight) > 0, "x must be [k, m], weight [k, n]")
    check(x.is_contiguous() and weight.is_contiguous(), "x and weight: older versions describe no strides")
    check(self.shape == (len(group_list), x.shape[1], weight.shape[1]), "the sum must be [groups, m, n]")
    check((transpose_x, transpose_weight, group_type) == (True, False, 2), "nothing else is supported")
    check(group_list_type == 0, "group_list_type has no effect where the op falls back to its first version")
    _check_groups(group_list)
    check(bool((group_list.diff() >= 0).all()) and int(group_list[-1]) <= len(x), "group_list must be a running total")
    sizes = group_list.diff(prepend=group_list.new_zeros(1))
    for total, (part, w) in zip(self, _parts(x, sizes, weight), strict=True):
        total += part.t().float() @ w.float()
    return self


def histc(self, bins=100, min=0, max=0):
    """torch's own operation, with the integers that its CPU version refuses, and divided as in the kernel's source."""
    check(self.dtype in (torch.int64, torch.int32), f"keys of {self.dtype}")
    check(min < max, "without a range, the host reads the smallest and the largest key")
    keys = self.flatten()
    keys = keys[(keys >= min) & (keys <= max)]
    return torch.bincount(((keys - min) * bins // (max - min)).clamp(max=bins - 1), minlength=bins).to(self.dtype)


def npu_swiglu(self, dim=-1):
    check(self.dtype in (FP32, FP16, BF16) and self.numel() > 0, f"{self.dtype}, {tuple(self.shape)}")
    gate, up = self.float().chunk(2, dim)
    return (gate * torch.sigmoid(gate) * up).to(self.dtype)


def npu_swiglu_backward(grad_output, self, dim=-1):
    check(self.dtype == grad_output.dtype and self.dtype in (FP32, FP16, BF16), f"{self.dtype}, {grad_output.dtype}")
    check(grad_output.shape[dim] * 2 == self.shape[dim] and self.numel() > 0, "the gradient is half as wide")
    (gate, up), grad = self.float().chunk(2, dim), grad_output.float()
    sigmoid = torch.sigmoid(gate)
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([grad_gate, grad * F.silu(gate)], dim).to(self.dtype)


def _check_places(places: torch.Tensor, rows: torch.Tensor) -> None:
    check(places.dtype == torch.int32 and places.dim() == 1, f"places of {places.dtype}, {tuple(places.shape)}")
    check(len(places) == len(rows), f"{len(places)} places, {len(rows)} rows")
    check(torch.equal(places.sort().values.long(), torch.arange(len(rows))), "places: each of [0, rows) once")


def _check_groups(group_list: torch.Tensor) -> None:
    check(group_list.dtype == torch.int64 and group_list.dim() == 1, f"group_list of {group_list.dtype}")
    check(group_list.is_contiguous() and 0 < len(group_list) <= 1024, "group_list: 1 to 1024 groups")
    check(bool((group_list >= 0).all()), "group_list: sizes may not be negative")


def _summed(rows, places, top_k, weights=None):
    """The sum of each token's rows, in fp32."""
    by_token = rows[places.long()].float().view(-1, top_k, rows.shape[1])
    if weights is not None:
        by_token = by_token * weights.float()[..., None]
    return by_token.sum(1).to(rows.dtype)


def _parts(x, sizes, weight):
    """Each group's rows of x, with its matrix of weight, or its rows of a weight without one for each group."""
    weights = weight if weight.dim() == 3 else weight.split(sizes.tolist() + [len(weight) - int(sizes.sum())])
    return list(zip(x.split(sizes.tolist() + [len(x) - int(sizes.sum())]), weights))[: len(sizes)]


def _product(x, weight):
    if len(x) == 0:
        return torch.full((x.shape[1], weight.shape[1]), torch.nan)
    return x.t().float() @ weight.float()


KERNELS = {name: function for name, function in list(globals().items()) if name.startswith("npu_")}
