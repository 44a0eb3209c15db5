"""`torchrun -m mindspeed_chunk.standalone CONFIG.yaml [key.path=value ...]`; without torchrun, one rank.

All faults in the input are found before the first collective, in the same way by every rank. So no rank waits for a
rank that has ended.
"""

import argparse
import os
import sys
import time

from mindspeed_chunk.command import run, variable
from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.standalone.config import load_config

GRACE_S = 5


def main(argv: list[str] | None = None) -> int:
    """Train as the yaml says. Returns the exit code: 0, or 2 after a user's error, reported in one line."""
    parser = argparse.ArgumentParser(prog="python -m mindspeed_chunk.standalone", description=__doc__)
    parser.add_argument("config", metavar="CONFIG.yaml", help="a yaml of MindSpeed-MM")
    parser.add_argument("overrides", metavar="key.path=value", nargs="*", help="set a key, as in training.lr=1e-3")
    arguments = parser.parse_args(argv)
    try:
        rank, world_size = _ranks()
        config, warnings = load_config(arguments.config, arguments.overrides, world_size)

        from mindspeed_chunk.standalone.prepare import open_metrics, prepare  # seconds, for transformers

        prepared = prepare(config)
        _check_meeting()
        metrics = open_metrics(config) if rank == 0 else None
    except ConfigError as error:
        # A machine's first rank reports it; torchrun stops the others, which have the same error, while they wait. A
        # rank that fails alone reports it after the wait.
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(GRACE_S)
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    for warning in warnings if rank == 0 else ():
        print(f"warning: {warning}", file=sys.stderr, flush=True)

    import torch.distributed as dist

    from mindspeed_chunk import consistency
    from mindspeed_chunk.dist import destroy
    from mindspeed_chunk.standalone.train import Trainer

    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        consistency.check(config.shared(), wait=True)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        destroy()
        return 2
    if metrics and config.metrics_path and config.metrics_path.is_file():
        metrics.truncate(0)
    Trainer(prepared).train(metrics)
    destroy()
    return 0


def _ranks() -> tuple[int, int]:
    """This process's rank, and the number of ranks, as torchrun sets them. Raises ConfigError."""
    rank, size = variable("RANK", 0), variable("WORLD_SIZE", 1)
    if "RANK" in os.environ and "WORLD_SIZE" not in os.environ:
        raise _lacking("WORLD_SIZE")
    if rank >= size:
        rule = f"must be below WORLD_SIZE, {size}"
        raise ConfigError.about("environment variable RANK", rank, rule, "start with torchrun")
    if "RANK" not in os.environ and size != 1:
        rule = "is set, but RANK is not"
        raise ConfigError.about("environment variable WORLD_SIZE", size, rule, "start with torchrun, or unset it")
    return rank, size


def _check_meeting() -> None:
    """Raises ConfigError if a rank has no address of the others."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if "RANK" in os.environ and name not in os.environ:
            raise _lacking(name)


def _lacking(name: str) -> ConfigError:
    return ConfigError(f"environment variable {name}: is not set, but RANK is; start with torchrun")


if __name__ == "__main__":
    sys.exit(run(main))
