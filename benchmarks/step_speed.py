"""Time of a whole training step by dispatcher, with two ranks as two hosts: whole runs in rounds, losses compared.

    python benchmarks/step_speed.py --link 1gbit                     the embedded trainer
    python benchmarks/step_speed.py --link 1gbit --trainer stock     MindSpeed-MM's, unedited

`--trainer stock` needs MINDSPEED_MM_HOME and MINDSPEED_HOME, and an environment as the example's README.md describes.
The model is a Qwen3.5-MoE of 4 layers with 16 experts, 4 per token, randomly initialised; blocks are recomputed.
The first step of each run is not timed. Next to the steps is the floor: the same without a limit of the link.
"""

import json
import os
import re
import runpy
import statistics
import sys
import tempfile
from pathlib import Path

import yaml

import example
from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.tools.link import bits_per_second
from mindspeed_chunk.tools.parser import Parser, check_range
from mindspeed_chunk.tools.ranks import is_rank, launch

RANKS = 2
BOUND = 1e-5  # of a loss, relative
HOMES = ("MINDSPEED_HOME", "MINDSPEED_MM_HOME")

PLAN = "parallel.ep_plan."
ALLTOALL, BEST = {PLAN + "dispatcher": "alltoall"}, ("overlap_shared_expert", "skip_unread")


def chunkmoe(chunks, dispatch, *switches):
    keys = {"dispatcher": "chunkmoe", "moe_num_chunks": chunks, "chunk_moe_dispatch": dispatch}
    return {PLAN + key: value for key, value in (keys | {f"chunk_moe_{name}": True for name in switches}).items()}


# the first is what the others are compared with
CASES = {"alltoall": ALLTOALL} | {
    f"{dispatch}, N={chunks}{', overlapped, unread skipped' if switches else ''}": chunkmoe(chunks, dispatch, *switches)
    for switches in ((), BEST)
    for chunks in (1, 4, 8)
    for dispatch in ("per_expert", "per_rank")
    if chunks > 1 or not switches
}
STEP = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+) \|.*?\bloss: ([\d.E+-]+)")


def main():
    if is_rank():
        return on_rank(*sys.argv[1:])
    parser = Parser(description=__doc__)
    parser.add_argument("--link", metavar="RATE", help="limit the link between the ranks, such as 1gbit; needs root")
    parser.add_argument("--trainer", choices=("embedded", "stock"), default="embedded", help="default: embedded")
    parser.add_argument("--only", action="append", metavar="TEXT", help="cases with TEXT in their name, and alltoall")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each case (default: 3)")
    parser.add_argument("--steps", type=int, default=5, help="of a run (default: 5)")
    parser.add_argument("--hidden", type=int, default=512, help="a multiple of 64 (default: 512)")
    parser.add_argument("--sequence", type=int, default=512, help="tokens of a sample; 4 samples on each rank")
    options = parser.parse_args()
    try:
        check(options)
        with tempfile.TemporaryDirectory() as folder:
            return compare(options, Path(folder))
    except ConfigError as error:
        parser.error(str(error))


def check(options):
    check_range(options, {"rounds": (1, 99), "steps": (3, 999), "hidden": (64, 4096), "sequence": (1, 4096)})
    if options.hidden % 64:
        raise ConfigError.about("--hidden", options.hidden, "must be a multiple of 64", "correct it")
    if options.link:
        bits_per_second(options.link)
    unset = [name for name in HOMES if not os.environ.get(name)]
    if options.trainer == "stock" and unset:
        raise ConfigError(f"--trainer stock: {' and '.join(unset)} must be set to checkouts")


def compare(options, folder):
    """The exit code; 1 if a loss differs from that of `alltoall`, and then no times are shown."""
    write_model(options, folder)
    names = [name for name in CASES if name == "alltoall" or any(text in name for text in options.only or [""])]
    runs: dict[tuple, list] = {(name, rate): [] for rate in dict.fromkeys((options.link, None)) for name in names}
    for number in range(options.rounds):
        for name, rate in reversed(runs) if number % 2 else runs:
            runs[name, rate].append(run(options, folder, name, rate))
    reference = runs["alltoall", None][0]
    pairs = [pair for each in runs.values() for steps in each for pair in zip(steps, reference, strict=True)]
    apart = max(abs(loss - plain) / plain for (_, loss), (_, plain) in pairs)
    if apart > BOUND:
        print(f"error: losses differ by {apart:.1e}; no times are shown", file=sys.stderr)
        return 1
    report(options, runs, names, apart)
    return 0


