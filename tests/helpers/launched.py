"""Functions that tests/test_launcher.py runs on ranks."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy
import torch
import torch.distributed as dist

from zygote import alive


def add(rank, world_size, value, *, scale=1):
    tensor = torch.full((3,), float(value + rank)) * scale
    dist.all_reduce(tensor)
    return tensor


def surroundings(rank, world_size):
    """What a process is given, as far as a function can tell."""
    return {
        "environment": dict(os.environ),
        "path": sys.path,
        "folder": os.getcwd(),
        "leads its group": os.getpgid(0) == os.getpid(),
        "descriptors": [Path(os.readlink(f"/proc/self/fd/{n}")).name.split(":")[0] for n in range(3)],
        "python's threads": len(threading.enumerate()),
        "signals": {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)},
        "threads": torch.get_num_threads(),
        "nan": bool(torch.empty(5).isnan().all()),
        "size": dist.get_world_size(),
    }


def chance(rank, world_size):
    return hash("text"), random.random(), torch.rand(1).item(), numpy.random.rand()


def kill_the_zygote(rank, world_size, folder, pid):
    Path(folder, str(rank)).write_text(str(os.getpid()))
    dist.barrier()
    if rank == 0:
        os.kill(pid, signal.SIGKILL)
    time.sleep(60)


def tell_and_exit(code):
    """No function of a rank: what a zygote calls."""
    print("told")
    print("told, too", file=sys.stderr)
    sys.exit(code)


def raise_on(rank, world_size, culprit):
    if rank == culprit:
        print("about to raise", flush=True)
        raise RuntimeError(f"rank {rank} gives up")
    dist.barrier()


def raise_everywhere(rank, world_size):
    """The last rank first; each one when the next one has ended."""
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    while rank + 1 < world_size and alive(pids[rank + 1].item()):
        time.sleep(0.02)
    raise ValueError(f"no good on {rank}")


def die_on(rank, world_size, culprit):
    if rank == culprit:
        os.kill(os.getpid(), 9)
    dist.barrier()


def leave(rank, world_size):
    os._exit(0)


def sleep_forever(rank, world_size, folder):
    (folder / str(os.getpid())).touch()
    time.sleep(10_000)


def hang_in_collective(rank, world_size):
    if rank == 0:
        dist.all_reduce(torch.ones(1))
    else:
        time.sleep(10_000)


def raise_while_other_sleeps(rank, world_size):
    dist.barrier()
    if rank == 1:
        raise RuntimeError("first")
    time.sleep(10_000)


def unpicklable(rank, world_size):
    return lambda: None


def start_a_sleeper(rank, world_size):
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10000)"])
    return os.getpid(), sleeper.pid


def misbehave(rank, world_size, how):
    """For tests/test_soak.py: rank 1 does not do what the others do."""
    if rank == 1 and how == "raise":
        raise RuntimeError("rank 1 gives up")
    if rank == 1 and how == "hang":
        time.sleep(10_000)
    dist.barrier()
    return rank
