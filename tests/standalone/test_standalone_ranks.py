"""Ranks of the embedded trainer's command line that are given different settings."""

import contextlib
import io
import os

import pytest
import torch.distributed as dist

from launcher import run_ranks
from mindspeed_chunk.standalone import __main__ as command_line
from mindspeed_chunk.tools.ranks import reserved_port
from standalone_ranks import MODEL, YAML

EP = "parallel.ep_plan"
SHORT = ["training.train_iters=1", "training.micro_batch_size=2", "data.dataset_param.basic_parameters.cutoff_len=16"]
SAME = "error: every rank must run the same configuration, but "
CURE = "; start all ranks with the same yaml, arguments, environment and version of the plugin\n"
CASES = {
    "recompute": (["features.recompute=false"], "features.recompute: True on rank 0, False on rank 1; "),
    "dispatcher": ([f"{EP}.dispatcher=alltoall"], f"{EP}.dispatcher: 'chunkmoe' on rank 0, 'alltoall' on rank 1;"),
    "ChunkMBS": (["features.enable_chunk_mbs=true"], "features.enable_chunk_mbs: False on rank 0, True on rank 1; "),
    "accumulation": (
        ["training.gradient_accumulation_steps=2"],
        "training.gradient_accumulation_steps: 1 on rank 0, 2 on rank 1; ",
    ),
    "batch size": (["training.micro_batch_size=4"], "training.micro_batch_size: 2 on rank 0, 4 on rank 1; "),
    "chunks": ([f"{EP}.moe_num_chunks=3"], f"{EP}.moe_num_chunks: 4 on rank 0, 3 on rank 1; "),
    "seed": (["training.seed=7"], "training.seed: 42 on rank 0, 7 on rank 1; "),
    "what may differ": (["training.log_interval=2"], None),
}


def starts(rank, world_size, cases, ports):
    """Exit code and stderr of the command line for each of `cases` {name: (rank, its arguments, the others')}."""
    told = {}
    for (name, (odd, own, others)), port in zip(cases.items(), ports, strict=True):
        dist.destroy_process_group()
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            code = command_line.main([YAML, MODEL, *SHORT, *(own if rank == odd else others)])
        told[name] = code, stderr.getvalue()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return told


def run_starts(world_size, cases):
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(reserved_port()) for _ in cases]
        return run_ranks(starts, world_size, cases, ports)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return run_starts(2, {name: (1, own, []) for name, (own, _) in CASES.items()})


@pytest.mark.parametrize("name", CASES)
def test_a_rank_with_other_settings_ends_both_with_one_line(told, name):
    """As it was, each of the first three hung: in a backward, in the first layer, before the first iteration."""
    expected = CASES[name][1]
    first, second = (rank[name] for rank in told)
    assert first == second, "every rank tells it"
    if expected is None:
        assert first == (0, "")
    else:
        code, stderr = first
        assert code == 2 and stderr.startswith(SAME) and expected in stderr and stderr.endswith(CURE)
        assert stderr.count("\n") == 1


def test_one_of_four_ranks_and_what_a_metrics_file_holds_stays(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("of another run\n")
    ours = [f"standalone.metrics_path={metrics}"]
    ranks = run_starts(4, {"recompute": (2, [*ours, "features.recompute=false"], ours)})
    assert len({rank["recompute"] for rank in ranks}) == 1
    code, stderr = ranks[0]["recompute"]
    assert code == 2 and "features.recompute: True on ranks 0-1, 3, False on rank 2; " in stderr
    assert metrics.read_text() == "of another run\n"
