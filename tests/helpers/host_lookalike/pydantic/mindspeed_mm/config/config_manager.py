"""Reads the yaml and `key=value` arguments into the sections; whatever goes wrong becomes one kind of error."""

import sys

import yaml
from mindspeed_mm.config.exception import ConfigValidationError
from mindspeed_mm.fsdp.params.argument import Arguments


class ConfigManager:
    def __init__(self, config_class=Arguments):
        self.config_class = config_class

    def load_and_parse(self):
        try:
            with open(sys.argv[1], encoding="utf-8") as file:
                config = yaml.safe_load(file)
            for argument in sys.argv[2:]:
                path, _, value = argument.partition("=")
                *parents, key = path.split(".")
                section = config
                for parent in parents:
                    section = section.setdefault(parent, {})
                section[key] = yaml.safe_load(value)
            return self.config_class(**config)
        except Exception as error:
            print(f"[ERROR] Configuration loading failed: {error}", flush=True)
            raise ConfigValidationError("Configuration loading failed") from error
