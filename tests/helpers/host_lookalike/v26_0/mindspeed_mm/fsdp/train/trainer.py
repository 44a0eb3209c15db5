"""The script that a user starts, run as `__main__`."""

import torch  # noqa: F401  as the host does, before its own modules
from mindspeed_mm.fsdp.params.argument import Arguments, parse_args
from mindspeed_mm.fsdp.train.train_engine import Trainer

if __name__ == "__main__":
    args = parse_args(Arguments)
    Trainer(args=args).train()
