"""`torchrun -m mindspeed_chunk.standalone CONFIG.yaml [key.path=value ...]`; without torchrun, one rank.

Everything that can be wrong with the input is found before the first collective, by every rank alike, so that no rank
waits for another that has given up.
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
    """Train as the yaml says. Returns the exit code: 0, or 2 after a user's error, told in one line."""
    parser = argparse.ArgumentParser(prog="python -m mindspeed_chunk.standalone", description=__doc__)
    parser.add_argument("config", metavar="CONFIG.yaml", help="a yaml of MindSpeed-MM's")
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
        # A machine's first rank tells it; the others, which see the same, are stopped by torchrun while they wait.
        # A rank that fails alone tells it after the wait.
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
    """This process's rank, and how many there are, as torchrun tells them. Raises ConfigError."""
    rank, size = variable("RANK", 0), variable("WORLD_SIZE", 1)
    if "RANK" in os.environ and "WORLD_SIZE" not in os.environ:
        raise _lacking("WORLD_SIZE")
    if rank >= size:
        rule = f"must be below WORLD_SIZE, {size}"
        raise ConfigError.about("environment variable RANK", rank, rule, "start with torchrun")
    if "RANK" not in os.environ and size != 1:
        rule = "is set, and RANK is not"
        raise ConfigError.about("environment variable WORLD_SIZE", size, rule, "start with torchrun, or unset it")
    return rank, size


def _check_meeting() -> None:
    """Raises ConfigError where a rank is not told where the others are."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if "RANK" in os.environ and name not in os.environ:
            raise _lacking(name)


def _lacking(name: str) -> ConfigError:
    return ConfigError(f"environment variable {name}: is not set, and RANK is; start with torchrun")


if __name__ == "__main__":
    sys.exit(run(main))
