"""Runs a block's batch as micro-chunks, one after the other, inside the one call that FSDP2 sees.

FSDP2's hooks run in a module's `__call__`. Only `forward` is replaced here, so parameters are gathered once per
direction for the whole batch. The wrappers of a block have one order, from the inside: recompute, offload, then
micro-chunks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_chunk.config import ChunkMBSConfig, ConfigError
from mindspeed_chunk.device import HostCopy, untraced
from mindspeed_chunk.dist import all_gather
from mindspeed_chunk.mbs.arguments import CannotCut, CutArguments, Cutter, Joined, pair_up
from mindspeed_chunk.mbs.checks import BLOCKS
from mindspeed_chunk.observe import emit

Forward = Callable[..., Any]
# The lists to which forward hooks append now, one entry per call of the hooked module.
SideOutputs = Callable[[], Iterable[list]]


class ChunkMBS:
    """The micro-chunks of one model's blocks.

    Args:
        config: the settings, the same on every rank.
        batch_sizes: the batch sizes of a run (training, validation); the last batch may be shorter.
        group: the ranks that must run the same number of micro-chunks, because they share every block's collectives;
            None for a single process.
        side_outputs: values that hooks record inside a block are returned once per block, in the order of the batch.
    """

    def __init__(
        self,
        config: ChunkMBSConfig,
        *,
        batch_sizes: Sequence[int] = (),
        group: dist.ProcessGroup | None = None,
        side_outputs: Sequence[SideOutputs] = (),
    ) -> None:
        self.config = config
        self._batch_sizes, self._group, self._side_outputs = tuple(batch_sizes), group, tuple(side_outputs)
        self._first: str | None = None

    def wrap(self, name: str, forward: Forward, signature: Callable) -> Forward:
        """A function of the whole batch that runs `forward` on micro-chunks. Wrap blocks in the order of their calls.

        Args:
            signature: the module's own forward, whose argument names determine what is cut.
        """
        cutter = Cutter(self.config, signature, self._batch_sizes)
        if self._first is None:
            self._first = name

        @untraced
        @functools.wraps(forward)
        def chunked(*args: Any, **kwargs: Any) -> Any:
            cut = self._cut(name, cutter, args, kwargs)
            if len(cut.lengths) == 1:
                return forward(*args, **kwargs)
            return self._run(name, forward, cut)

        return chunked

    def _cut(self, name: str, cutter: Cutter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CutArguments:
        """Cut. At the first block of a pass, ranks compare their numbers of micro-chunks before any of them runs."""
        outcome: CutArguments | CannotCut
        try:
            outcome = cutter.cut(args, kwargs)
        except CannotCut as problem:
            outcome = CannotCut(f"ChunkMBS, {name}: {problem}")
        if name == self._first and self._group is not None:
            device = next((a.device for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), None)
            self._agree(name, len(outcome.lengths) if isinstance(outcome, CutArguments) else -1, device, self._group)
        if isinstance(outcome, CannotCut):
            raise outcome
        return outcome

    def _agree(self, name: str, number: int, device: torch.device | None, group: dist.ProcessGroup) -> None:
        local = torch.full((1,), number, dtype=torch.int64, device=device)
        gathered, work = all_gather(local, group, "micro-chunks")
        work.wait()
        numbers = HostCopy(gathered, "micro-chunks").wait().flatten().tolist()
        if number >= 0 and len(set(numbers)) > 1:
            ranks = dist.get_process_group_ranks(group)
            by_rank = ", ".join(f"{n if n >= 0 else 'an error'} on rank {rank}" for rank, n in zip(ranks, numbers))
            raise CannotCut(
                f"ChunkMBS, {name}: every rank must run the same number of micro-chunks, but there are {by_rank}; give "
                "every rank the same batch size (data.dataloader_param.drop_last: true)"
            )

    def _run(self, name: str, forward: Forward, cut: CutArguments) -> Any:
        joined, recorded = Joined(cut, self.config.batch_dim), _Recorded(name, self._side_outputs)
        for c in range(len(cut.lengths)):
            emit("micro_chunk", name, index=c, of=len(cut.lengths))
            args, kwargs = cut.micro(c)
            output = forward(*args, **kwargs)
            try:
                joined.add(output)
            except CannotCut as problem:
                raise CannotCut(f"ChunkMBS, {name}: {problem}") from None
            del args, kwargs, output
            recorded.next()
        recorded.close()
        return joined.whole()


class _Recorded:
    """Merges what hooks recorded for each micro-chunk into what they would record for the whole batch."""

    def __init__(self, name: str, side_outputs: Sequence[SideOutputs]) -> None:
        self._name = name
        self._lists = [one for lists in side_outputs for one in lists()]
        self._starts = [len(one) for one in self._lists]
        self._parts: list[list[list[torch.Tensor]]] = [[] for _ in self._lists]

    def next(self) -> None:
        for one, start, parts in zip(self._lists, self._starts, self._parts, strict=True):
            parts.append(one[start:])
            del one[start:]

    def close(self) -> None:
        for one, parts in zip(self._lists, self._parts, strict=True):
            counts = [len(part) for part in parts]
            if len(set(counts)) > 1:
                raise CannotCut(
                    f"ChunkMBS, {self._name}: hooks recorded {counts} outputs in its micro-chunks; to join them, the "
                    "numbers must be equal; remove the module from chunkmbs_plan.apply_modules"
                )
            one.extend(pair_up(parts))


def transformers_outputs() -> Iterable[list]:
    """The lists to which transformers' own output capturing (`output_router_logits` and the like) now appends."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:  # before transformers 5.2 there is none
        return ()
    return [one for one in (_active_collector.get() or {}).values() if isinstance(one, list)]


