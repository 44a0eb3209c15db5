"""Random option sets through `mindspeed-chunk plan`: right and wrong options, device files, and model configs.

    PYTHONPATH=tests python -m soak.plans --examples 400
    PYTHONPATH=tests python -m soak.plans --replay '{"words": ["--model", "35b", "--nodes", "1e3"]}'

Each must end with a plan, or with one line and exit code 2, within a second of CPU time (the least of three runs). A
plan must hold no number that is not finite, none below 0, and no 0 where time or bytes are spent. Exits with 1 where
one fails; what does is printed as `--replay` takes it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import yaml

from mindspeed_chunk.known_devices import DEVICES
from mindspeed_chunk.planner.compare.recipes import RECIPES
from mindspeed_chunk.planner.model import BUILT_IN, MODEL_TYPE
from mindspeed_chunk.tools import plan

COMMAND = "PYTHONPATH=tests python -m soak.plans"
LIMIT = 1.0  # seconds of CPU time
TINY = Path(__file__).parents[2] / "examples" / "qwen3_5_35b" / "tiny" / "config.json"
# stands in words for the folder with the files
FOLDER = "{folder}"
NUMBERS = [
    0,
    1,
    3,
    7,
    10**6,
    10**9,
    2**31,
    2**63,
    10**30,
    10**400,
    -1,
    -0.5,
    0.5,
    1e-320,
    1e-300,
    1e300,
    math.inf,
    math.nan,
]
VALUES = [
    *NUMBERS,
    True,
    None,
    "",
    "eight",
    "8",
    "[red]x[/b]",
    "a\nb",
    "\ud800",
    "\x1b[31m",
    "x" * 5000,
    [],
    [[1]],
    {},
    {"a": 1},
]
TEXTS = [
    "", "[", "[" * 3000, "{" * 3000, '{"a":' * 3000, "a: &a [*a]", "a: !!timestamp x", "a: !!int ''", "a: !!bool x",
    "\t", "%", "\0",
    "- 1", "a: 1\na: 2", "a: 2020-13-45", "\ufeffa: 1", "a: &b [" + "1, " * 100 + "]\nc: [" + "*b, " * 1000 + "]",
]  # fmt: skip


class Given(NamedTuple):
    """The words behind `plan`, and the files that they name."""

    words: list[str]
    files: dict[str, str] = {}

    def line(self) -> str:
        return json.dumps(self._asdict())


class Ran(NamedTuple):
    """What came of it; `code` None: an exception."""

    code: int | None
    seconds: float
    out: str
    err: str


def drawn(draw: random.Random) -> Given:
    """Half of them have nothing wrong with them; the others have one mistake, or a few."""
    words, files = _words(draw), {}
    if draw.random() < 0.3:
        words["--model"], files["config.json"] = FOLDER, json.dumps(_model(draw))
    if draw.random() < 0.3:
        words["--device"], files["device.yaml"] = f"{FOLDER}/device.yaml", yaml.safe_dump(_device(draw))
    if draw.random() < 0.5:
        _spoil(draw, words, files)
    flags = [flag for flag, chance in (("--freeze-vision", 0.2), ("--all", 0.2)) if draw.random() < chance]
    form = draw.choice([["--json"], ["--json"], ["--html", f"{FOLDER}/plan.html", "--json"], []])
    return Given([*(each for pair in words.items() for each in pair), *flags, *form], files)


def _words(draw: random.Random) -> dict[str, str]:
    nodes = draw.choice([1, 2, 3, 7, 8, 16, 64, 100, 250, 1000, 1024, 1890, 2048])
    devices = draw.choice([1, 2, 4, 6, 8, 8, 8, 16]) if nodes * 16 <= 16384 else 8
    world = nodes * devices
    words = {
        "--model": draw.choice([*BUILT_IN, "35b", "122B", str(TINY), str(TINY.parent)]),
        "--nodes": str(nodes),
        "--devices-per-node": str(devices),
        "--device": draw.choice([*DEVICES]),
    }
    optional = {
        "--sequence": draw.choice([1, 2, 63, 128, 1000, 4096, 4097, 32768, 10**6, 10**8]),
        "--global-batch": draw.choice([world, 3 * world, 8 * world, 192 * world, max(1, world // 2), 1, 5, 10**8]),
        "--imbalance": draw.choice([1, 1.3, 4, 1000]),
        "--chunk-loss": draw.choice([0, 1, 1000, 1024, 10**8]),
        "--reserve": draw.choice([0, 0.1, 0.5, 0.99]),
        "--precision": draw.choice([*RECIPES]),
    }
    return words | {name: str(value) for name, value in optional.items() if draw.random() < 0.4}


def _model(draw: random.Random) -> dict[str, Any]:
    base = draw.choice([json.loads(TINY.read_text(encoding="utf-8")), *BUILT_IN.values()])
    content = json.loads(json.dumps({"model_type": MODEL_TYPE, **base}))
    text = content.setdefault("text_config", {})
    text.pop("layer_types", None)
    sizes = {
        "vocab_size": (1, 100, 151936), "hidden_size": (1, 64, 7168), "num_hidden_layers": (1, 5, 61, 1000),
        "num_attention_heads": (1, 12, 128), "num_key_value_heads": (1, 4), "head_dim": (1, 64),
        "moe_intermediate_size": (1, 96, 2048), "shared_expert_intermediate_size": (1, 2048),
        "num_experts": (1, 8, 60, 257, 1024), "num_experts_per_tok": (1, 1, 6), "linear_num_key_heads": (1, 16),
        "full_attention_interval": (1, 4, 1000),
    }  # fmt: skip
    text.update({key: draw.choice(values) for key, values in sizes.items() if draw.random() < 0.4})
    return content


def _device(draw: random.Random) -> dict[str, Any]:
    def number(least: float, most: float) -> float:
        return 10 ** draw.uniform(math.log10(least), math.log10(most))

    content: dict[str, Any] = {
        "name": draw.choice(["mine", "[b]mine[/c]", ":smile:", "910", "</script>"]),
        "memory_gb": number(0.001, 1e6),
        **{f"{place}_gb_per_s": number(1e-6, 1e6) for place in ("memory", "intra", "inter")},
        **{f"flops_{kind}": number(1e-6, 1e6) for kind in ("bf16", "fp8", "fp32")},
    }
    for key in ("intra_latency_us", "inter_latency_us", "call_us"):
        if draw.random() < 0.3:
            content[key] = draw.choice([0, number(1e-3, 1e6)])
    for key in ("intra_messages", "inter_messages"):
        if draw.random() < 0.3:
            sizes = sorted({number(1, 1e15) for _ in range(draw.randint(2, 5))})
            content[key] = [[size, number(1e-9, 1e6)] for size in sizes]
    return content


def _spoil(draw: random.Random, words: dict[str, str], files: dict[str, str]) -> None:
    for _ in range(draw.choice([1, 1, 1, 3])):
        if files and draw.random() < 0.7:
            name = draw.choice([*files])
            files[name] = draw.choice(TEXTS) if draw.random() < 0.15 else _spoiled(draw, name, files[name])
        else:
            # a process is started without NUL in its words
            words[draw.choice([*words])] = str(draw.choice(VALUES)).replace("\0", "")


def _spoiled(draw: random.Random, name: str, text: str) -> str:
    try:
        content = json.loads(text) if name == "config.json" else yaml.safe_load(text)
    except Exception:  # spoilt before
        return text
    place = content
    while isinstance(place, dict) and (inside := [each for each in place.values() if each and isinstance(each, dict)]):
        if draw.random() < 0.3:
            break
        place = draw.choice(inside)
    if not isinstance(place, dict) or not place:
        return text
    key, value = draw.choice([*place]), draw.choice(VALUES)
    action = draw.random()
    if action < 0.1:
        del place[key]
    elif action < 0.2:
        place[str(value)[:100]] = place.pop(key)
    elif isinstance(place[key], list) and action < 0.7:
        place[key] = [[value, each[1]] if isinstance(each, list) else value for each in place[key]]
    else:
        place[key] = value
    if draw.random() < 0.1:
        place.update(layer_types=draw.choice(VALUES), full_attention_interval=draw.choice(VALUES))
    return json.dumps(content) if name == "config.json" else yaml.safe_dump(content, width=10**6)


def run(given: Given) -> Ran:
    out, err = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        for name, text in given.files.items():
            (Path(folder) / name).write_bytes(text.encode("utf-8", "surrogatepass"))
        words = [word.replace(FOLDER, folder) for word in given.words]
        streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
        start = time.process_time()
        with streams[0], streams[1], mock.patch.object(sys, "argv", ["plan", *words]):
            try:
                code = plan.main()
            except SystemExit as error:
                code = error.code
            except BaseException:
                return Ran(None, time.process_time() - start, out.getvalue(), traceback.format_exc())
        return Ran(code, time.process_time() - start, out.getvalue(), err.getvalue())


def verdict(given: Given, ran: Ran, limit: float = LIMIT) -> Iterator[str]:
    """What is wrong with it."""
    if ran.seconds > limit:
        yield f"took {ran.seconds:.2f} s"
    if ran.code is None:
        yield ran.err
    elif ran.code == 2:
        line = ran.err.removesuffix("\n")
        if ran.out or not line.startswith("error: ") or not line.isprintable() or len(line) > 2500:
            yield f"exit code 2 and not one line: {ran.out[:200]!r}, {ran.err[:2000]!r}"
    elif ran.code in (0, 1):
        if ran.err:
            yield f"exit code {ran.code} and an error: {ran.err[:1000]!r}"
        if "--json" in given.words:
            yield from wrong_numbers(json.loads(ran.out))
        elif " nan" in ran.out or " inf" in ran.out:
            yield "nan or inf in the tables"
    else:
        yield f"exit code {ran.code}"


def wrong_numbers(report: dict[str, Any]) -> Iterator[str]:
    for path, value in _numbers(report):
        if not math.isfinite(value) or value < 0:
            yield f"{path}: {value}"
    for path, value in _spent(report):
        if not value > 0:
            yield f"{path}: {value}, and something was spent"


def _numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            if key != "groups":  # ranks
                yield from _numbers(each, f"{path}.{key}")
    elif isinstance(value, int | float):
        yield path, value


def _spent(report: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Numbers that cannot be 0."""
    found = report["recommendation"]
    told = {f"layouts.{n}": each for n, each in enumerate(report["layouts"]) if "problem" not in each}
    told |= {f"batch.{n}": each for n, each in enumerate(report["batch"])}
    told |= {f"runners_up.{n}": each for n, each in enumerate(found["runners_up"])}
    told["chosen"] = found["best"] or found["least_memory"]
    for name, each in told.items():
        yield from ((f"{name}.{path}", value) for path, value in _spent_by(each))
    for name in ("job", "precision"):
        for each in report[name] if name == "precision" else [report[name]]:
            keys = ("kept", "gathered", "rank") if name == "precision" else ("parameters", "memory", "budget")
            yield from ((f"{name}.{key}", each[key]) for key in keys)
    for each in report["activations"]:
        yield f"activations.{each['policy']}", each["kept"]
    for each in report["sequence"]:
        yield f"sequence.{each['context']}.{each['ranks']}.tokens", each["tokens"]
        yield from ((f"sequence.{each['context']}.{each['ranks']}", sent["nbytes"]) for sent in each["traffic"])
    for each in report["chunks"]:
        name = f"chunks.{each['schedule']}.{each['keep']}.{each['num_chunks']}"
        keys = ["rows", "kept", "peak", "forward", "backward", "resident_tokens"]
        keys += ["exchanges", "sent", "communication"] if each["ep"] > 1 else []
        yield from ((f"{name}.{key}", each[key]) for key in keys)


