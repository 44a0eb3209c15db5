"""Short trainings: dispatchers agree, a seed fixes every bit, accumulation, bf16; and the command line as a whole."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from json_records import assert_record
from launcher import HANG_S, run_ranks, torchrun
from mindspeed_chunk.standalone.prepare import prepare
from standalone_ranks import MODEL, YAML, curves, read

SMALL = ["training.micro_batch_size=2", "data.dataset_param.basic_parameters.cutoff_len=64"]
STEPS = 5
EP = "parallel.ep_plan"
BF16 = "parallel.fsdp_plan.param_dtype=bf16"
NO_AUX = "features.loss_cfg.router_aux_loss_coef=0"
RUNS = {
    "alltoall": [f"{EP}.dispatcher=alltoall"],
    "chunkmoe": [],
    "again": [],
    "prefetch": ["parallel.fsdp_plan.num_to_forward_prefetch=1", "parallel.fsdp_plan.num_to_backward_prefetch=1"],
    "one chunk": [f"{EP}.moe_num_chunks=1"],
    "chunk size, pair": [f"{EP}.moe_num_chunks=0", f"{EP}.moe_chunk_size=37", f"{EP}.chunk_moe_schedule=pair"],
    "recompute of experts": [f"{EP}.chunk_moe_recompute=true"],
    "no block recompute": ["features.recompute=false"],
    "bf16 alltoall": [BF16, f"{EP}.dispatcher=alltoall"],
    "bf16 chunkmoe": [BF16],
    "big batch": [NO_AUX, "training.micro_batch_size=4"],
    "accumulation": [NO_AUX, "training.gradient_accumulation_steps=2"],
    "another seed": ["training.seed=7"],
}


def train(world_size, names):
    ranks = run_ranks(curves, world_size, {name: [*SMALL, *RUNS[name]] for name in names}, STEPS)
    assert all(rank == ranks[0] for rank in ranks)  # losses and norms are of all ranks
    return ranks[0]


@pytest.fixture(scope="module")
def runs():
    """[(loss, norm of the gradients), ...] of every run on two ranks, from one launch."""
    return train(2, RUNS)


def losses(run):
    return [loss for loss, _ in run]


def assert_close(run, other, rel):
    assert run == [pytest.approx(step, rel=rel) for step in other]


@pytest.mark.parametrize(
    "name", ["chunkmoe", "one chunk", "chunk size, pair", "recompute of experts", "no block recompute"]
)
def test_dispatchers_agree(runs, name):
    assert_close(runs[name], runs["alltoall"], rel=1e-5)


@pytest.mark.slow
def test_four_ranks_two_of_them_with_the_same_experts():
    four = train(4, ["alltoall", "chunkmoe", "again"])
    assert_close(four["chunkmoe"], four["alltoall"], rel=1e-5)
    assert four["again"] == four["chunkmoe"]


def test_loss_falls(runs):
    assert losses(runs["chunkmoe"])[-1] < losses(runs["chunkmoe"])[0] - 0.3


def test_the_seed_fixes_every_bit(runs):
    assert runs["again"] == runs["chunkmoe"]
    assert runs["another seed"] != runs["chunkmoe"]


def test_prefetch_changes_nothing(runs):
    assert runs["prefetch"] == runs["chunkmoe"]


def test_accumulation_is_a_bigger_batch(runs):
    assert_close(runs["accumulation"], runs["big batch"], rel=1e-5)


def test_bf16(runs):
    """bf16 keeps 8 bits: the loss may differ by one unit of its last place between dispatchers, by two from fp32."""
    fp32, alltoall, chunkmoe = (losses(runs[name]) for name in ("chunkmoe", "bf16 alltoall", "bf16 chunkmoe"))
    assert chunkmoe != fp32
    assert_close(chunkmoe, alltoall, rel=2**-8)
    assert_close(chunkmoe, fp32, rel=2**-7)


def launch(tmp_path, *overrides, nproc=None):
    """Run the command line; returns (stdout, metrics)."""
    metrics = tmp_path / "deep" / "metrics.jsonl"
    command = [*(torchrun(nproc) if nproc else [sys.executable]), "-m", "mindspeed_chunk.standalone", YAML, MODEL]
    done = subprocess.run(
        [*command, *SMALL, f"standalone.metrics_path={metrics}", *overrides],
        capture_output=True, text=True, timeout=HANG_S, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    for record in records:
        assert_record("metrics", record)
    return done.stdout, records


def test_command_line_on_two_ranks(tmp_path):
    stdout, metrics = launch(tmp_path, "training.train_iters=4", "training.log_interval=2", nproc=2)
    first, second = stdout.splitlines()
    assert re.fullmatch(
        r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] iteration        2/       4 \| consumed samples:            8 \| "
        r"elapsed time per iteration \(ms\): \d+\.\d \| learning rate: 1\.000000E-03 \| global batch size:     4 \| "
        r"loss: \d\.\d{6}E\+00 \| aux loss: \d\.\d{6}E\+00 \| grad norm: \d+\.\d{3} \|",
        first,
    )
    assert " iteration        4/       4 |" in second
    assert [record["iteration"] for record in metrics] == [1, 2, 3, 4]
    assert all({"loss", "aux_loss", "grad_norm", "elapsed_ms"} <= set(record) for record in metrics)
    # the recompute of the block has the plan of the forward
    forward = {"all_gather": 1, "host_copy": 1, "all_to_all": 8}
    assert [record.get("per_layer") for record in metrics] == [
        None, {"forward": forward, "recompute": {"all_to_all": 8}, "backward": {"all_to_all": 8}}, None, None,
    ]  # fmt: skip


def test_alone_without_torchrun(tmp_path):
    """One rank, `expert_parallel_size: 1`: no collective in a layer."""
    _, metrics = launch(tmp_path, "parallel.expert_parallel_size=1", "training.train_iters=2")
    assert metrics[1]["loss"] < metrics[0]["loss"]
    assert "all_to_all" not in metrics[1]["per_layer"]["forward"]


def test_weights_of_a_checkpoint(tmp_path):
    """A folder with safetensors gives its own weights, whatever the seed."""
    made = prepare(read()).model
    made.save_pretrained(tmp_path)
    loaded = prepare(read(f"model.model_name_or_path={tmp_path}", "training.seed=7")).model
    expected = made.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    assert not torch.equal(prepare(read("training.seed=7")).model.lm_head.weight, made.lm_head.weight)
