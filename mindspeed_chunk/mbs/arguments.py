"""Which arguments of a block have the batch, how they are cut into micro-chunks, and how outputs are joined again.

B samples per call, b per micro-chunk, S sequence length, H hidden size.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from mindspeed_chunk.config import ChunkMBSConfig
from mindspeed_chunk.device import untraced
from mindspeed_chunk.log import say_once
from mindspeed_chunk.mbs.checks import PACKED, VISUAL_ROWS
from mindspeed_chunk.wording import shown

# One row per token of the batch, [B * S, ...], for any layout of the hidden states.
_TOKEN_ROWS = ("block_residual",)
# The batch dimension of these does not depend on the layout of the hidden states: [..., B, S]; and no batch at all.
_BATCH_DIM_OF = {"position_ids": -2}
_NEVER_CUT = ("cache_position",)

# How one tensor is cut: the dimension, and its number of rows per sample.
Place = tuple[int, int]


class CannotCut(ValueError):
    """The arguments of this call cannot be cut into micro-chunks; the message is one line."""


class CutArguments:
    """The arguments of one call, cut: `micro(c)` has those of micro-chunk c.

    Attributes:
        batch: B.
        lengths: samples of each micro-chunk; the last may have fewer.
        rows: possible numbers of rows per sample in an output: one, or one per token if these are flattened with the
            batch.
    """

    def __init__(
        self, leaves: list[Any], spec: TreeSpec, places: dict[int, Place], hidden: int, batch_dim: int, size: int
    ) -> None:
        self._leaves, self._spec, self._places, self._hidden = leaves, spec, places, hidden
        shape = leaves[hidden].shape
        self.batch = batch = shape[batch_dim]
        self._size = size
        self.lengths = tuple(min(size, batch - start) for start in range(0, batch, size)) or (0,)
        self.rows = {1, *accumulate(shape[batch_dim + 1 : -1], mul)}
        # in the backward, one buffer per argument collects the gradients of its micro-chunks
        self._grads = {}
        for position in places:
            if leaves[position].requires_grad and torch.is_grad_enabled():
                grads = self._grads[position] = _WholeGrad(leaves[position])
                leaves[position] = _Source.apply(leaves[position], grads)

    def micro(self, c: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments by position and by name. The hidden states, and tensors that need a gradient, own their storage."""
        leaves, start, length = list(self._leaves), c * self._size, self.lengths[c]
        for position, (dim, rows) in self._places.items():
            whole, place = self._leaves[position], (dim, start * rows, length * rows)
            if position in self._grads:
                leaves[position] = _Slice.apply(whole, self._grads[position], *place)
            else:
                part = whole.narrow(*place)
                leaves[position] = part.clone() if position == self._hidden else part
        return tree_unflatten(leaves, self._spec)


