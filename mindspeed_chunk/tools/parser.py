"""The commands' argument parser."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, NoReturn

from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.wording import one_line


class Parser(argparse.ArgumentParser):
    """Keeps the lines of a description, and reports a wrong command in one line, with exit code 2."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **keywords})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {one_line(' '.join(message.split()))}; {self.prog} --help lists the options\n")


def check_range(options: argparse.Namespace, limits: Mapping[str, tuple[float, float]]) -> None:
    """Raise ConfigError for the first option whose value is not between its two limits, both allowed.

    Args:
        limits: by the option's name in `options`; an option that is None has no value.
    """
    for name, (smallest, largest) in limits.items():
        value = getattr(options, name)
        if value is not None and not smallest <= value <= largest:  # neither is nan
            rule = f"must be at least {smallest} and at most {largest}"
            raise ConfigError.about(f"--{name.replace('_', '-')}", value, rule, "correct it")
