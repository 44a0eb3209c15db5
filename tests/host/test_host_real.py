"""The stock trainer of a real MindSpeed-MM, tiny Qwen3.5-MoE, CPU ranks: Chunk MoE trains as plain all-to-all does.

Runs where MINDSPEED_HOME and MINDSPEED_MM_HOME name checkouts, in an environment with what they import (torch 2.7.1;
see the example's requirements-host.txt). `-s` shows the figures.
"""

import json
import re
import shutil
import subprocess
import sys

import pytest

import real_host
from launcher import HANG_S
from real_host import EXAMPLE, RECORD, RealHost, environment, trainer_file, write_config

real_host.need()

PLAN = "parallel.ep_plan"
ALLTOALL = {f"{PLAN}.dispatcher": "alltoall"}
N2 = {f"{PLAN}.moe_num_chunks": 2}
N4 = {f"{PLAN}.moe_num_chunks": 4}
BLOCKS = ["model.language_model.layers.{*}"]
CHUNK_MBS = {
    "features.enable_chunk_mbs": True,
    "features.chunkmbs_plan": {
        "apply_modules": BLOCKS,
        "chunk_mbs": 2,
        "batch_dim": 0,
        "chunk_arg_indexs": [0],
        "chunk_kwarg_names": ["position_embeddings", "position_ids", "rope_deltas", "attention_mask"],
    },
}
OFFLOAD = {"features.enable_activation_offload": True, "features.activation_offload_plan": {"apply_modules": BLOCKS}}
BF16 = {"parallel.fsdp_plan.param_dtype": "bf16"}


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    host = RealHost(tmp_path_factory.mktemp("host"))
    yield host
    host.close()


def distance(run, other, first=None):
    """Largest relative differences of losses (the MTP layer's too) and of gradient norms."""
    assert len(run.losses) == len(other.losses) > 0

    def largest(values, references):
        return max(abs(value - reference) / abs(reference) for value, reference in zip(values, references))

    losses = [[loss for step in each.losses[:first] for loss in step] for each in (run, other)]
    return largest(*losses), largest(run.norms[:first], other.norms[:first])


def show(name, run, other):
    """Loss and norm of the first 5 steps, then of all."""
    figures = (*distance(run, other, 5), *distance(run, other))
    printed = "  ".join(f"{figure:.1e}" for figure in figures)
    print(f"\n{name}: loss and norm, steps 1-5, then all {len(run.losses)}: {printed}")
    return figures


def assert_same_training(host, name, chunks, common, **how):
    run, plain = host.train({**common, **chunks}, **how), host.train({**common, **ALLTOALL}, **how)
    assert "Chunk MoE is on" in run.log and run.frames
    assert "Chunk MoE is on" not in plain.log and not plain.frames
    figures = show(name, run, plain)
    assert max(figures[:2]) < 1e-5 and max(figures[2:]) < 1e-4


@pytest.mark.parametrize(
    "name, chunks",
    [
        ("N=2", N2),
        ("N=4", N4),
        ("moe_chunk_size=100", {f"{PLAN}.moe_num_chunks": None, f"{PLAN}.moe_chunk_size": 100}),
        ("N=4, shared expert overlapped", {**N4, f"{PLAN}.chunk_moe_overlap_shared_expert": True}),
        ("N=4, recompute", {**N4, f"{PLAN}.chunk_moe_recompute": True}),
    ],
)
def test_two_ranks(host, name, chunks):
    assert_same_training(host, name, chunks, {})


def test_four_ranks_two_of_them_expert_parallel(host):
    """Few tokens, and a seed without a token whose last chosen and next expert tie to the last bit.

    Such a token takes the other expert under any other order of sums, and the loss moves by 1e-5 at once.
    """
    common = {
        "training.micro_batch_size": 2,
        "training.seed": 1,
        "data.dataset_param.basic_parameters.cutoff_len": 32,
    }
    assert_same_training(host, "4 ranks, EP=2", N4, common, ranks=4)


