"""The layer benchmark: its cases, its baselines, what it refuses, and one run of the command."""

import argparse
import json
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import real_host
from json_records import assert_record
from launcher import HANG_S, run_ranks
from mindspeed_chunk import dist as wire
from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.moe.alltoall import AllToAllDispatcher
from mindspeed_chunk.observe import emit, observe
from mindspeed_chunk.tools import bench_host, bench_layer, bench_report, layer_command, link
from mindspeed_chunk.tools.bench_cases import build, names_of, parse

SIZES = ("--tokens", "64", "--hidden", "16", "--intermediate", "8", "--experts", "4", "--top-k", "2")


def layer_options(*words):
    parser = argparse.ArgumentParser()
    layer_command.add_layer_options(parser)
    return parser.parse_args([*SIZES, *words])


def bench(*words):
    command = [sys.executable, "-m", "mindspeed_chunk.tools", "bench", *SIZES, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)


def bytes_to_others(layer, case):
    """What all_to_all_single is given for the other ranks, call by call."""
    sent, original, rank = [], dist.all_to_all_single, dist.get_rank()

    def counting(output, input, output_splits, input_splits, **kwargs):
        rows = sum(input_splits) - input_splits[rank]
        sent.append(rows * input.shape[1] * input.element_size())
        return original(output, input, output_splits, input_splits, **kwargs)

    dist.all_to_all_single = counting
    try:
        results = layer.run(case)
    finally:
        dist.all_to_all_single = original
    return sent, results


def on_ranks(rank, world_size, options):
    """What a rank finds: bytes with and without pieces, errors of good cases, the message of a broken one, memory."""
    layer = bench_layer.BenchLayer(options, dist.group.WORLD)
    small = mock.patch.object(wire, "GLOO_PIECE_BYTES", 512)
    plain, pieces = build("rolling:1:whole"), build("rolling:1")._replace(around=small)
    layer.run(plain), layer.run(pieces)  # the agreements
    whole, expected = bytes_to_others(layer, plain)
    cut, results = bytes_to_others(layer, pieces)
    same = all(map(torch.equal, results, expected))

    class Broken(AllToAllDispatcher):
        def __call__(self, *args):
            out = super().__call__(*args)
            return out * 1.01 if dist.get_rank() == 1 else out

    good = [build("rolling:4"), build("pair:2:rows"), build("alltoall")]
    errors = layer.check(good)
    try:
        layer.check([good[0]._replace(name="broken", dispatch=Broken())])
        message = ""
    except bench_layer.ValuesDiffer as error:
        message = str(error)
    memory = {case.name: [n / layer.unit for n in layer.residency(case)] for case in good}
    return whole, cut, same, errors, message, memory, layer.traffic(good[0])


@pytest.fixture(scope="module")
def found_on_ranks():
    return run_ranks(on_ranks, 2, layer_options("--routing", "zipf"))


def test_pieces_move_the_same_bytes_in_smaller_messages(found_on_ranks):
    for whole, cut, same, *_ in found_on_ranks:
        assert same
        assert sum(cut) == sum(whole) > 4 * 512
        assert len(whole) == 4 < len(cut)
        # a range is cut into equal parts, up to a row
        assert max(cut) <= 512 + 4 * 20


def test_good_cases_pass_and_a_wrong_value_of_one_rank_is_refused_on_all(found_on_ranks):
    for _, _, _, errors, message, *_ in found_on_ranks:
        assert list(errors) == ["rolling:4", "pair:2:rows", "alltoall"] and max(errors.values()) < 1e-5
        assert message.startswith("broken: the output is off the plain dispatcher's by ")


def test_residency_and_traffic_are_the_same_figures_on_all_ranks(found_on_ranks):
    (*_, memory, traffic), (*_, other_memory, other_traffic) = found_on_ranks
    assert memory == other_memory and traffic == other_traffic
    assert memory["pair:2:rows"][0] < memory["rolling:4"][0] < memory["alltoall"][0]
    assert all(kept < peak for kept, peak in memory.values())
    assert traffic.exchanges == 16 and traffic.sent > 0


