"""Collectives of an expert-parallel group, and the agreement of its ranks.

Everything here is launched in program order on every rank. An error that one rank finds is sent to the others in a
collective in which all of them take part: if a rank alone raises, the others hang.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from mindspeed_chunk.observe import emit

# torch 2.13 deprecates the old name in favour of the new one; 2.7 has only the old.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_AGREEMENT_BYTES = 2048
# Over gloo a large message takes longer than the link needs for its bytes; a few smaller ones do not.
GLOO_PIECE_BYTES = 2**20
_MOST_PIECES = 16


class Work(Protocol):
    def wait(self) -> object: ...


class _Done:
    def wait(self) -> None:
        return None


DONE: Work = _Done()


def group_size(group: dist.ProcessGroup | None) -> int:
    """Number of ranks in `group`; no group means this rank alone, not the world."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def default_store() -> dist.Store:
    """The key-value store of the default process group. No version of torch has a public name for it."""
    return dist.distributed_c10d._get_default_store()


def all_gather(local: torch.Tensor, group: dist.ProcessGroup | None, name: str) -> tuple[torch.Tensor, Work]:
    """Launch a gather of contiguous tensors of one size `[n]`; the result is `[ranks, n]`, readable after `wait()`."""
    if group_size(group) == 1:
        return local.view(1, -1), DONE
    gathered = local.new_empty(group_size(group) * local.numel())  # gloo needs it flat
    emit("all_gather", name, elements=local.numel())
    work = getattr(dist, _ALL_GATHER)(gathered, local.view(-1), group=group, async_op=True)
    return gathered.view(group_size(group), -1), work


def all_reduce_max(value: torch.Tensor, group: dist.ProcessGroup | None, name: str) -> torch.Tensor:
    """The element-wise largest of an integer tensor over the group, in place."""
    if group_size(group) > 1:
        emit("all_reduce", name, elements=value.numel())
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return value


