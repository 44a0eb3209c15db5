"""What a step does, seen from below: bytes alive on the "device", and collectives with their bytes.

Both watch torch's dispatcher, so nothing that is watched needs to know. On a CPU autograd runs in the thread that calls
it, which is the thread that is watched.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindspeed_chunk.observe import Event

GATHER, REDUCE_SCATTER = "gather", "reduce-scatter"
_KINDS = {"_allgather_base_": GATHER, "_reduce_scatter_base_": REDUCE_SCATTER}


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that came into being while this was active, and that are still alive.

    Attributes:
        now, peak: bytes. `peak` may be set back to `now`.
        curve: (`time.perf_counter()`, bytes alive) at each change.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.curve: list[tuple[float, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta and _address(leaf) not in given:
                storage = leaf.untyped_storage()
                self._change(storage.nbytes())
                weakref.finalize(storage, self._change, -storage.nbytes()).atexit = False
        return result

    def _change(self, nbytes: int) -> None:
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        self.curve.append((time.perf_counter(), self.now))


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Collectives(TorchDispatchMode):
    """Counts FSDP2's parameter gathers and gradient reduce-scatters, by the size of their group.

    Attributes:
        calls, nbytes: by ("gather" or "reduce-scatter", ranks of the group); bytes of the whole tensor on this rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, int]] = Counter()
        self.nbytes: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _KINDS.get(func._overloadpacket.__name__) if func.namespace == "c10d" else None
        if kind is not None and args[0].is_floating_point():  # plans and agreements are integers
            output, source = args[0], args[1]
            ranks = dist.ProcessGroup.unbox(args[2]).size()
            self.calls[kind, ranks] += 1
            self.nbytes[kind, ranks] += (output if kind == GATHER else source).nbytes
        return func(*args, **(kwargs or {}))


def sent_to_others(events: Iterable[Event]) -> int:
    """Bytes of rows that this rank sends to others in the all-to-alls among the events."""
    rank = dist.get_rank()
    details = [event.detail for event in events if event.kind == "all_to_all"]
    return sum((sum(each["send"]) - each["send"][rank]) * each["row_bytes"] for each in details)
