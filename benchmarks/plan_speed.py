"""The time of N chunks relative to one: as the planner predicts it from measured rates, and as measured.

    python benchmarks/plan_speed.py --link 1gbit --device-file device.yaml

Two ranks, one core each, over gloo, in two network namespaces. First the rates are measured: seconds of messages of
several sizes on the link, operations per second of the experts' matmuls, bytes per second of data that is only moved,
and Python's overhead per action. They are written to a device file, which is read in the same way as by
`mindspeed-chunk plan` and gives the prediction. Then the layer of `mindspeed-chunk bench` is timed, all cases
interleaved. Exits with 1 if the error of a ratio is more than 15 %.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import yaml

from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.dist import all_to_all, destroy
from mindspeed_chunk.moe.schedule import build as build_schedule
from mindspeed_chunk.ops import cpu
from mindspeed_chunk.ops.groups import Groups
from mindspeed_chunk.planner import LayerShape, chunk_times, load_device
from mindspeed_chunk.tools.bench_cases import build
from mindspeed_chunk.tools.bench_layer import BenchLayer
from mindspeed_chunk.tools.layer_command import add_layer_options, check_layer
from mindspeed_chunk.tools.link import LinkError, bits_per_second
from mindspeed_chunk.tools.ranks import is_rank, launch

BOUND = 0.15
MEGABYTES = (0.25, 0.5, 1, 2, 4, 8, 16)
MESSAGE_REPEATS = 5
OVERHEAD = {"tokens": 16, "hidden": 16, "intermediate": 16, "top_k": 2, "experts": 4}


def main():
    options = parse()
    if is_rank():
        return measure(options)
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    try:
        return launch(Path(__file__).stem, sys.argv[1:], options.ranks, options.link, {"PYTHONPATH": path})
    except LinkError as error:
        print(error, file=sys.stderr)
        return 1


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_layer_options(parser)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4, 8], help="the first one is the baseline")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device-file", metavar="FILE", help="keep the measured device here")
    options = parser.parse_args()
    try:
        check_layer(options)
    except ConfigError as error:
        parser.error(str(error))
    if not options.link:
        parser.error("--link: the ratio is that of a limited link")
    return options


def measure(options):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layer = BenchLayer(options, dist.group.WORLD)
    small = BenchLayer(argparse.Namespace(**{**vars(options), **OVERHEAD}), None)
    cases = {n: build(f"rolling:{n}") for n in options.chunks}
    layer.check(list(cases.values()))
    content = device(options, layer, small)
    predicted = predict(options, content)
    seconds: dict[int, list[float]] = {n: [] for n in cases}
    for round_ in range(-1, options.repeats):
        for n, case in sorted(cases.items(), reverse=round_ % 2 == 1):
            took = layer.time(case)
            if round_ >= 0:
                seconds[n].append(took)
    good = dist.get_rank() != 0 or report(options, content, predicted, seconds)
    dist.barrier()
    destroy()
    return 0 if good else 1


def device(options, layer, small):
    """The content of a device file, equal on both ranks: the slower rank's figures."""
    row = options.hidden * 4  # bytes
    messages = [[size * 1e6, slowest(message_seconds(int(size * 1e6) // row, options.hidden))] for size in MEGABYTES]
    flops, moved = compute_rates(options, layer)
    return {
        "name": f"one core, {options.link}",
        "memory_gb": 1,
        "flops_fp32": 1 / slowest(1 / flops) / 1e12,
        "memory_gb_per_s": 1 / slowest(1 / moved) / 1e9,
        "intra_gb_per_s": bits_per_second(options.link) / 8e9,
        "inter_gb_per_s": bits_per_second(options.link) / 8e9,
        "intra_messages": messages,
        "call_us": slowest(call_seconds(small)) * 1e6,
        "source": "measured by benchmarks/plan_speed.py",
    }


def slowest(value):
    largest = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def median(function, repeats=MESSAGE_REPEATS):
    times = []
    for _ in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def message_seconds(rows, hidden):
    """One all-to-all in which each rank sends `rows` rows to the other."""
    sent, splits = torch.zeros(2 * rows, hidden), [rows, rows]
    return median(lambda: all_to_all(sent, splits, splits, dist.group.WORLD, "message", max_split=rows)[1].wait())


def compute_rates(options, layer):
    """Operations per second of the experts' matmuls, bytes per second of P, U and SwiGLU, for the middle case."""
    tokens = options.tokens // options.chunks[len(options.chunks) // 2]
    x_TH, index_TK, weight_TK = (t.detach()[:tokens] for t in (layer.x_TH, layer.index_TK, layer.weight_TK))
    local = layer.fc1_LHF.shape[0]
    each = index_TK.numel() // local
    rows_RH, order_R = cpu.permute(x_TH, index_TK)
    rows_RH, groups = rows_RH[: each * local], Groups.of([[each] * local])
    fc1_LHF, fc2_LIH = layer.fc1_LHF.detach(), layer.fc2_LIH.detach()
    fc1_RF = cpu.grouped_mm(rows_RH, fc1_LHF, groups)
    activated_RI, total_LHF = cpu.swiglu(fc1_RF, 0.0), torch.zeros_like(fc1_LHF)

    def matmuls():
        cpu.grouped_mm(rows_RH, fc1_LHF, groups)
        cpu.grouped_mm(activated_RI, fc2_LIH, groups)
        cpu.grouped_mm_wgrad(rows_RH, fc1_RF, groups, total_LHF)

    full_RH = rows_RH.new_empty(index_TK.numel(), options.hidden)

    def moves():
        cpu.permute(x_TH, index_TK)
        cpu.unpermute(full_RH, order_R, weight_TK)
        cpu.swiglu(fc1_RF, 0.0)

    operations = each * local * options.hidden * options.intermediate * (4 + 2 + 4)
    nbytes = 2 * 4 * (tokens + index_TK.numel()) * options.hidden + 3 * 4 * each * local * options.intermediate
    return operations / median(matmuls), nbytes / median(moves)


def call_seconds(small):
    """What an action that is no all-to-all costs with next to no data: the slope of a call's time over its actions."""
    seconds, actions = {}, {}
    for n in (1, 4):
        case = build(f"rolling:{n}")
        seconds[n] = median(lambda case=case: [small.run(case) for _ in range(10)]) / 10
        both = build_schedule("rolling", n) + build_schedule("rolling", n, backward=True)
        actions[n] = sum(action.kind not in "DC" for action in both)
    return max(0.0, (seconds[4] - seconds[1]) / (actions[4] - actions[1]))


def predict(options, content):
    """Seconds of a layer call by N."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "device.yaml"
        file.write_text(yaml.safe_dump(content))
        measured = load_device(str(file))
    shape = LayerShape(
        tokens=options.tokens, hidden=options.hidden, intermediate=options.intermediate, experts=options.experts,
        top_k=options.top_k, ep=options.ranks, element_size=4,
    )  # fmt: skip
    return {n: chunk_times(shape, measured, num_chunks=n, dtype="fp32").total for n in options.chunks}


def report(options, content, predicted, seconds):
    if options.device_file:
        Path(options.device_file).write_text(yaml.safe_dump(content, sort_keys=False))
    base, good = options.chunks[0], True
    for n in options.chunks:
        ratios = [own / first for own, first in zip(seconds[n], seconds[base], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        expected = predicted[n] / predicted[base]
        off = expected / middle - 1
        good = good and abs(off) <= BOUND
        print(
            f"N={n}: {statistics.median(seconds[n]) * 1e3:.0f} ms, predicted {predicted[n] * 1e3:.0f} ms; to N={base}: "
            f"{middle:.3f} ({low:.3f} - {high:.3f}), predicted {expected:.3f}, {off:+.1%}"
        )
    return good


if __name__ == "__main__":
    sys.exit(main())
