"""The time of N chunks relative to one: as the planner predicts it from measured rates, and as measured.

    python benchmarks/plan_speed.py --link 1gbit --device-file device.yaml

Two ranks, one core each, over gloo, in two network namespaces. First the rates are measured: seconds of messages of
several sizes on the link, operations per second of the experts' matmuls, bytes per second of data that is only moved,
and Python's overhead per action. They are written to a device file, which is read in the same way as by
`mindspeed-chunk plan` and gives the prediction. Then the cases are timed as by `mindspeed-chunk bench`. Exits with 1 if
the error of a ratio is more than 15 %.
"""

import os
import statistics
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist
import yaml

from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.planner import LayerShape, chunk_times, load_device
from mindspeed_chunk.tools import bench, rates
from mindspeed_chunk.tools.bench_layer import BenchLayer, NoResult
from mindspeed_chunk.tools.layer_command import add_layer_options, check_layer, run_on_ranks
from mindspeed_chunk.tools.parser import Parser

BOUND = 0.15


def main():
    parser = Parser(description=__doc__)
    add_layer_options(parser)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4, 8], help="the first one is the baseline")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device-file", metavar="FILE", help="keep the measured device here")
    parser.set_defaults(hidden_share=False)
    return run_on_ranks(parser, Path(__file__).stem, check, measure)


def check(options):
    check_layer(options)
    if not options.link:
        raise ConfigError("--link: the ratio is that of a limited link")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))}


def measure(options):
    layer = BenchLayer(options, dist.group.WORLD)
    content = rates.measure(options, layer, options.chunks[len(options.chunks) // 2])
    predicted = predict(options, content)
    measured = bench.measure(options, [f"rolling:{n}" for n in options.chunks])
    lines = []
    for n, one in zip(options.chunks, measured, strict=True):
        ratios = [own / first for own, first in zip(one.seconds, measured[0].seconds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        expected = predicted[n] / predicted[options.chunks[0]]
        lines.append(
            f"N={n}: {one.median * 1e3:.0f} ms, predicted {predicted[n] * 1e3:.0f} ms; to N={options.chunks[0]}: "
            f"{middle:.3f} ({low:.3f} - {high:.3f}), predicted {expected:.3f}, {expected / middle - 1:+.1%}"
        )
        if abs(expected / middle - 1) > BOUND:
            lines.append(f"the prediction for N={n} is off by more than {BOUND:.0%}")
    if dist.get_rank() == 0:
        print("\n".join(lines))
        if options.device_file:
            Path(options.device_file).write_text(yaml.safe_dump(content, sort_keys=False))
    if len(lines) > len(measured):
        raise NoResult(lines[-1])


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


if __name__ == "__main__":
    sys.exit(main())