def write_model(options, folder):
    """The tiny example's model, wider."""
    config = json.loads((example.EXAMPLE / "tiny" / "config.json").read_text())
    hidden = options.hidden
    config["text_config"] |= {
        "hidden_size": hidden,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": hidden // 2,
        "shared_expert_intermediate_size": hidden // 2,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 64,
    }
    config["text_config"]["rope_parameters"]["mrope_section"] = [4, 2, 2]
    config["vision_config"]["out_hidden_size"] = hidden
    (folder / "config.json").write_text(json.dumps(config))


def write_yaml(options, folder, case):
    """The example's yaml with the settings of a case."""
    stock = options.trainer == "stock"
    text = (example.EXAMPLE / ("stock_tiny.yaml" if stock else "tiny.yaml")).read_text(encoding="utf-8")
    config = yaml.safe_load(text)
    settings = {
        "model.model_name_or_path": str(folder),
        "data.dataset_param.basic_parameters.cutoff_len": options.sequence,
        "training.train_iters": options.steps,
        "training.lr": 1e-4,
        **CASES[case],
    }
    if stock:
        settings["data.dataset_param.preprocess_parameters.model_name_or_path"] = str(folder)
    for path, value in settings.items():
        *parents, last = path.split(".")
        section = config
        for parent in parents:
            section = section[parent]
        section[last] = value
    file = folder / "case.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return file


def run(options, folder, case, rate):
    """(milliseconds, loss) of each step of one run."""
    print(f"{case}, link {rate or 'not limited'}", end=": ", flush=True)
    python_path = [str(Path(__file__).parent), *map(os.environ.get, HOMES), str(example.EXAMPLE)]
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, [*python_path, os.environ.get("PYTHONPATH")])),
        "NON_MEGATRON": "true",
        "MINDSPEED_CHUNK_DEVICE": "cpu",
        **({} if rate else {"GLOO_SOCKET_IFNAME": "lo"}),
    }
    arguments = (options.trainer, str(folder), str(write_yaml(options, folder, case)))
    code = launch(Path(__file__).stem, arguments, RANKS, rate, environment)
    logs = [(folder / f"rank{rank}.log").read_text(errors="replace") for rank in range(RANKS)]
    steps = [(float(milliseconds), float(loss)) for milliseconds, loss in STEP.findall(logs[0])]
    if code or len(steps) != options.steps:
        print("failed", flush=True)
        raise SystemExit("\n".join(f"--- rank {rank}\n{log[-3000:]}" for rank, log in enumerate(logs)))
    print(f"{statistics.median(milliseconds for milliseconds, _ in steps[1:]) / 1e3:.2f} s per step", flush=True)
    return steps


def on_rank(trainer, folder, config):
    """Train, as one of the ranks."""
    log = os.open(f"{folder}/rank{os.environ['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(folder)
    module, arguments = "mindspeed_chunk.standalone", [config]
    if trainer == "stock":
        home = Path(os.environ["MINDSPEED_MM_HOME"])
        module = "mindspeed_chunk.launch"
        arguments = [str(home / "mindspeed_mm" / "fsdp" / "train" / "trainer.py"), config]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def report(options, runs, names, apart):
    """Medians with quartiles; ratios to `alltoall` on the same link."""
    columns, rows = ["case"], {name: [name] for name in names}
    for rate in dict.fromkeys((options.link, None)):
        columns += [f"s, link {rate or 'not limited'}", "quartiles", "to alltoall"]
        times = {name: [ms / 1e3 for steps in runs[name, rate] for ms, _ in steps[1:]] for name in names}
        base = statistics.median(times["alltoall"])
        for name, row in rows.items():
            low, middle, high = statistics.quantiles(times[name], n=4)
            row += [f"{middle:.2f}", f"{low:.2f} - {high:.2f}", f"{middle / base:.3f}"]
    title = f"one step, {options.trainer} trainer, {options.rounds} runs of each case; losses apart by {apart:.0e}"
    example.show(title, columns, rows.values())


if __name__ == "__main__":
    sys.exit(main())
