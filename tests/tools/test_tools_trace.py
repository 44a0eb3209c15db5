"""The timeline of a layer call: what is recorded on ranks, its lanes, sums and files, and one run of the command."""

import dataclasses
import json
import subprocess
import sys
from html.parser import HTMLParser

import pytest
import torch.distributed as dist

from launcher import HANG_S, run_ranks
from mindspeed_chunk.moe.schedule import build as build_schedule
from mindspeed_chunk.moe.schedule import render
from mindspeed_chunk.tools import trace, trace_files, trace_record
from mindspeed_chunk.tools.bench_cases import build
from mindspeed_chunk.tools.bench_layer import BenchLayer
from mindspeed_chunk.tools.trace_record import COMPUTE, Pass, Recording, Transfer, lay_out, summarise
from test_tools_bench import importable, layer_options

SIZES = ("--tokens", "64", "--hidden", "16", "--intermediate", "8", "--experts", "4", "--top-k", "2")


def record_on_ranks(rank, world_size, options):
    layer, case = BenchLayer(options, dist.group.WORLD), build("rolling:3")
    layer.run(case)
    return dataclasses.asdict(trace.record_call(layer, case))


@pytest.fixture(scope="module")
def records():
    found = run_ranks(record_on_ranks, 2, layer_options())
    return [Recording.read(json.loads(json.dumps(told))) for told in found]


def synthetic():
    """A forward of one chunk with round times: its experts wait half a second, of three that rows are on the wire."""
    names_ends = (("P0", 1.0), ("D0", 1.0), ("E0", 4.0), ("C0", 4.0), ("U0", 7.0))
    actions = [(name, end, 0, 1) for name, end in names_ends]
    transfers = [
        Transfer("D0", 100, 1.0, 1.5, [(1.0, 1.5)]),
        Transfer("C0", 100, 4.0, 6.5, [(4.0, 6.5)]),
    ]
    return Pass("forward", 0.0, 7.5, actions, transfers)


def overlapping(spans):
    """Pairs of neighbours in a lane of which the second begins before the first has ended."""
    ordered = sorted(spans, key=lambda span: span[0])
    return [pair for pair in zip(ordered, ordered[1:]) if pair[1][0] < pair[0][1] - 1e-9]


def test_the_schedule_that_ran_is_recorded(records):
    for record in records:
        forward, backward = (" ".join(name for name, *_ in one.actions) for one in record.passes)
        assert forward == render(build_schedule("rolling", 3))
        assert backward == render(build_schedule("rolling", 3, backward=True))
        assert [one.name for one in record.passes] == ["forward", "backward"]
        transfers = [each for one in record.passes for each in one.transfers]
        exchanges = [each for each in transfers if each.name != "plan"]
        assert len(exchanges) == 12 == len(transfers) - 1
        for each in exchanges:
            (wait,) = each.waits
            assert each.sent > 0 and each.launch <= wait[0] <= wait[1] and each.launch <= each.end <= wait[1]


def test_lanes_cover_the_call_without_overlap(records):
    for record in records:
        spans = trace_files.measured_spans(record)
        for row in trace_files.rows(spans):
            assert row.spans and not overlapping([(span.start, span.end) for span in row.spans])
        compute = [span for span in spans if span.lane == COMPUTE]
        assert sum(span.length for span in compute) == pytest.approx(sum(one.end - one.begin for one in record.passes))


def test_sums_of_a_known_call():
    summary = summarise(synthetic())
    assert (summary.total, summary.communication, summary.exposed, summary.plan) == (7.5, 3.0, 3.0, 0.0)
    assert summary.compute == 4.5 and summary.hidden_share == 0
    # the simulator has no rest after the last action
    assert (summary.simulated, summary.simulated_exposed) == (7.0, 3.0)


def test_two_transfers_at_once_are_simulated_one_after_the_other():
    one = synthetic()
    one.actions[2:2] = [("P1", 1.0, 0, 2), ("D1", 1.0, 0, 2)]
    one.transfers.append(Transfer("D1", 100, 1.0, 2.0, []))
    timeline = trace_record.simulated(one)
    wire = {str(span.action): (span.start, span.end) for span in timeline.spans if span.action.kind == "D"}
    assert wire == {"D0": (1.0, 1.5), "D1": (1.5, 2.0)}
    lanes = {row.title: len(row.spans) for row in trace_files.rows(lay_out(one)) if row.title != COMPUTE}
    assert lanes == {"wire": 2, "wire, 2 at once": 1}