def _spent_by(told: dict[str, Any]) -> Iterator[tuple[str, float]]:
    setting, seconds, memory = told["setting"], told["seconds"], told["memory"]
    sharded = setting["backend"] == "fsdp2"
    parts = ["parameters", "gradients", "optimizer", "activations", "expert layer", "head"]
    yield from ((f"memory.{part}", memory[part]) for part in parts + ["gathered"] * sharded)
    parts = ["attention and dense", "experts", "head", "optimizer"]
    parts += ["recompute"] * (setting["policy"] in ("full", "offload"))
    parts += ["model parallel"] * (setting["layout"]["cp"] * setting["layout"]["tp"] * setting["layout"]["pp"] > 1)
    yield from ((f"seconds.{part}", seconds[part]) for part in parts)
    yield from (("peak", told["peak"]), ("step", told["step"]))
    for sent in told.get("traffic", ()):
        keys = ("calls", "nbytes", "seconds")
        yield from ((f"traffic.{sent['group']}.{sent['kind']}.{key}", sent[key]) for key in keys)


def search(examples: int, seed: int, limit: float) -> tuple[Counter, list[tuple[Given, str]], float]:
    """Exit codes, what failed and why, and the longest CPU time."""
    codes: Counter = Counter()
    failed, longest = [], 0.0
    for number in range(examples):
        given = drawn(random.Random(f"{seed} {number}"))
        ran = run(given)
        if ran.seconds > limit:  # CPU time varies by half of it where other machines share the processor
            ran = min((ran, run(given), run(given)), key=lambda each: each.seconds)
        codes[ran.code] += 1
        longest = max(longest, ran.seconds)
        if wrong := "; ".join(verdict(given, ran, limit)):
            failed.append((given, wrong))
    return codes, failed, longest


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=400, help="option sets (default: 400)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"seconds of CPU time for each (default: {LIMIT:g})")
    parser.add_argument("--replay", metavar="JSON", help="run this option set alone, and print what comes")
    options = parser.parse_args(argv)
    if options.replay is not None:
        given = Given(**json.loads(options.replay))
        ran = run(given)
        wrong = "; ".join(verdict(given, ran, options.limit))
        print(f"exit code {ran.code}, {ran.seconds:.2f} s\n{ran.out}{ran.err}{wrong}")
        return int(bool(wrong))
    codes, failed, longest = search(options.examples, options.seed, options.limit)
    for given, wrong in failed:
        print(f"{wrong}\n{COMMAND} --replay '{given.line()}'\n")
    told = ", ".join(f"{count} x {code}" for code, count in sorted(codes.items(), key=str))
    print(f"{options.examples} option sets, exit codes {told}; at most {longest:.2f} s; {len(failed)} failed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
