"""What bench and trace do on devices, and ci/gpu_check.sh: to the end on played GPUs, with CPU tensors."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import played_device
from device_commands import CASES, SIZES, assert_complete, command, run
from launcher import run_ranks
from mindspeed_chunk import ops
from mindspeed_chunk.config import KEEPS, SCHEDULES
from mindspeed_chunk.observe import Event
from mindspeed_chunk.ops import cpu
from mindspeed_chunk.tools import bench_layer, bench_report, bench_values, devices, kernels, layer_command
from mindspeed_chunk.tools.bench_report import Measured
from mindspeed_chunk.tools.parser import Parser
from mindspeed_chunk.tools.trace_record import action_seconds, summarise


def test_gpu_check_runs_to_its_end_on_a_played_gpu(tmp_path):
    """One GPU: its peers are copies and sleeps, and the output says what that cannot show."""
    changes = {"PYTHON": sys.executable, "OUT": str(tmp_path), "CASES": CASES}
    ended = run("bash", "ci/gpu_check.sh", *SIZES, environment={**played_device.environment("cuda", 1), **changes})
    record, report = assert_complete(tmp_path, ended, ranks=1)
    assert report.count("A real link hides less") == 2 and record["wire_gb_per_s"] is None
    assert record["options"]["ranks"] == 8 and record["environment"]["device"] == "played cuda"
    limited = [each for each in record["cases"] if each["link"] == "400gbit"]
    assert len(limited) == 2 and all(each["sent_bytes"] > 0 and "hidden_share" in each for each in limited)


@pytest.mark.slow
def test_bench_and_trace_run_to_their_end_between_played_gpus(tmp_path):
    environment = played_device.environment("cuda", 2)
    words = ("--device", "cuda", "--cases", CASES, "--repeats", "3")
    ended = command("bench", *words, environment=environment)
    assert ended.returncode == 0, ended.stderr
    assert "2 cuda ranks" in ended.stdout and "stand-in" not in ended.stdout and "every row arrived" in ended.stdout
    ended = command("trace", "--device", "cuda", "--out", tmp_path / "layer", environment=environment)
    assert ended.returncode == 0, ended.stderr
    assert "1, backward" in ended.stdout and "ms by action" in ended.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_the_script_says_so(tmp_path):
    ended = run("env", f"PYTHON={sys.executable}", f"OUT={tmp_path / 'out'}", "bash", "ci/gpu_check.sh")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("skipped: ") and not (tmp_path / "out").exists()


def options(*words):
    parser = Parser()
    layer_command.add_layer_options(parser)
    return parser.parse_args([*SIZES, *words])


def refuse(rank, world_size):
    """One rank's back end has a wrong function."""
    right = cpu.regroup
    if rank == 1:
        cpu.regroup = lambda rows_RH, groups: right(rows_RH, groups) * (1 + (rows_RH.dtype == torch.bfloat16))
    try:
        bench_layer.check_device(options())
    except bench_layer.ValuesDiffer as error:
        return str(error)


def test_a_wrong_function_of_one_rank_ends_all_before_anything_is_timed():
    other, own = run_ranks(refuse, 2)
    assert other == "another rank has wrong values; no times are shown" and own.startswith(
        "regroup: off by 1.0e+00, allowed 0e+00; layer: "
    )


def test_values_that_are_compared():
    found = list(bench_values.check(torch.device("cpu")))
    names = [each.what for each in found]
    functions = {name for name in vars(ops.BackEnd) if not name.startswith("_")}
    assert functions == {name.partition(",")[0] for name in names} & functions  # each function of a back end
    assert sum(name.startswith("layer: ") for name in names) == 2 * len(KEEPS) * len(SCHEDULES)
    assert all(each.right for each in found) and not bench_values.Value("", float("inf"), 1.0).right


def lose_rows(rank, world_size):
    """The wire reports success and brings zeros."""
    original = dist.all_to_all_single

    def zeros(output, *args, **kwargs):
        work = original(output, *args, **kwargs)
        work.wait()
        output.zero_()
        return work

    good = bench_values.wire(torch.device("cpu"))[0]
    dist.all_to_all_single = zeros
    return good.right, bench_values.wire(torch.device("cpu"))[0].right


def test_lost_rows_are_noticed_by_every_rank():
    assert run_ranks(lose_rows, 2) == [(True, False), (True, False)]


