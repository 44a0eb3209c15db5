"""Logging, as the host's trainer sets it up: everything from INFO on to stdout."""

import logging
import os
import sys


def set_log_level(level="INFO"):
    logging.basicConfig(
        level=level, stream=sys.stdout, format=f"[Rank {os.getenv('RANK', 0)}] %(levelname)s %(message)s", force=True
    )


def print_rank(log, message):
    if os.environ.get("RANK", "0") == "0":
        log(message)
