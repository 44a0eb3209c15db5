"""The all-to-all between the devices of one machine: do rows arrive, and at which rate.

    torchrun --standalone --nproc_per_node 8 ci/wire_check.py --device npu --out FOLDER

First the check that every training run makes at start, then rows of a real layer's width through uneven splits, some of
them zero, there and back, bit for bit. Rank 0 prints one table and writes FOLDER/wire.json; any failure ends all ranks.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from mindspeed_chunk.dist import agree, all_to_all, check_all_to_all, destroy

BACKENDS = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}
WIDTH = 2048
ROUNDS = 5


def uneven(rank: int, peer: int, rows: int) -> int:
    """Rows that `rank` sends to `peer`: symmetric, nothing for some pairs, a different number for the others."""
    return (rank + peer) % 3 * rows // 2


def exchange(rank: int, size: int, rows: int, device: torch.device) -> dict[str, float]:
    """Send rows there and back; raises ValueError on every rank if one of them is not what was sent."""
    splits = [uneven(rank, peer, rows) for peer in range(size)]
    # each row says in its first columns where it comes from; bf16 holds integers up to 256
    sent = torch.randn(sum(splits), WIDTH, device=device).to(torch.bfloat16)
    sent[:, 0] = rank
    seconds, error = [], None
    for _ in range(ROUNDS):
        synchronize(device)
        start = time.perf_counter()
        there, work = all_to_all(sent, splits, splits, dist.group.WORLD, "there")
        work.wait()
        back, work = all_to_all(there, splits, splits, dist.group.WORLD, "back")
        work.wait()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
        senders = torch.repeat_interleave(torch.arange(size), torch.tensor(splits)).to(device, torch.bfloat16)
        if not torch.equal(back, sent) or not torch.equal(there[:, 0], senders):
            error = f"rows of {WIDTH} bf16 columns, {splits} of them, did not arrive as they were sent"
    agree({"rows": rows}, error, dist.group.WORLD, device)
    megabytes = 2 * (sum(splits) - splits[rank]) * WIDTH * 2 / 1e6
    return {"rows": sum(splits), "MB sent": round(megabytes, 1), "ms": round(1e3 * sorted(seconds)[ROUNDS // 2], 3)}


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=sorted(BACKENDS), required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.device == "npu":
        import torch_npu  # noqa: F401
    device = torch.device(arguments.device)
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
        torch.get_device_module(device).set_device(device)
    dist.init_process_group(BACKENDS[device.type])
    rank, size = dist.get_rank(), dist.get_world_size()

    agree({"ranks": size}, check_all_to_all(dist.group.WORLD, device), dist.group.WORLD, device)
    measured = exchange(rank, size, 4096 if device.type != "cpu" else 64, device)
    by_rank: list[dict] = [{}] * size
    dist.all_gather_object(by_rank, measured)
    if rank == 0:
        report(by_rank, arguments.device, arguments.out)
    destroy()


def report(by_rank: list[dict], device: str, out: Path) -> None:
    print(f"all-to-all over {BACKENDS[device]}, {len(by_rank)} ranks, there and back: every row arrived")
    print("rank     rows   MB sent         ms")
    for rank, told in enumerate(by_rank):
        print(f"{rank:>4} {told['rows']:>8} {told['MB sent']:>9} {told['ms']:>10}")
    out.mkdir(parents=True, exist_ok=True)
    record = {"backend": BACKENDS[device], "torch": torch.__version__, "width": WIDTH, "by_rank": by_rank}
    (out / "wire.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