ACTIONS = ("P0", "D0", "P1", "D1", "E0", "C0", "E1", "C1", "U0", "U1")
# stream, start and end on the device, in ms; the host launches an action a ms
KERNELS = {
    "P0": (7, 10, 11), "D0": (20, 11, 15), "P1": (7, 11, 12), "D1": (20, 15, 19), "E0": (7, 16, 20),
    "C0": (20, 20, 24), "E1": (7, 20, 23), "C1": (20, 24, 27), "U0": (7, 24, 25), "U1": (7, 28, 30),
}  # fmt: skip


def synthetic(arrows=True):
    """A trace as torch's profiler writes it: microseconds, and an arrow from each launch to its kernel."""
    host = {"pid": 1, "tid": 1, "cat": "user_annotation", "ph": "X"}
    events = [{**host, "name": "chunkmoe::forward", "ts": 0, "dur": 10_000}]
    for number, action in enumerate(ACTIONS):
        stream, start, end = KERNELS[action]
        launch, place = number * 1000 + 100, {"pid": 0, "tid": stream, "ts": start * 1000}
        events.append({**host, "name": f"chunkmoe::{action}", "ts": number * 1000, "dur": 900})
        events.append({**place, "name": "kernel", "cat": "kernel", "ph": "X", "dur": (end - start) * 1000})
        if arrows:
            arrow = {"id": number, "cat": "ac2g", "name": "ac2g"}
            events += [{**arrow, "ph": "f", **place}, {**arrow, "ph": "s", "pid": 1, "tid": 1, "ts": launch}]
    return events


def test_a_trace_of_a_device_becomes_a_timeline():
    told = [Event("action", name, {"in_flight": 0, "owners": 0}) for name in ACTIONS]
    (one,) = kernels.passes(synthetic(), {"forward": told})
    assert [round(1e3 * end) for _, end, *_ in one.actions] == [11, 11, 12, 12, 20, 20, 23, 23, 25, 30]
    waits = {each.name: [tuple(round(1e3 * t) for t in wait) for wait in each.waits] for each in one.transfers}
    # E0 starts a ms after its rows: the host was late. U1 waits for C1, and again for the host
    assert waits == {"plan": [(15, 16), (27, 28)], "D0": [(12, 15)], "D1": [], "C0": [(23, 24)], "C1": [(25, 27)]}
    summary, ms = summarise(one), {kind: round(1e3 * s) for kind, s in action_seconds(one).items()}
    assert ms == {"P": 2, "D": 8, "E": 7, "C": 7, "W": 0, "U": 3}
    assert (round(1e3 * summary.exposed), round(1e3 * summary.communication)) == (6, 15)


def test_a_trace_without_kernels_is_refused():
    with pytest.raises(ValueError, match="connects no kernel with the experts' matmuls"):
        kernels.passes(synthetic(arrows=False), {"forward": []})


def test_the_fewest_chunks_of_the_fast_ones_are_recommended():
    def measured(case, seconds):
        return Measured(case, bench_report.UNLIMITED, [seconds] * 3, 1)

    cases = [measured("alltoall", 0.1), measured("rolling:1", 3.0), measured("rolling:2", 1.01)]
    cases += [measured("rolling:4", 1.0), measured("pair:8", 1.0), measured("rolling:2:rows", 0.5)]
    assert bench_report.recommended(cases) == "rolling:2"
    assert bench_report.recommended(cases[:1]) is None


@pytest.mark.parametrize(
    "words, there, expected",
    [
        ((), 0, "--device cuda: torch 2.0 sees no cuda device here"),
        ((), 1, "--device cuda: there is one device, and a layer has peers; add --stand-in"),
        (("--ranks", "4"), 2, "--ranks: 4: there are 2 devices"),
        (("--link", "1gbit"), 2, "--link: only links between CPUs can be limited"),
        (("--stand-in", "--link", "fast"), 1, "--link fast: must be a number and one of bit"),
        (("--stand-in", "--ranks", "1"), 1, "--ranks: 1: must be at least 2"),
    ],
)
def test_what_a_device_cannot_do_is_refused(words, there, expected, monkeypatch):
    monkeypatch.setattr(devices, "_module", lambda kind: SimpleNamespace(device_count=lambda: there))
    monkeypatch.setattr(devices.torch, "__version__", "2.0")
    with pytest.raises(layer_command.ConfigError) as raised:
        layer_command.check_layer(options("--device", "cuda", *words))
    assert str(raised.value).startswith(expected)
