"""What `bench` and `trace` have in common: the layer's options, their checks, and a process for each rank."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist

from mindspeed_chunk.command import variable
from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.dist import destroy
from mindspeed_chunk.tools import devices, stand_in
from mindspeed_chunk.tools.bench_layer import TOLERANCES, NoResult, routing
from mindspeed_chunk.tools.link import bits_per_second
from mindspeed_chunk.tools.parser import Parser, check_range
from mindspeed_chunk.tools.ranks import is_rank, launch
from mindspeed_chunk.wording import shortened

_STAND_IN_RANKS = 8
_LIMITS = {
    "ranks": (2, 64),
    "tokens": (1, 2**20),
    "hidden": (1, 2**16),
    "intermediate": (1, 2**16),
    "experts": (1, 2**12),
    "top_k": (1, 2**12),
    "shared_expert": (0, 2**16),
}


def run_on_ranks(
    parser: Parser,
    module: str,
    check: Callable[[argparse.Namespace], Mapping[str, str]],
    on_rank: Callable[[argparse.Namespace], None],
) -> int:
    """The exit code of a command that runs `on_rank` on every rank: here, if this process is one, or in new processes.

    Args:
        module: the command's module.
        check: checks the options. Returns what the ranks need in their environment; raises ConfigError.
        on_rank: raises NoResult on every rank or on none.
    """
    options = parser.parse_args()
    try:
        if is_rank() and not options.stand_in:
            options.ranks = variable("WORLD_SIZE", 1)
        environment = check(options)
        if not is_rank():
            processes, rate = (1, None) if options.stand_in else (options.ranks, options.link)
            return launch(module, sys.argv[1:], processes, rate, environment)
    except ConfigError as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    code = 0
    with _group(options):
        try:
            on_rank(options)
        except NoResult as error:
            code = 1
            if dist.get_rank() == 0:
                print(f"error: {error}", file=sys.stderr)
        devices.barrier()
        destroy()
    return code


@contextlib.contextmanager
def _group(options: argparse.Namespace) -> Iterator[None]:
    """The process group of this rank, which the block must leave."""
    if options.stand_in:
        with stand_in.played(devices.here(options.device), options.ranks, options.link):
            yield
    else:
        devices.join(options.device, variable("LOCAL_RANK", 0))
        yield


def add_layer_options(parser: argparse.ArgumentParser) -> None:
    """The options that `BenchLayer` reads, and those of the ranks."""
    parser.add_argument("--device", choices=devices.COLLECTIVES, default="cpu", help="over gloo, NCCL or HCCL")
    parser.add_argument(
        "--ranks",
        type=int,
        help="all in one expert-parallel group (default: all devices; on CPUs 2; with --stand-in 8)",
    )
    parser.add_argument(
        "--stand-in",
        action="store_true",
        help="for a machine with one device: run one rank of --ranks, with copies and sleeps for its peers; --link is "
        "then the rate that is played",
    )
    parser.add_argument(
        "--link", metavar="RATE", help="limit the link between the ranks, such as 1gbit; on CPUs, where it needs root"
    )
    parser.add_argument("--tokens", type=int, default=2048, help="on each rank (default: 2048)")
    parser.add_argument("--hidden", type=int, default=512, help="width of a token (default: 512)")
    parser.add_argument("--intermediate", type=int, default=256, help="of an expert (default: 256)")
    parser.add_argument("--experts", type=int, default=16, help="on all ranks together (default: 16)")
    parser.add_argument("--top-k", type=int, default=4, help="experts per token (default: 4)")
    parser.add_argument(
        "--routing",
        default="balanced",
        metavar="HOW",
        help="balanced: each token's experts drawn with equal chances; zipf or zipf:EXPONENT: the expert at place n of "
        "a popularity list, the same on all ranks, with chances as 1 / n^EXPONENT (default exponent: 1); or a FILE of "
        "expert ids, [tokens, k] or [ranks, tokens, k], as torch.save writes them: it determines tokens and top-k",
    )
    parser.add_argument(
        "--shared-expert",
        type=int,
        default=0,
        metavar="WIDTH",
        help="in addition to the layer, a dense SwiGLU of this width on the same tokens (default: 0, none)",
    )
    parser.add_argument("--dtype", choices=TOLERANCES, default="float32", help="of rows and weights (default: float32)")
    parser.add_argument("--forward-only", action="store_true", help="without gradients, as in an evaluation")


def check_layer(options: argparse.Namespace) -> None:
    """Raise ConfigError for options without a possible layer. A recorded routing sets its tokens and top-k."""
    check_ranks(options)
    check_range(options, _LIMITS)
    if options.experts % options.ranks:
        raise ConfigError(f"--experts {options.experts}: must be a multiple of --ranks {options.ranks}")
    if options.top_k > options.experts:
        raise ConfigError(f"--top-k {options.top_k}: there are {options.experts} experts")
    needed, there = _least_bytes(options), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if options.device == "cpu" and needed > there:
        raise ConfigError(
            f"--tokens, --hidden, --intermediate, --experts: the ranks need {needed / 1e9:.0f} GB or more, and this "
            f"machine has {there / 1e9:.0f} GB; make them smaller"
        )
    options.tokens, options.top_k = routing(options, 0, options.ranks).shape


def check_ranks(options: argparse.Namespace) -> None:
    """Fill in the number of ranks."""
    if reason := devices.missing(options.device):
        raise ConfigError(f"--device {options.device}: {reason}")
    there = devices.count(options.device)
    if options.ranks is None:
        options.ranks = _STAND_IN_RANKS if options.stand_in else there
    if options.stand_in:
        if options.link:
            bits_per_second(options.link)
    elif options.device != "cpu":
        if options.link:
            raise ConfigError("--link: only links between CPUs can be limited; leave it out, or add --stand-in")
        if options.ranks > there:
            raise ConfigError.about("--ranks", options.ranks, f"there are {there} devices", "correct it")
        if there == 1:
            raise ConfigError(f"--device {options.device}: there is one device, and a layer has peers; add --stand-in")


def _least_bytes(options: argparse.Namespace) -> int:
    """Of all ranks: the experts' weights and their gradients, the rows of a call, and the chances of the routing."""
    size = getattr(torch, options.dtype).itemsize
    weights = 2 * 3 * options.experts * options.hidden * options.intermediate * size
    rows = options.tokens * options.top_k * (2 * options.hidden + 3 * options.intermediate) * size
    return weights + options.ranks * (rows + 8 * options.tokens * options.experts)


def check_file(argument: str, path: str) -> None:
    """Raise ConfigError for a file that cannot be written: before the measurement, not after it."""
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise ConfigError(f"{argument} {shortened(path)}: there is no folder {shortened(folder)}")
    if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ConfigError(f"{argument} {shortened(path)}: cannot be written")