class Cutter:
    """Cuts the arguments of one module's calls.

    Args:
        config: the settings.
        forward: the module's forward, for the names of its arguments.
        batch_sizes: the batch sizes of a run; they distinguish a wrong `batch_dim` from a short last batch.
    """

    def __init__(self, config: ChunkMBSConfig, forward: Callable, batch_sizes: Sequence[int] = ()) -> None:
        self._config, self._batch_sizes = config, frozenset(batch_sizes)
        self._names = [
            name
            for name, parameter in inspect.signature(forward).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        by_index = [self._names[i] if i < len(self._names) else f"args[{i}]" for i in config.chunk_arg_indexs]
        self._named = (*by_index, *config.chunk_kwarg_names)

    def cut(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CutArguments:
        """Decide on every argument.

        Raises:
            CannotCut: if no batch is found, a named argument has another size, an argument has (or may have) packed
                rows that are not samples, or `batch_dim` is another dimension.
        """
        with_paths, spec = tree_flatten_with_path((args, kwargs))
        roots = [self._root(path) for path, _ in with_paths]
        paths = [self._shown(path) for path, _ in with_paths]
        leaves = [leaf for _, leaf in with_paths]
        hidden = self._find_hidden(roots, leaves)
        batch = leaves[hidden].shape[self._config.batch_dim]
        self._check_batch(paths[hidden], leaves[hidden], batch)
        size = self._config.chunk_mbs
        if batch <= size:
            return CutArguments(leaves, spec, {}, hidden, self._config.batch_dim, max(1, batch))
        places = {}
        for position, (root, path, leaf) in enumerate(zip(roots, paths, leaves, strict=True)):
            place = self._place(root, path, leaf, leaves[hidden])
            if place is not None:
                places[position] = place
            if hasattr(leaf, "get_seq_length"):
                leaves[position] = None  # empty; every micro-chunk would append to it as if it had the next tokens
        whole = [path for p, path in enumerate(paths) if p not in places and isinstance(leaves[p], torch.Tensor)]
        cut = ", ".join(paths[position] for position in places)
        say_once(logging.INFO, f"ChunkMBS cuts {cut}; passed whole: {', '.join(whole) or 'none'}")
        return CutArguments(leaves, spec, places, hidden, self._config.batch_dim, size)

    def _find_hidden(self, roots: list[str], leaves: list[Any]) -> int:
        """The tensor that determines the batch size: the first named one, otherwise the first tensor."""
        for wanted in (*self._named, None):
            for position, (root, leaf) in enumerate(zip(roots, leaves, strict=True)):
                fits = isinstance(leaf, torch.Tensor) and leaf.dim() > self._config.batch_dim
                if fits and (wanted is None or root == wanted):
                    return position
        raise CannotCut(f"no argument is a tensor with a dimension {self._config.batch_dim} (batch_dim)")

    def _check_batch(self, path: str, hidden: torch.Tensor, batch: int) -> None:
        known = self._batch_sizes
        if not known or batch in known or batch < max(known):
            return
        others = [dim for dim, size in enumerate(hidden.shape) if size in known]
        if others:
            raise CannotCut(
                f"features.chunkmbs_plan.batch_dim: {self._config.batch_dim}: {path} is {list(hidden.shape)}, and a "
                f"batch has {' or '.join(map(str, sorted(known)))} samples; set it to {others[0]}"
            )

    def _place(self, root: str, path: str, leaf: Any, hidden: torch.Tensor) -> Place | None:
        """Where to cut a leaf, or None to pass it uncut."""
        self._check_packed(root, path, leaf)
        if not isinstance(leaf, torch.Tensor) or root in self._config.chunk_whole_names:
            return None
        batch, named = hidden.shape[self._config.batch_dim], root in self._named
        if root in _TOKEN_ROWS:
            return self._token_rows(path, leaf, hidden)
        if not named and (not self._config.chunk_infer or root in _NEVER_CUT):
            return None
        dim = _BATCH_DIM_OF.get(root, self._config.batch_dim)
        dim = dim + leaf.dim() if dim < 0 else dim
        fits = 0 <= dim < leaf.dim() and leaf.shape[dim] == batch
        if not named and root not in _BATCH_DIM_OF and leaf is not hidden:
            self._check_rows(path, leaf, hidden, fits)
        if fits:
            return dim, 1
        if not 0 <= dim < leaf.dim() or leaf.shape[dim] == 1:
            return None  # nothing to cut, or the same for every sample
        if named:
            raise CannotCut(
                f"{path}: {list(leaf.shape)}: dimension {dim} must have the batch's {batch} samples, or 1; remove "
                "it from chunk_arg_indexs or chunk_kwarg_names"
            )
        return None

    def _check_packed(self, root: str, path: str, leaf: Any) -> None:
        """Refuse an argument that cannot be cut along the batch, even if its number of rows happens to fit."""
        leave_out = "turn ChunkMBS off (features.enable_chunk_mbs: false)"
        if leaf is not None and PACKED.search(root) or type(leaf).__name__ == "BlockMask":
            raise CannotCut(
                f"{path}: samples packed into one row cannot be cut into micro-chunks; use a batch of samples, or "
                f"{leave_out}"
            )
        if leaf is not None and VISUAL_ROWS.search(root):
            raise CannotCut(
                f"{path}: rows of visual tokens cannot be cut into micro-chunks, because only a mask says which "
                f"sample they belong to; {leave_out}"
            )
        if getattr(leaf, "get_seq_length", int)():
            raise CannotCut(f"{path}: a cache that holds keys and values cannot be cut; set use_cache to false")
        if isinstance(leaf, MutableMapping) and leaf and root not in self._config.chunk_whole_names:
            raise CannotCut(
                f"{path}: {type(leaf).__name__} with {', '.join(map(str, leaf))}: a block would leave only the data of "
                "its last micro-chunk there for other blocks; name it in chunk_whole_names if no block writes to it, "
                f"or {leave_out}"
            )

    def _token_rows(self, path: str, leaf: torch.Tensor, hidden: torch.Tensor) -> Place:
        batch, tokens = hidden.shape[self._config.batch_dim], hidden.shape[:-1].numel()
        if self._config.batch_dim or leaf.dim() == 0 or leaf.shape[0] != tokens:
            raise CannotCut(
                f"{path}: {list(leaf.shape)}: must have one row for each of the {tokens} tokens, sample after sample "
                "(batch_dim: 0); remove the module from chunkmbs_plan.apply_modules"
            )
        return 0, tokens // batch

    def _check_rows(self, path: str, leaf: torch.Tensor, hidden: torch.Tensor, fits: bool) -> None:
        """Refuse a tensor that the config does not name if its rows may be samples, or packed rows.

        A mask or an embedding of samples has the sequence length in addition to the batch. Rows as wide as the hidden
        states are refused even if their number is not the number of samples: in another call it may be.
        """
        between = [size for dim, size in enumerate(hidden.shape[:-1]) if dim != self._config.batch_dim]
        others = [size for dim, size in enumerate(leaf.shape) if dim != self._config.batch_dim]
        wide = leaf.dim() == 2 and leaf.is_floating_point() and leaf.shape[-1] == hidden.shape[-1]
        if between and (wide or fits and not set(between) & set(others)):
            raise CannotCut(
                f"{path}: {list(leaf.shape)}: it is not clear whether its rows are the samples; name it in "
                "chunkmbs_plan.chunk_kwarg_names if they are, in chunk_whole_names if every sample needs all rows, "
                "or turn ChunkMBS off"
            )

    def _root(self, path: tuple) -> str:
        """The name of the argument that a leaf belongs to."""
        group, key = path[0].idx, path[1]
        if group == 1:
            return key.key
        return self._names[key.idx] if key.idx < len(self._names) else f"args[{key.idx}]"

    def _shown(self, path: tuple) -> str:
        return self._root(path) + keystr(path[2:])


class Joined:
    """The output of a block, joined while its micro-chunks run: one buffer per tensor, each part written once."""

    def __init__(self, cut: CutArguments, batch_dim: int) -> None:
        self._cut, self._dim = cut, batch_dim
        self._spec: TreeSpec
        self._leaves: list[Any] = []
        self._next = 0

    def add(self, output: Any) -> None:
        """The output of the next micro-chunk.

        Raises:
            CannotCut: for an output without a batch, or with another structure or shape than the first.
        """
        length = self._cut.lengths[self._next]
        parts, spec = tree_flatten(output)
        if self._next == 0:
            self._spec = spec
            self._leaves = [self._buffer(part, length) for part in parts]
        elif spec != self._spec:
            raise CannotCut(
                f"a micro-chunk's output is {_described(spec)}, expected {_described(self._spec)} as in the first one"
            )
        start = self._next * self._cut.lengths[0]
        for position, (whole, part) in enumerate(zip(self._leaves, parts, strict=True)):
            if isinstance(part, torch.Tensor) and isinstance(whole, torch.Tensor):
                rows = whole.shape[self._dim] // self._cut.batch  # per sample
                self._check(whole, part, length * rows)
                self._leaves[position] = _Write.apply(whole, part, self._dim, start * rows)
            elif not _equal(part, whole):
                raise CannotCut(f"outputs of two micro-chunks differ: {_described(whole)} and {_described(part)}")
        self._next += 1

    def whole(self) -> Any:
        return tree_unflatten(self._leaves, self._spec)

    def _buffer(self, part: Any, length: int) -> Any:
        if not isinstance(part, torch.Tensor):
            return part
        shape = list(part.shape)
        if len(shape) <= self._dim or shape[self._dim] not in {length * rows for rows in self._cut.rows}:
            raise CannotCut(
                f"an output of shape {shape} has no batch of {length} samples on dimension {self._dim}, so outputs of "
                "micro-chunks cannot be joined; remove the module from chunkmbs_plan.apply_modules"
            )
        shape[self._dim] = shape[self._dim] // length * self._cut.batch
        return part.new_empty(shape)

    def _check(self, whole: torch.Tensor, part: torch.Tensor, size: int) -> None:
        """Needed because a copy would cast and broadcast a part that does not fit."""
        shape = list(whole.shape)
        shape[self._dim] = size
        if list(part.shape) != shape or part.dtype != whole.dtype:
            raise CannotCut(
                f"an output of shape {list(part.shape)} ({part.dtype}), expected {shape} ({whole.dtype}) as in the "
                "first micro-chunk"
            )


def _equal(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except Exception:  # an object with tensors may not support ==
        return False


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "a tensor"
    return shown(value)


def pair_up(parts: Sequence[Sequence[torch.Tensor | None]]) -> Iterator[torch.Tensor | None]:
    """Joins what hooks recorded for each micro-chunk, as for the whole batch: `[b * S, ...]` to `[B * S, ...]`."""
    for same in zip(*parts, strict=True):
        yield None if all(part is None for part in same) else torch.cat(same)


class _WholeGrad:
    """Collects the gradients of slices of one tensor, in any order; some may be missing."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._shape = tensor.shape
        self._whole: torch.Tensor | None = None

    def write(self, grad: torch.Tensor, place: tuple[int, int, int]) -> None:
        if self._whole is None:
            self._whole = grad.new_zeros(self._shape)
        self._whole.narrow(*place).copy_(grad)

    def take(self) -> torch.Tensor | None:
        whole, self._whole = self._whole, None
        return whole


class _Source(torch.autograd.Function):
    """The tensor that is cut. Its gradient is what its slices have written; the slices themselves pass none on."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, grads: _WholeGrad) -> torch.Tensor:
        ctx.grads = grads
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor)

    @staticmethod
    @untraced
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.grads.take(), None


class _Slice(torch.autograd.Function):
    """A copy of a slice. Plain slicing would make a gradient of the whole tensor's size for every slice."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, grads: _WholeGrad, dim: int, start: int, length: int) -> torch.Tensor:
        ctx.grads, ctx.place = grads, (dim, start, length)
        return whole.narrow(dim, start, length).clone()

    @staticmethod
    @untraced
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.grads.write(grad, ctx.place)
        return None, None, None, None, None


class _Write(torch.autograd.Function):
    """Writes a part into its place in the whole. A `cat` at the end would keep every part until then."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, part: torch.Tensor, dim: int, start: int) -> torch.Tensor:
        ctx.place = (dim, start, part.shape[dim])
        whole.narrow(*ctx.place).copy_(part)
        ctx.mark_dirty(whole)
        return whole

    @staticmethod
    @untraced
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad if ctx.needs_input_grad[0] else None, grad.narrow(*ctx.place), None, None