def all_to_all(
    rows: torch.Tensor,
    send_splits: Sequence[int],
    recv_splits: Sequence[int],
    group: dist.ProcessGroup | None,
    name: str,
    padding_rows: int = 0,
    max_split: int = 0,
) -> tuple[torch.Tensor, Work]:
    """Launch an exchange of rows: `send_splits[p]` of them to rank p, `recv_splits[p]` from it.

    Args:
        rows: `[sum(send_splits), width]`, contiguous. The caller keeps it, unchanged, until `wait()`.
        padding_rows: number of zero rows at the end of the result, after those that arrive.
        max_split: the largest number of rows that any rank sends to another one, the same on every rank. Over gloo,
            messages of more than `GLOO_PIECE_BYTES` are then sent in pieces of that size, but in at most 16.

    Returns:
        The received rows `[sum(recv_splits) + padding_rows, width]`, readable after the work's `wait()`, and the work.
        Without peers this is `rows` itself, unless there are padding rows or `rows` is a part of a larger buffer, which
        it would keep alive.
    """
    num_received = sum(recv_splits)
    if group_size(group) == 1 and padding_rows == 0 and rows.untyped_storage().nbytes() == rows.nbytes:
        return rows, DONE
    received = rows.new_empty((num_received + padding_rows, *rows.shape[1:]))
    if padding_rows:
        received[num_received:].zero_()
    if group_size(group) == 1:
        received[:num_received].copy_(rows)
        return received, DONE
    emit("all_to_all", name, send=tuple(send_splits), recv=tuple(recv_splits), row_bytes=row_bytes(rows))
    arriving, send_splits, recv_splits = received[:num_received], list(send_splits), list(recv_splits)
    pieces = min(_MOST_PIECES, -(-max_split * row_bytes(rows) // GLOO_PIECE_BYTES))
    if pieces > 1 and rows.device.type == "cpu" and "gloo" in dist.get_backend(group):
        return received, _exchange_in_pieces(arriving, rows, recv_splits, send_splits, pieces, group)
    return received, dist.all_to_all_single(arriving, rows, recv_splits, send_splits, group=group, async_op=True)


class _All:
    """A work that is done when all of several works are done."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []


def _exchange_in_pieces(
    arriving: torch.Tensor,
    rows: torch.Tensor,
    recv_splits: list[int],
    send_splits: list[int],
    pieces: int,
    group: dist.ProcessGroup | None,
) -> Work:
    """One exchange as several, each between a pair of ranks, in the same buffers: no row is copied for it."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    arrives, leaves, works = arriving.split(recv_splits), rows.split(send_splits), []
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        for here, there in zip(arrives[source].tensor_split(pieces), leaves[to].tensor_split(pieces), strict=True):
            received, sent = [0] * size, [0] * size
            received[source], sent[to] = here.shape[0], there.shape[0]
            works.append(dist.all_to_all_single(here, there, received, sent, group=group, async_op=True))
    arrives[rank].copy_(leaves[rank])
    return _All(works)


def row_bytes(rows: torch.Tensor) -> int:
    return rows.shape[1] * rows.element_size()


def check_all_to_all(group: dist.ProcessGroup | None, device: torch.device) -> str | None:
    """Send known rows there and back with uneven splits, some of them zero. Some stacks report success, but send zeros.

    Returns:
        The fault, which `agree` then reports to all ranks, or None.
    """
    size, rank = group_size(group), group_rank(group)
    sent_to = [(rank + peer) % 3 for peer in range(size)]
    labels = [rank * size + peer for peer in range(size) for _ in range(sent_to[peer])]
    rows = torch.tensor(labels, dtype=torch.float32, device=device).view(-1, 1)
    # (rank + peer) % 3 is symmetric: what a rank sends to a peer is what it receives from it
    there, work = all_to_all(rows, sent_to, sent_to, group, "self-test")
    work.wait()
    back, work = all_to_all(there, sent_to, sent_to, group, "self-test")
    work.wait()
    expected = [peer * size + rank for peer in range(size) for _ in range(sent_to[peer])]
    if there.flatten().tolist() != expected or back.flatten().tolist() != labels:
        return "all_to_all_single moved the wrong rows in the start-up check (uneven splits, some zero)"
    return None


def agree(
    fields: Mapping[str, object], error: str | None, group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Compare `fields` over the group; a mismatch, or an error of any rank, raises the same message on all ranks.

    The texts are gathered in buffers of fixed size, because a gather of unequal sizes aborts on gloo.

    Raises:
        ValueError: naming each differing field with its value on each rank, or the ranks with errors and the errors.
    """
    lines = [f"error={error}"] if error else [f"{key}={value}" for key, value in fields.items()]
    text = "\n".join(lines).encode()[:_AGREEMENT_BYTES]
    local = torch.zeros(_AGREEMENT_BYTES, dtype=torch.uint8)
    local[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    gathered, work = all_gather(local.to(device), group, "agreement")
    work.wait()
    texts = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in gathered.cpu()]
    ranks = [0] if group is None else dist.get_process_group_ranks(group)
    by_rank = {
        rank: dict(line.partition("=")[::2] for line in text.split("\n"))
        for rank, text in zip(ranks, texts, strict=True)
    }

    errors = {rank: values["error"] for rank, values in by_rank.items() if "error" in values}
    if errors:
        raise ValueError("; ".join(f"rank {rank}: {message}" for rank, message in errors.items()))
    differing = [key for key in fields if len({values.get(key) for values in by_rank.values()}) > 1]
    if differing:
        differences = "; ".join(
            f"{key}: " + ", ".join(f"{values.get(key)} on rank {rank}" for rank, values in by_rank.items())
            for key in differing
        )
        raise ValueError(
            f"the ranks of an expert-parallel group must agree on every setting of Chunk MoE, but {differences}"
        )


def destroy() -> None:
    """Leave all process groups, after gloo's threads have released their tensors.

    On torch 2.7 a thread that has just finished an exchange may hold the last reference to its tensors. It needs the
    interpreter's lock to release them, but a destructor that holds this lock joins it: a hang at exit (seen with 4
    ranks on 2 cores). There is no event to wait for, so the function sleeps for a moment.
    """
    time.sleep(0.1)
    dist.destroy_process_group()
