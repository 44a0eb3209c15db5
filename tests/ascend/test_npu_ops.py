"""Each function of the NPU back end against the CPU back end, and whether the rig sees what is wrong with a call."""

import traceback
import types
from pathlib import Path

import pytest

from ascend import op_checks, rig
from launcher import run_ranks
from mindspeed_chunk.ops.npu_ops import OPS


def run_checks(rank, world_size, folder):
    """The traceback of each check that failed, what was called, and which lines ran."""
    npu, failed = rig.install(folder), {}
    with rig.Lines(npu) as lines:
        for name, check in op_checks.CHECKS.items():
            try:
                check(npu)
            except Exception:
                failed[name] = traceback.format_exc()
    import torch_npu

    return {
        "failed": failed,
        "called": sorted(rig.called),
        "meta refusals": sorted(rig.meta_refusals),
        "lines": lines.of_functions(),
        "ran": lines.ran,
        "version": torch_npu.__version__,
    }


@pytest.fixture(scope="module")
def report(wheel_folder):
    (report,) = run_ranks(run_checks, 1, wheel_folder)
    return report


@pytest.mark.parametrize("check", op_checks.CHECKS)
def test_against_the_cpu_back_end(report, check):
    assert check not in report["failed"], report["failed"][check]


def test_every_op_of_the_table_is_called_and_no_other(report, record_property):
    called = ", ".join(f"npu::{name}" for name in report["called"])
    record_property(f"called in torch_npu {report['version']}", called)
    assert report["called"] == sorted(OPS)


def test_meta_kernels_agree_with_every_call(report):
    """But for two gaps of the first wheels: their meta kernels are behind their own kernels."""
    gaps = [
        "npu_grouped_matmul: group_type only support -1 and 0, but got 2",
        "npu_grouped_matmul_add_: no meta kernel",
    ]
    refusals = report["meta refusals"]
    assert len(refusals) <= len(gaps) and all(map(str.startswith, refusals, gaps)), refusals
    assert report["version"].startswith("2.7.1") or not refusals


def test_nine_lines_of_ten_run(report, record_property):
    lines, ran = report["lines"], report["ran"]
    share = len(lines & ran) / len(lines)
    record_property("lines of functions in ops/npu.py", f"{share:.1%} of {len(lines)} ran; not {sorted(lines - ran)}")
    assert share > 0.9


# What is broken in the source, and what must be heard of it.
BREAKS = {
    "a keyword that is not there": ("group_list_type=1,", "group_kind=1,", "group_kind"),
    "a keyword of another op": ("probs=weight_TK", "weights=weight_TK", "weights"),
    "int32 sizes": ("groups.of_experts,", "groups.of_experts.int(),", "group_list of torch.int32"),
    "a running total for sizes": ("groups.of_experts,", "groups.long_ends,", "groups of"),
    "sizes for a running total": ("groups.long_ends", "groups.of_experts", "off by"),
    "strided rows": ("[rows_RH.contiguous()]", "[rows_RH]", "no other strides"),
    "strided weights": ("weight_LHF = weight_LHF.contiguous()", "pass", "no other strides"),
    "rows not transposed": ("rows_RH.contiguous().t()", "rows_RH.contiguous()", "x must be transposed"),
    "a list of one size": ("or len(weight_LHF) == 1", "", "longer than 1"),
    "an id below 0": (".clamp(min=0)", "", "indices must be in"),
    "int64 places": ("op(rows_RH, order_R, probs", "op(rows_RH, order_R.long(), probs", "places of torch.int64"),
    "the other order": ("groups.to_experts", "groups.to_sources", "AssertionError"),
    "counts without a range": (", num_bins, 0, num_bins)", ", num_bins)", "histc: without a range"),
    "another dtype": ('("npu_swiglu", fc1_RF.dtype)', '("npu_swiglu", torch.float32)', "npu_swiglu: torch.float64"),
    "what nobody wrote": ("if 0 in groups.rows_per_expert:", "if False:", "off by inf"),
}


def hear(rank, world_size, folder):
    """What each broken back end comes to, as far as the values of single functions tell."""
    npu, heard = rig.install(folder), {}
    source = Path(npu.__file__).read_text()
    for name, (old, new, _) in BREAKS.items():
        assert old in source, f"{name}: {old!r} is not in the source"
        module = types.ModuleType("broken")
        exec(compile(source.replace(old, new), "broken", "exec"), module.__dict__)
        heard[name] = ""
        for check in op_checks.VALUES:
            try:
                check(module)
            except Exception as error:
                heard[name] += f"{type(error).__name__}: {error}\n"
    return heard


@pytest.fixture(scope="module")
def heard(wheel_folder):
    (heard,) = run_ranks(hear, 1, wheel_folder)
    return heard


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_call_is_heard_of(heard, name):
    assert BREAKS[name][2] in heard[name], heard[name] or "nothing was heard"