@pytest.fixture(scope="module")
def all_linear(tmp_path_factory):
    """The example's model with linear attention in every layer: on a CPU the host's Ulysses knows no other."""
    folder = tmp_path_factory.mktemp("linear")
    config = json.loads((EXAMPLE / "tiny" / "config.json").read_text())
    config["text_config"]["layer_types"] = ["linear_attention"] * config["text_config"]["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    return {
        "model.model_name_or_path": str(folder),
        "data.dataset_param.preprocess_parameters.model_name_or_path": str(folder),
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_sequences_split_by_ulysses_and_experts_by_ep(host, all_linear, ranks):
    """The same two ranks share a sequence and exchange the rows of its tokens."""
    ulysses = {**all_linear, "parallel.ulysses_parallel_size": 2, "training.micro_batch_size": 2}
    assert_same_training(host, f"{ranks} ranks, Ulysses 2, EP 2", N4, ulysses, ranks=ranks, steps=8)
    whole = host.train({**ulysses, **ALLTOALL, "parallel.ulysses_parallel_size": 1}, ranks=ranks, steps=1)
    split = host.train({**ulysses, **ALLTOALL}, ranks=ranks, steps=8)
    assert whole.losses[0] != split.losses[0], "every rank trained on sequences of its own"


def test_with_the_hosts_chunk_mbs_and_offload(host):
    own = {"MINDSPEED_CHUNK_MBS": "host"}
    assert_same_training(host, "the host's ChunkMBS, offload", N2, {**CHUNK_MBS, **OFFLOAD}, environ=own)


def test_with_the_other_kind_of_recompute(host):
    """`use_reentrant: true`: torch's checkpoint then takes no `context_fn`, and its forward runs without gradients."""
    assert_same_training(host, "reentrant recompute", N2, {"features.recompute_plan.use_reentrant": True})


def test_with_prefetch_chunk_loss_and_mtp(host):
    plan = {
        "parallel.fsdp_plan.num_to_forward_prefetch": 1,
        "parallel.fsdp_plan.num_to_backward_prefetch": 1,
        "parallel.fsdp_plan.apply_modules": [
            "model.visual",
            "model.visual.blocks.{*}",
            "model.language_model.embed_tokens",
            "model.language_model",
            *BLOCKS,
            "model.language_model.layers.{*}.mlp.experts",
            "mtp.layers.{*}.mlp.experts",
            "lm_head",
            "mtp",
        ],
        f"{PLAN}.apply_modules": ["model.language_model.layers.{*}.mlp.experts", "mtp.layers.{*}.mlp.experts"],
        "features.enable_chunk_loss": True,
        "features.chunkloss_plan": {"apply_module": "lm_head", "chunk_size": 32},
        "model.mtp_num_layers": 1,
    }
    assert_same_training(host, "prefetch 1, chunk loss, MTP", N4, plan)
    assert len(host.train({**plan, **N4}).losses[0]) == 2


def test_padded_batches_and_gradient_accumulation(host):
    common = {"data.dataset_param.dataset_type": "padded_text", "training.gradient_accumulation_steps": 2}
    known = "skip_moe_pad_tokens" in (trainer_file().parents[1] / "params" / "feature_args.py").read_text()
    if known:
        common["features.skip_moe_pad_tokens"] = True
    assert_same_training(host, f"padded batches{', skipped' if known else ''}, accumulation 2", N4, common)


def test_bf16(host):
    """Any other rounding changes bf16, ours too: no more than twice as much as alltoall differs from itself.

    It differs from itself in another order of sums (gradients, with ChunkMBS), and in fp32: the host rounds each
    weighted row before a token's rows are summed, we round their sum, with a row per rank once more. Over 12 steps:
    later a near tie of a router may change a gradient by a tenth, on some CPUs and with some seeds.
    """
    exact, plain = host.train(ALLTOALL, steps=12), host.train({**BF16, **ALLTOALL}, steps=12)
    ordered = host.train({**BF16, **ALLTOALL, **CHUNK_MBS}, steps=12)
    yardsticks = [
        show("bf16, alltoall with ChunkMBS against alltoall", ordered, plain),
        show("bf16, alltoall against alltoall in fp32", plain, exact),
    ]
    allowed = [2 * max(values) for values in zip(*yardsticks)]
    for name, chunks in (("N=2", N2), ("N=4", N4)):
        figures = show(f"bf16, {name} against alltoall", host.train({**BF16, **chunks}, steps=12), plain)
        assert all(value <= limit for value, limit in zip(figures, allowed))


def test_validation_in_the_middle(host):
    common = {
        "data.dataset_param.dataset_type": "batched_text",
        "data.val_dataset_param": {
            "dataset_type": "batched_text",
            "basic_parameters": {"cutoff_len": 48, "dataset": "none", "dataset_dir": "."},
            "preprocess_parameters": {"model_name_or_path": str(EXAMPLE / "tiny")},
        },
        "data.dataloader_param.dataloader_mode": "base",
        "data.dataloader_param.sampler_type": "none",
        "data.dataloader_param.collate_param": {"collator_id": "only_item"},
        "training.val_interval": 3,
    }
    assert_same_training(host, "validation", N4, common, steps=6)
    ours, plain = (host.train({**common, **each}, steps=6).validation for each in (N4, ALLTOALL))
    assert len(ours) == 2 and ours == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("name, saves, resumes", [("alltoall to N=4", ALLTOALL, N4), ("N=4 to alltoall", N4, ALLTOALL)])
def test_a_checkpoint_of_one_resumes_with_the_other(host, tmp_path, name, saves, resumes):
    everything = {f"training.no_{way}_{what}": False for way in ("save", "load") for what in ("optim", "rng")}
    save = {"training.save": str(tmp_path), "training.save_interval": 4, "training.save_format": "dcp"}
    if "save_format" not in (trainer_file().parents[1] / "params" / "training_args.py").read_text():
        del save["training.save_format"]
    unbroken = host.train({**saves, **everything, **save}, steps=8)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")  # as after a break
    resumed = host.train({**resumes, **everything, "training.load": str(tmp_path)}, steps=8)
    assert len(resumed.losses) == 4
    unbroken.losses, unbroken.norms = unbroken.losses[4:], unbroken.norms[4:]
    assert max(show(f"checkpoint, {name}", resumed, unbroken)) < 1e-5
    shutil.rmtree(tmp_path)


def test_the_same_seed_twice_is_bit_equal(host):
    one, two = host.train(N4), host.train(N4, again=True)
    assert one is not two and one.losses == two.losses and one.norms == two.norms


def test_alltoall_is_bit_equal_to_a_run_without_the_plugin(host, tmp_path):
    without = RealHost(tmp_path, plain=True)
    try:
        run, plain = host.train(ALLTOALL), without.train(ALLTOALL)
    finally:
        without.close()
    assert run.losses == plain.losses and run.norms == plain.norms
    assert not run.frames and not plain.frames


@pytest.mark.parametrize(
    "common, own, line",
    [
        (N2, {"features.recompute": False}, "features.recompute: True on rank 0, False on rank 1"),
        (N2, ALLTOALL, "parallel.ep_plan.dispatcher: 'chunkmoe' on rank 0, 'alltoall' on rank 1"),
        (
            {**CHUNK_MBS, **ALLTOALL},
            {"features.enable_chunk_mbs": False},
            "features.enable_chunk_mbs: True on rank 0, False on rank 1",
        ),
        (
            N2,
            {"training.gradient_accumulation_steps": 2},
            "training.gradient_accumulation_steps: 1 on rank 0, 2 on rank 1",
        ),
    ],
    ids=["recompute", "dispatcher", "ChunkMBS", "accumulation"],
)
def test_ranks_with_different_yamls_end_with_one_line_that_says_what_differs(host, common, own, line):
    """On every rank that asks for a feature of ours; the other one ends because its peer has."""
    common = {**common, "training.train_iters": 2}
    _, codes, logs = host.start([common, {**common, **own}])
    assert all(codes)
    told = f"SystemExit: mindspeed_chunk: every rank must run the same configuration, but {line}; start all ranks "
    asks = [0] if "dispatcher" in line or "chunk_mbs" in line else [0, 1]
    assert [rank for rank, log in enumerate(logs) if told in log] == asks, logs[0][-3000:]
    assert not any("iteration " in log for log in logs)


READ_35B = """
import sys
import mindspeed_mm.fsdp.models.qwen3_5_moe.modeling_qwen3_5_moe
from mindspeed_mm.config.config_manager import ConfigManager
from mindspeed_mm.fsdp.utils.register import model_register
from transformers import AutoConfig

tiny, *files = sys.argv[1:]
del sys.argv[1:]  # the host would read them as keys
for file in files:
    told = ConfigManager(config_file_path=file).load_and_parse()
    model = model_register.get(told.model.model_id)
    # the values of the model section are looked at here only
    model.overwrite_transformer_config(AutoConfig.from_pretrained(tiny), told.model, told.features)
    print("read", file)
"""


def test_the_files_for_the_35b_are_read(tmp_path):
    """By the host, by our checks at start, and by the host's model; their weights and data are not there."""
    files = [str(EXAMPLE / name) for name in ("qwen3_5_35b_npu.yaml", "qwen3_5_35b_npu_memory.yaml")]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "16"}
    done = subprocess.run(
        [sys.executable, "-c", READ_35B, str(EXAMPLE / "tiny"), *files],
        env=environment(**ranks),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert [line for line in done.stdout.splitlines() if line.startswith("read ")] == [f"read {file}" for file in files]


def test_torchrun_as_a_user_starts_it(host, tmp_path):
    config = write_config(tmp_path / "config.yaml", {**N4, "training.train_iters": 3})
    record = tmp_path / "record.jsonl"
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(trainer_file()), str(config)]
    done = subprocess.run(
        [sys.executable, *command],
        env=environment(**{RECORD: str(record)}),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    log = done.stdout + done.stderr
    assert "MindSpeed-MM runs on the CPU" in log and "Chunk MoE is on" in log
    for (loss,) in host.train(N4).losses[:3]:
        assert f"loss: {loss:.6E}" in log


@pytest.mark.parametrize(
    "overrides, line",
    [
        ({f"{PLAN}.moe_num_chunk": 4}, "parallel.ep_plan.moe_num_chunk: 4: .*moe_num_chunks.*"),
        ({"features.enable_ep_balance": True}, "features.enable_ep_balance: True: .*"),
    ],
)
def test_a_users_error_is_one_line(tmp_path, overrides, line):
    config = write_config(tmp_path / "config.yaml", overrides)
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, str(trainer_file()), str(config)],
        env=environment(**ranks),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    *_, last = done.stderr.strip().splitlines()
    assert re.fullmatch(f"mindspeed_chunk: {line}", last), done.stderr
