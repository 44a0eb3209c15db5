"""The commands' argument parser."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Keeps the lines of a description, and says in one line what is wrong with a command: exit code 2."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **keywords})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {' '.join(message.split())}; {self.prog} --help tells the options\n")
