"""The script that a user starts, run as `__main__`."""

import torch  # noqa: F401  as the host does, before its own modules
from mindspeed_mm.config.config_manager import ConfigManager
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.train.train_engine import Trainer

if __name__ == "__main__":
    arguments = ConfigManager(config_class=Arguments).load_and_parse()
    Trainer(args=arguments).train()