def read_record(path):
    record = json.loads(path.read_text())
    assert_record("bench", record)
    return record


def test_command_writes_what_it_prints(tmp_path):
    record, picture = tmp_path / "record.json", tmp_path / "record.png"
    drawing = ("--png", str(picture)) if importable("matplotlib") else ()
    cases = "rolling:1:whole,rolling:1,alltoall,rolling:2,pair:2,rolling:2:rows"
    answer = bench("--repeats", "3", "--cases", cases, "--json", str(record), *drawing)
    assert answer.returncode == 0, answer.stderr
    found = read_record(record)
    assert {"date", "machine", "python", "torch", "mindspeed_chunk", "options", "memory_unit_bytes"} <= found.keys()
    assert found["memory_unit_bytes"] == 64 * 2 * 16 * 4 and found["options"]["tokens"] == 64
    assert [case["case"] for case in found["cases"]] == cases.split(",")
    for case in found["cases"]:
        assert case["case"] in answer.stdout
        assert len(case["ms"]) == 3 and min(case["ms"]) > 0
        low, high = case["quartiles_ms"]
        assert low <= case["median_ms"] <= high
        assert list(case["ratios"]) == ["rolling:1:whole", "rolling:1", "alltoall"]
        assert case["largest_difference"] < 1e-4 and 0 < case["kept"] < case["peak"]
        assert case["sent_bytes"] > 0
    assert found["cases"][1]["ratios"]["rolling:1"] == {"of_medians": 1, "low": 1, "high": 1}
    if drawing:
        assert picture.read_bytes()[:4] == b"\x89PNG"


def importable(name):
    try:
        __import__(name)
    except ImportError:
        return False
    return True


def test_a_rank_without_rows_is_not_accused(tmp_path):
    """Its gradients are zeros, in both."""
    torch.save(torch.zeros(8, 1, dtype=torch.int64), tmp_path / "to_one")
    answer = bench("--cases", "rolling:2", "--repeats", "3", "--routing", str(tmp_path / "to_one"))
    assert answer.returncode == 0, answer.stderr


@pytest.mark.slow
def test_overhead_command(tmp_path):
    record = tmp_path / "record.json"
    answer = bench("--overhead", "--forward-only", "--repeats", "3", "--json", str(record))
    assert answer.returncode == 0, answer.stderr
    cases = read_record(record)["cases"]
    assert [(case["case"], case["link"]) for case in cases] == [
        (name, place) for place in (bench_report.ALONE, bench_report.TOGETHER) for name in ("rolling:1", "rolling:4")
    ]