def check_order(recompute: Iterable[str], offload: Iterable[str], chunk: Iterable[str]) -> None:
    """Check module names: a block in `chunk` must be, or contain, a module of `recompute` and of `offload`, if any.

    Raises:
        ConfigError: naming the blocks that are not, or that are inside one another or inside a recomputed or offloaded
            module, which would then see the whole batch.
    """
    chunk = list(chunk)

    def refuse(wrong: list[str], rule: str, way_out: str) -> None:
        if wrong:  # all of them: the user has to correct the whole list
            raise ConfigError(f"{BLOCKS}: {', '.join(wrong)}: {rule}; {way_out}", BLOCKS)

    def inside(modules: Iterable[str]) -> list[str]:
        return [name for name in chunk if any(name.startswith(f"{outer}.") for outer in modules)]

    refuse(inside(chunk), "inside other modules of the list", "remove one of them")
    for key, modules in (("recompute_plan", list(recompute)), ("activation_offload_plan", list(offload))):
        other = f"features.{key}.apply_modules"
        refuse(inside(modules), f"inside modules of {other}, which would get the whole batch", "name the same ones")
        held = [name for name in chunk if any(inner == name or inner.startswith(f"{name}.") for inner in modules)]
        if modules:
            missing = [name for name in chunk if name not in held]
            refuse(missing, f"not in {other}", "add them there, or turn that feature off")


def wrap_blocks(
    recompute: Mapping[str, nn.Module],
    offload: Mapping[str, nn.Module],
    chunk: Mapping[str, nn.Module],
    *,
    recomputed: Callable[[str, nn.Module], Forward],
    offloaded: Callable[[str, nn.Module], Forward],
    chunked: Callable[[str, Forward, Callable], Forward],
) -> None:
    """Wrap modules' forwards, by name, in the one order that works; only this function knows it.

    A recompute repeats the code inside it, and an offload sends tensors that are saved inside it. Both must see
    micro-chunks and not the batch, so both must be inside the loop over micro-chunks.
    """
    own = {name: module.forward for name, module in chunk.items()}
    for name, module in recompute.items():
        module.forward = recomputed(name, module)
    for name, module in offload.items():
        module.forward = offloaded(name, module)
    for name, module in chunk.items():
        module.forward = chunked(name, module.forward, own[name])