def test_simulated_lanes_do_not_overlap(records):
    for record in records:
        for row in trace_files.rows(trace_files.simulated_spans(record)):
            assert not overlapping([(span.start, span.end) for span in row.spans])


def check_chrome(trace_events, ranks):
    """The fields that viewers need, a name for every process and thread, and lanes without overlap."""
    spans = [event for event in trace_events if event["ph"] == "X"]
    assert {event["ph"] for event in trace_events} == {"X", "M", "C"}
    for event in spans:
        assert {"name", "cat", "pid", "tid", "ts", "dur"} <= event.keys() and event["ts"] >= 0 and event["dur"] >= 0
    named = {(event["name"], event["pid"], event["tid"]) for event in trace_events if event["ph"] == "M"}
    lanes = {(event["pid"], event["tid"]) for event in spans}
    assert {pid for pid, _ in lanes} == set(range(2 * ranks))  # measured and simulated
    for pid, tid in lanes:
        assert ("process_name", pid, 0) in named and ("thread_name", pid, tid) in named
        here = [
            (event["ts"], event["ts"] + event["dur"]) for event in spans if (event["pid"], event["tid"]) == (pid, tid)
        ]
        assert not [pair for pair in overlapping(here) if pair[1][0] < pair[0][1] - 1e-3]  # a nanosecond
    return spans


class Page(HTMLParser):
    """Collects what a page refers to, and its tags that were not closed."""

    def __init__(self):
        super().__init__()
        self.references, self.open, self.tags = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        names = ("src", "href", "xlink:href", "srcset", "data", "action", "poster", "xmlns")
        self.references += [value for name, value in attributes if name in names and value != "data:,"]
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check_page(text):
    page = Page()
    page.feed(text)
    assert not page.references and not page.open
    assert not {"script", "img", "iframe"} & set(page.tags)
    assert "://" not in text and "url(" not in text and "@import" not in text


def test_files_of_a_record(records, tmp_path):
    spans = check_chrome(trace_files.chrome(records)["traceEvents"], 2)
    measured = [span for span in spans if span["pid"] == 0 and span["tid"] == 0]
    exposed = sum(span["dur"] for span in measured if span["cat"] == "exposed communication") / 1e6
    assert exposed == pytest.approx(sum(summarise(one).exposed for one in records[0].passes))
    text = trace_files.page("a <title>", "sizes", records)
    assert "a &lt;title&gt;" in text and "Rank 1" in text and "exposed communication" in text
    check_page(text)


def test_command_writes_its_files(tmp_path):
    prefix = tmp_path / "layer"
    words = [*SIZES, "--case", "pair:2:rows", "--calls", "1", "--out", str(prefix)]
    command = [sys.executable, "-m", "mindspeed_chunk.tools", "trace", *words]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert answer.returncode == 0, answer.stderr
    assert "pair:2:rows" in answer.stdout and "1, backward" in answer.stdout
    check_page((tmp_path / "layer.html").read_text())
    names = {
        event["name"] for event in check_chrome(json.loads((tmp_path / "layer.json").read_text())["traceEvents"], 2)
    }
    assert {"P0", "E1", "U1", "D0", "C1", "W0", "launch D0", "wait D0", "plan"} <= names
    if importable("matplotlib"):
        assert (tmp_path / "layer.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    "words, told",
    [
        (("--case", "alltoall"), "--case alltoall: it has no schedule to show"),
        (("--case", "rolling"), "--case 'rolling': must be rolling or pair"),
        (("--calls", "0"), "--calls: 0: must be at least 1 and at most 1000"),
        (("--calls", str(10**30)), f"--calls: {10**30}: must be at least 1 and at most 1000"),
        (("--tokens", str(10**30)), f"--tokens: {10**30}: must be at least 1"),
        (("--out", "x/" * 2500 + "x"), "there is no folder"),
        (("--out", "no/such/folder/x"), "there is no folder no/such/folder"),
        (("--out", "./"), "--out ./: is a folder"),
        (("--calls", "few"), "argument --calls: invalid int value: 'few'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words, told, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["trace", *SIZES, *words])
    with pytest.raises(SystemExit) as ended:
        trace.main()
    told_here = capsys.readouterr().err
    assert ended.value.code == 2 and told in told_here and told_here.count("\n") == 1