@pytest.mark.parametrize(
    "words, told",
    [
        (("--cases", "rolling"), "case 'rolling': must be rolling or pair"),
        (("--cases", "rolling:0"), "case 'rolling:0'"),
        (("--cases", "spiral:4"), "case 'spiral:4'"),
        (("--cases", "rolling:4:fill"), "--cases: fill needs --shared-expert"),
        (("--cases", "pair:4:ahead2"), "case 'pair:4:ahead2': chunk_moe_lookahead: 2: has no meaning"),
        (("--cases", "rolling:4:half"), "case 'rolling:4:half': 'half': must be one of activations, rows, input"),
        (("--experts", "5"), "--experts 5: must be a multiple of --ranks 2"),
        (("--top-k", "9"), "--top-k 9: there are 4 experts"),
        (("--ranks", "1"), "--ranks: 1: must be at least 2 and at most 64"),
        *(
            ((f"--{name}", str(value)), f"--{name}: {value}: must be at least ")
            for value in (-1, 10**30)
            for name in ("ranks", "tokens", "hidden", "intermediate", "experts", "top-k", "shared-expert", "repeats")
        ),
        (("--routing", "zipf:nan"), "the exponent must be a number from 0 to 10"),
        (("--routing", "zipf:1e300"), "the exponent must be a number from 0 to 10"),
        (("--routing", "zipf:-1"), "the exponent must be a number from 0 to 10"),
        (("--routing", "x/" * 2500), "must be balanced, zipf"),
        (("--cases", f"rolling:{10**30}"), "with a number of chunks up to 1024"),
        (("--cases", "rolling:" + "9" * 5000), "with a number of chunks up to 1024"),
        (("--experts", "4096", "--hidden", "65536", "--intermediate", "65536"), "make them smaller"),
        (("--repeats", "2"), "--repeats: 2: must be at least 3"),
        (("--routing", "zipf:x"), "the exponent must be a number"),
        (("--routing", "zipf:nan"), "the exponent must be a number"),
        (("--json", "no/such/folder/x.json"), "--json no/such/folder/x.json: there is no folder no/such/folder"),
        (("--json", "/"), "--json /: cannot be written"),
        (("--png", "record.foo"), "--png record.foo: must end in .png"),
        (("--repeats", "many"), "argument --repeats: invalid int value: 'many'"),
        (("--routing", "no-such-file"), "must be balanced, zipf, zipf:EXPONENT or a file"),
        (("--hidden-share",), "--hidden-share: needs --link"),
        (("--link", "fast"), "--link fast: must be a number and one of bit"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words, told, monkeypatch, capsys):
    from mindspeed_chunk.tools import bench as command

    monkeypatch.setattr(sys, "argv", ["bench", *SIZES, *words])
    monkeypatch.setattr(link.os, "geteuid", lambda: 0)
    monkeypatch.setattr(link.shutil, "which", lambda name: name)
    try:
        code = command.main()
    except SystemExit as error:
        code = error.code
    told_here = capsys.readouterr().err
    assert code == 2 and told in told_here and told_here.startswith("error: ") and told_here.count("\n") == 1


def test_link_without_root_is_refused_with_what_it_needs(monkeypatch):
    monkeypatch.setattr(link.os, "geteuid", lambda: 1000)
    with pytest.raises(link.LinkError, match="needs root, ip and tc"), link.limited_link("1gbit"):
        pass


@pytest.mark.slow
def test_hidden_share_on_a_limited_link(tmp_path):
    try:
        with link.limited_link("1gbit"):
            pass
    except link.LinkError as error:
        pytest.skip(str(error))
    record = tmp_path / "record.json"
    words = ("--link", "1gbit", "--hidden-share", "--cases", "rolling:2", "--repeats", "3", "--json", str(record))
    answer = bench(*words)
    assert answer.returncode == 0, answer.stderr
    limited, free = read_record(record)["cases"]
    assert (limited["link"], free["link"]) == ("1gbit", bench_report.UNLIMITED)
    lost = (limited["median_ms"] - free["median_ms"]) / 1e3
    assert limited["hidden_share"] == pytest.approx(1 - lost / (8 * limited["sent_bytes"] / 1e9))
    namespaces = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
    assert f"mc{os.getpid()}" not in namespaces


def test_the_host_as_a_baseline(tmp_path):
    real_host.need()
    record = tmp_path / "record.json"
    answer = bench("--cases", "rolling:2,host:alltoall,host:allgather", "--repeats", "3", "--json", str(record))
    assert answer.returncode == 0, answer.stderr
    cases = read_record(record)["cases"]
    assert [case["case"] for case in cases] == ["rolling:2", "host:alltoall", "host:allgather"]
    for case in cases:
        assert case["largest_difference"] < 1e-4 and list(case["ratios"]) == ["host:alltoall", "host:allgather"]
        assert 0 < case["kept"] < case["peak"]


def test_rates_are_those_of_tc():
    assert link.bits_per_second("1gbit") == 1e9
    assert link.bits_per_second("2.5Mbit") == 2.5e6
    with pytest.raises(link.LinkError):
        link.bits_per_second("1 gbps")


def test_names_of_cases(monkeypatch, tmp_path):
    monkeypatch.delenv(bench_host.HOME, raising=False)
    assert parse("rolling:4") == ("rolling", 4, ()) and parse("rolling:4").keep == "activations"
    assert parse("pair:2:rows") == ("pair", 2, ("rows",))
    for name in ("rolling:4:rows:per_rank", "rolling:4:per_rank:rows"):
        assert (parse(name).keep, parse(name).dispatch, parse(name).mode) == ("rows", "per_rank", "rows:per_rank")
        assert build(name).dispatch.config.chunk_moe_dispatch == "per_rank"
    assert build("rolling:4").dispatch.config.chunk_moe_dispatch == "per_expert"
    with pytest.raises(ConfigError, match="'input': contradicts 'rows'; remove one of the two"):
        parse("rolling:4:rows:input")
    assert parse("alltoall") is parse("rolling:1:whole") is None
    assert names_of("rolling:2,alltoall,rolling:2") == ["rolling:2", "alltoall"]
    assert names_of(None)[:3] == ["rolling:1:whole", "rolling:1", "alltoall"]
    everything = names_of("all")
    assert {"pair:8", "rolling:8:rows", "rolling:1"} <= set(everything) and "pair:1" not in everything
    with pytest.raises(ConfigError, match="host:alltoall, host:allgather: set MINDSPEED_MM_HOME"):
        names_of("host:alltoall")
    monkeypatch.setenv(bench_host.HOME, str(tmp_path))
    with pytest.raises(ConfigError, match="there is no package mindspeed_mm in it"):
        names_of("host:alltoall")


def with_a_shared_expert(rank, world_size, options):
    layer = bench_layer.BenchLayer(options, dist.group.WORLD)
    errors = layer.check([build("rolling:2"), build("rolling:2:fill"), build("rolling:2:ahead2")])
    told, shared = [], layer._shared_expert
    layer._shared_expert = lambda: emit("shared", "expert") or shared()
    for name in ("rolling:2", "rolling:2:fill"):
        with observe() as events:
            layer.run(build(name))
        told.append([e.name for e in events if e.kind in ("action", "shared")][:3])
    return errors, told


def test_a_shared_expert_runs_before_the_layer_or_fills_it():
    for errors, told in run_ranks(with_a_shared_expert, 2, layer_options("--shared-expert", "8")):
        assert max(errors.values()) < 1e-5
        assert told == [["expert", "P0", "D0"], ["P0", "D0", "expert"]]


def test_routings(tmp_path):
    balanced = torch.cat([bench_layer.routing(layer_options("--tokens", "4096"), rank, 2) for rank in range(2)])
    assert balanced.shape == (8192, 2)
    assert (balanced[:, 0] != balanced[:, 1]).all()
    counts = balanced.flatten().bincount(minlength=4)
    assert counts.max() < 1.1 * counts.min()
    skewed = bench_layer.routing(layer_options("--tokens", "4096", "--top-k", "1", "--routing", "zipf"), 0, 2)
    shares = skewed.flatten().bincount(minlength=4).sort(descending=True).values / 4096
    assert torch.allclose(shares, torch.tensor([12.0, 6, 4, 3]) / 25, atol=0.03)
    recorded = torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0], [0, 2]])
    torch.save(recorded, tmp_path / "ids.pt")
    options = layer_options("--routing", str(tmp_path / "ids.pt"))
    assert bench_layer.routing(options, 1, 2).tolist() == [[1, 2], [3, 0]]
    layer_command.check_layer(options)
    assert (options.tokens, options.top_k) == (2, 2)
    options.experts = 3
    with pytest.raises(ValueError, match="holds ids up to 3, --experts is 3"):
        bench_layer.routing(options, 0, 2)


def test_hidden_share():
    options = argparse.Namespace(link="8mbit")
    limited, free = (
        bench_report.Measured("rolling:4", where, [seconds] * 3, 1, traffic=bench_layer.Traffic(16, 1_000_000))
        for where, seconds in (("8mbit", 1.3), (bench_report.UNLIMITED, 1.0))
    )
    # the wire needs one second for the bytes, of which 0.3 are seen
    assert bench_report.hidden_share(options, limited, free) == pytest.approx(0.7)
