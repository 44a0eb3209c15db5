"""Random configurations of the Chunk MoE layer on 1, 2 and 4 ranks, against the reference: outputs and all gradients.

    PYTHONPATH=tests python -m soak.fuzz --examples 2000
    PYTHONPATH=tests python -m soak.fuzz --replay '{"ranks": 2, "tokens": [0, 3]}'

The configurations that once failed (kept.jsonl) run first. A new one that fails is made smaller, printed as what
`--replay` takes, and kept. Exits with 1 where one fails: a wrong result, an exception on some rank, or a hang.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from mindspeed_chunk.config import DISPATCHES, KEEPS, SCHEDULES
from soak.drawn import Drawn, compare_on_rank
from soak.pool import Broken, Pool

KEPT = Path(__file__).with_name("kept.jsonl")
RANKS = (1, 2, 4)
SPARE = 10
COMMAND = "PYTHONPATH=tests python -m soak.fuzz"
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
# of the router weights, beside the rows'
WIDER = {torch.float32: torch.float64, torch.bfloat16: torch.float32}


class Failed(AssertionError):
    """A configuration failed; the text says how."""


class Fuzz:
    """The ranks, what was asked of them, and what came of it.

    Attributes:
        passed: configurations that were run and are all right, each once, as lines.
        worst: by dtype, the largest error in units of what is allowed, with its name.
    """

    def __init__(self, ranks: tuple[int, ...], limit: float) -> None:
        self.passed: set[str] = set()
        self.worst: dict[str, tuple[float, str]] = {}
        self.failed: tuple[Drawn, str] | None = None
        self._pools = {number: Pool(compare_on_rank, number, limit) for number in ranks}

    def __enter__(self) -> Fuzz:
        return self

    def __exit__(self, *exception: object) -> None:
        for pool in self._pools.values():
            pool.close()

    def run(self, case: Drawn) -> None:
        """Raises Failed."""
        line = case.line()
        if line in self.passed:
            return
        try:
            answers = self._pools[case.ranks].ask(line)
        except Broken as broken:
            self._fail(case, str(broken))
        told = "\n".join(text for text, _ in answers if text)
        if told:
            self._fail(case, told)
        for _, errors in answers:
            for name, error in errors.items():
                dtype = str(case.dtype)
                self.worst[dtype] = max(self.worst.get(dtype, (0.0, "")), (error, name))
        self.passed.add(line)

    def _fail(self, case: Drawn, told: str) -> None:
        self.failed = (case, told)
        raise Failed(told)

    def search(self, examples: int, number: int) -> None:
        """Run at least `examples` configurations more, drawn from the seed `number` and those behind it.

        Raises Failed for the smallest that fails.
        """
        wanted = len(self.passed) + examples
        while len(self.passed) < wanted:
            # some are drawn twice, the simplest one by every search
            self._search(wanted - len(self.passed) + SPARE, number)
            number += 1

    def _search(self, examples: int, number: int) -> None:
        @seed(number)
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        )
        @given(drawn(tuple(self._pools)))
        def search(case):
            self.run(case)

        search()


@st.composite
def drawn(draw, ranks: tuple[int, ...]) -> Drawn:
    """A configuration that the layer takes; simple values come first, for a failing one to be made smaller with.

    As many values are drawn whatever they are, some of them in vain: that, too, makes it easy to simplify one of them.
    """
    number = draw(st.sampled_from(ranks))
    experts = number * draw(st.integers(1, 4))
    top_k = min(experts, draw(st.integers(1, 4)))
    schedule = draw(st.sampled_from(SCHEDULES))
    lookahead = draw(st.sampled_from((1, 0, 2, 3)))
    dtype = draw(st.sampled_from(DTYPES))
    activation = draw(st.sampled_from((None, "module")))
    # a value at the limit falls to one side or the other when it is rounded to 8 bits, and its gradient with it
    limit = draw(st.sampled_from((0.0, 0.5)))
    inputs = ("x", "weight", "fc1", "fc2")
    frozen = set(draw(st.lists(st.sampled_from((*inputs, "activation")), unique=True)))
    checkpoint = draw(st.sampled_from(("no", "replay", "reentrant")))
    if checkpoint == "reentrant" and frozen.issuperset(inputs):
        checkpoint = "replay"  # torch's reentrant kind does nothing where it is given nothing to differentiate
    routing = draw(st.sampled_from(("random", "balanced", "zipf", "one_rank", "alternate", "first", "last")))
    if routing in ("first", "last"):
        top_k = 1
    flags = {name: draw(st.booleans()) for name in ("padded", "transposed", "again")}
    dense_weights, skip_unread, pieces, wider = (draw(st.booleans()) for _ in range(4))
    return Drawn(
        ranks=number,
        tokens=tuple(draw(st.lists(st.integers(0, 24), min_size=number, max_size=number))),
        experts=experts,
        top_k=top_k,
        hidden=draw(st.integers(1, 12)),
        intermediate=draw(st.integers(1, 9)),
        **draw(cuts()),
        schedule=schedule,
        lookahead=lookahead if schedule == "rolling" else 1,
        keep=draw(st.sampled_from(KEEPS)),
        dispatch=draw(st.sampled_from(DISPATCHES)),
        dtype=dtype,
        router_dtype=WIDER.get(dtype) if wider else None,
        layout=draw(st.sampled_from(("LHF", "LFH"))),
        routing=routing,
        frozen=tuple(sorted(frozen if activation else frozen - {"activation"})),
        # [T, E] weights of as many experts as are chosen are read as [T, K]
        dense_weights=dense_weights and top_k < experts,
        activation=activation,
        limit=0.0 if activation or dtype == torch.bfloat16 else limit,
        checkpoint=checkpoint,
        follower=draw(st.sampled_from(("nothing", "negation", "silu"))),
        skip_unread=skip_unread and checkpoint == "replay",
        incoming=draw(st.sampled_from(("dense", "transposed", "strided", "expanded"))),
        pieces=pieces and number > 1,
        seed=draw(st.integers(0, 9)),
        **flags,
    )


@st.composite
def cuts(draw) -> dict:
    """The settings that say into how many chunks the tokens are cut."""
    number, size, most = draw(st.integers(0, 9)), draw(st.integers(1, 12)), draw(st.sampled_from((0, 1, 5, 20)))
    kinds = {
        "number": {"chunks": number, "max_rows": most},
        "size": {"chunk_size": size},
        "auto": {"auto": True, "max_rows": most},
    }
    return kinds[draw(st.sampled_from(list(kinds)))]


def read_kept() -> list[Drawn]:
    return [Drawn.read(line) for line in KEPT.read_text(encoding="utf-8").splitlines()] if KEPT.exists() else []


def keep(case: Drawn) -> None:
    if case not in read_kept():
        with KEPT.open("a", encoding="utf-8") as file:
            file.write(case.line() + "\n")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=2000, help="different configurations to run (default: 2000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first draw (default: 0)")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, choices=RANKS, help="sizes of the group")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds a collective may take (default: 20)")
    parser.add_argument("--replay", metavar="JSON", help="run this configuration alone")
    options = parser.parse_args(argv)
    start = time.monotonic()
    kept = [case for case in read_kept() if case.ranks in options.ranks]
    ranks = tuple(options.ranks) if options.replay is None else (Drawn.read(options.replay).ranks,)
    with Fuzz(ranks, options.timeout) as fuzz:
        try:
            for case in kept if options.replay is None else [Drawn.read(options.replay)]:
                fuzz.run(case)
            if options.replay is None:
                fuzz.search(options.examples, options.seed)
        # hypothesis has errors of its own, for a failure that does not come again
        except Exception:
            if fuzz.failed is None:
                raise
            report_failure(*fuzz.failed, len(fuzz.passed) + 1)
            return 1
    report(fuzz, len(kept), time.monotonic() - start)
    return 0


def report_failure(case: Drawn, told: str, number: int) -> None:
    keep(case)
    print(f"{told}\nfailed, among {number} configurations; the smallest that does:\n{COMMAND} --replay '{case.line()}'")


def report(fuzz: Fuzz, kept: int, seconds: float) -> None:
    by_ranks = Counter(Drawn.read(line).ranks for line in fuzz.passed)
    told = ", ".join(f"{by_ranks[number]} on {number}" for number in sorted(by_ranks))
    print(
        f"{len(fuzz.passed)} configurations ({told} ranks; {kept} kept ones among them) in {seconds:.0f} s: all right"
    )
    for dtype, (error, name) in sorted(fuzz.worst.items()):
        print(f"  {dtype.removeprefix('torch.')}: at most {error:.2g} of the error that is allowed, in {name}")


if __name__ == "__main__":
    sys.exit(main())
