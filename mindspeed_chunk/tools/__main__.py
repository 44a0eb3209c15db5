"""The command line: `mindspeed-chunk COMMAND`, or `python -m mindspeed_chunk.tools COMMAND`."""

import argparse
import importlib
import signal
import sys

import mindspeed_chunk
from mindspeed_chunk.command import run
from mindspeed_chunk.tools.parser import Parser

COMMANDS = {
    "doctor": "what is installed, and whether Chunk MoE can run in MindSpeed-MM here",
    "lint": "what is wrong, risky or wasteful in a MindSpeed-MM yaml",
    "bench": "measures time and memory of one MoE layer on ranks of this machine",
    "trace": "shows one MoE layer call as a timeline",
    "plan": "chooses the numbers of a run: layout, chunks, memory, time",
}


def main() -> int:
    try:
        return run(_main)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _main() -> int:
    listing = "\n".join(f"  {name:<8}{what}" for name, what in COMMANDS.items())
    parser = Parser(
        prog="mindspeed-chunk",
        usage="mindspeed-chunk [--version] COMMAND [OPTIONS]",
        epilog=f"commands:\n{listing}\n\nmindspeed-chunk COMMAND --help lists a command's options.",
    )
    parser.add_argument("--version", action="version", version=f"mindspeed_chunk {mindspeed_chunk.__version__}")
    parser.add_argument("command", choices=COMMANDS, nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("options", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.command is None:
        parser.error(f"give a command: {', '.join(COMMANDS)}")
    sys.argv = [sys.argv[0], *chosen.options]
    # imported only when it is used: the benchmark needs torch
    return importlib.import_module(f"mindspeed_chunk.tools.{chosen.command}").main()


if __name__ == "__main__":
    sys.exit(main())
