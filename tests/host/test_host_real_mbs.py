"""ChunkMBS in the stock trainer of a real MindSpeed-MM: the same numbers as without it, where the host's own has none.

Runs where test_host_real.py does. `-s` shows the figures.
"""

import re
import subprocess
import sys

import pytest

from launcher import HANG_S
from real_host import EXAMPLE, RealHost, environment, trainer_file, write_config
from test_host_real import ALLTOALL, BF16, CHUNK_MBS, N2, OFFLOAD, PLAN, show

STEPS = 5
CHUNK_PLAN = CHUNK_MBS["features.chunkmbs_plan"]
# what the stock 35B yaml has beside ChunkMBS; recompute is in the example's yaml already
STOCK = {
    **OFFLOAD,
    "parallel.fsdp_plan.num_to_forward_prefetch": 1,
    "parallel.fsdp_plan.num_to_backward_prefetch": 1,
    "features.enable_chunk_loss": True,
    "features.chunkloss_plan": {"apply_module": "lm_head", "chunk_size": 32},
    # whole batches of 4, validated by batches of 1: the host's own sampler has none for validation
    "data.dataset_param.dataset_type": "batched_text",
    "data.val_dataset_param": {
        "dataset_type": "single_text",
        "basic_parameters": {"cutoff_len": 48, "dataset": "none", "dataset_dir": "."},
        "preprocess_parameters": {"model_name_or_path": str(EXAMPLE / "tiny")},
    },
    "data.dataloader_param.dataloader_mode": "base",
    "data.dataloader_param.sampler_type": "none",
    "data.dataloader_param.collate_param": {"collator_id": "only_item"},
    "training.val_interval": 2,
    "training.val_micro_batch_size": 1,
}
UNEVEN = {key: value for key, value in STOCK.items() if not key.startswith(("data.", "training."))}
UNEVEN["training.micro_batch_size"] = 5
MTP = {
    "parallel.fsdp_plan.apply_modules": [
        "model.visual",
        "model.visual.blocks.{*}",
        "model.language_model.embed_tokens",
        "model.language_model",
        "model.language_model.layers.{*}",
        "model.language_model.layers.{*}.mlp.experts",
        "mtp.layers.{*}.mlp.experts",
        "lm_head",
        "mtp",
    ],
    f"{PLAN}.apply_modules": ["model.language_model.layers.{*}.mlp.experts", "mtp.layers.{*}.mlp.experts"],
    "model.mtp_num_layers": 1,
}
SKIPS = "features.skip_moe_pad_tokens"
DISPATCHERS = {"alltoall": ALLTOALL, "chunkmoe": N2}
both = pytest.mark.parametrize("dispatcher", DISPATCHERS)


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    host = RealHost(tmp_path_factory.mktemp("host"))
    yield host
    host.close()


def knows(key, file="feature_args.py"):
    return key in (trainer_file().parents[1] / "params" / file).read_text()


def assert_same(host, name, dispatcher="alltoall", common=(), mbs=CHUNK_MBS, limit=1e-5):
    """With ChunkMBS as without it, the latter with alltoall. Returns both runs."""
    common = {**STOCK, **dict(common)}
    run = host.train({**common, **DISPATCHERS.get(dispatcher, {}), **mbs}, steps=STEPS)
    plain = host.train({**common, **ALLTOALL}, steps=STEPS)
    assert "ChunkMBS is on, for 4 modules" in run.log and "ChunkMBS is on" not in plain.log
    assert ("Chunk MoE is on" in run.log) is (dispatcher == "chunkmoe")
    figures = show(f"ChunkMBS, {dispatcher}, {name}", run, plain)
    assert max(figures) < limit
    assert len(run.validation) == 2 and run.validation == pytest.approx(plain.validation, rel=limit)
    return run, plain


@both
def test_stock_settings(host, dispatcher):
    run, plain = assert_same(host, "stock", dispatcher)
    assert "mindspeed_chunk: ChunkMBS cuts hidden_states, position_embeddings[0], " in run.log
    assert min(run.collectives[0]) > 0
    assert run.collectives == plain.collectives, "a unit was gathered, or its gradients scattered, more than once"


def test_a_batch_that_does_not_divide(host):
    run, plain = (host.train({**UNEVEN, **ALLTOALL, **mbs}, steps=STEPS) for mbs in (CHUNK_MBS, {}))
    assert max(show("ChunkMBS, 5 samples by 2", run, plain)) < 1e-5


@both
def test_padded_batches(host, dispatcher):
    """Every layer gets a mask that the stock list of names does not hold."""
    common = {"data.dataset_param.dataset_type": "padded_batches", **({SKIPS: True} if knows(SKIPS[9:]) else {})}
    run, _ = assert_same(host, "padded, skipped" if SKIPS in common else "padded", dispatcher, common)
    assert not knows(SKIPS[9:]) or re.search("ChunkMBS cuts .*seq_mask", run.log)


@both
def test_auxiliary_loss(host, dispatcher):
    common = {"features.loss_cfg.loss_type": "default", "features.loss_cfg.router_aux_loss_coef": 0.1}
    run, plain = assert_same(host, "auxiliary loss", dispatcher, common)
    assert len(run.losses[0]) == 2, "no auxiliary loss was told"
    without = host.train({**STOCK, **ALLTOALL}, steps=STEPS)
    assert abs(plain.norms[0] / without.norms[0] - 1) > 1e-4, "it has no gradient to speak of"


@pytest.mark.parametrize("name, settings", [("stock", STOCK), ("5 samples by 2", UNEVEN), ("MTP", {**STOCK, **MTP})])
def test_allgather(host, name, settings):
    """The host's dispatcher, but for its eager end, which raises on a CPU with or without ChunkMBS.

    An uneven batch, and a layer that has the whole one, change the rows that the host has noted.
    """
    allgather = {**settings, f"{PLAN}.dispatcher": "allgather"}
    run, plain = (host.train({**allgather, **mbs}, steps=STEPS) for mbs in (CHUNK_MBS, {}))
    assert max(show(f"ChunkMBS, allgather, {name}", run, plain)) < 1e-5
    assert len(run.losses[0]) == (2 if name == "MTP" else 1)


def test_bf16(host):
    """The sums of the weights' gradients are rounded once more often; steps of 1 in 256."""
    run, plain = (host.train({**STOCK, **BF16, **ALLTOALL, **mbs}, steps=STEPS) for mbs in (CHUNK_MBS, {}))
    loss, norm, *_ = show("ChunkMBS, alltoall, bf16", run, plain)
    assert loss < 2e-3 and norm < 2e-2
    assert run.losses[0] == pytest.approx(plain.losses[0], rel=1e-6), "the forward is the same"


def test_no_positions_named(host):
    mbs = {**CHUNK_MBS, "features.chunkmbs_plan": {**CHUNK_PLAN, "chunk_arg_indexs": [], "chunk_kwarg_names": []}}
    assert_same(host, "nothing named", mbs=mbs)


def test_a_wrong_batch_dim_is_an_error_on_all_ranks(host):
    mbs = {**CHUNK_MBS, "features.chunkmbs_plan": {**CHUNK_PLAN, "batch_dim": 1}}
    with pytest.raises(AssertionError) as caught:
        host.train({**STOCK, **ALLTOALL, **mbs}, steps=STEPS)
    told = re.findall(r"CannotCut: ChunkMBS, model.language_model.layers.0: (.*)", str(caught.value))
    assert len(told) == 2 and set(told) == {
        "features.chunkmbs_plan.batch_dim: 1: hidden_states is [4, 64, 96], and a batch has 1 or 4 samples; set it to 0"
    }


def test_the_hosts_own_is_bit_equal_to_a_run_without_the_plugin(host, tmp_path):
    without = RealHost(tmp_path, plain=True)
    try:
        plain = without.train({**STOCK, **ALLTOALL, **CHUNK_MBS}, steps=STEPS)
    finally:
        without.close()
    run = host.train({**STOCK, **ALLTOALL, **CHUNK_MBS}, steps=STEPS, environ={"MINDSPEED_CHUNK_MBS": "host"})
    assert run.losses == plain.losses and run.norms == plain.norms
    assert not run.frames and "MINDSPEED_CHUNK_MBS=host: the host's own ChunkMBS runs" in run.log


READ = """
import sys, torch
from mindspeed_mm.config.config_manager import ConfigManager
for path in sys.argv[1:]:
    try:
        ConfigManager(config_file_path=path).load_and_parse()
        print("told", None)
    except SystemExit as end:
        print("told", end.code)
    except Exception as error:
        print("told", type(error).__name__)
assert not torch.distributed.is_initialized()
"""


def read(paths, folder, WORLD_SIZE="2"):
    """What became of each yaml: None, or how it ended."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": WORLD_SIZE}
    done = subprocess.run(
        [sys.executable, "-c", READ, *paths],
        env=environment(**ranks),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [line.removeprefix("told ") for line in done.stdout.splitlines() if line.startswith("told ")]


# settings, and the one line's beginning; of the host's own: its error's name
WRONG = [
    ({}, None),
    ({"chunk_arg_indexs": []}, None),
    ({"chunk_mbs": 0}, "mindspeed_chunk: features.chunkmbs_plan.chunk_mbs: 0: must be an integer >= 1"),
    ({"chunk_kwarg_names": None}, "ConfigValidationError"),
    ({"apply_modules": None}, "ConfigValidationError"),
    ({"apply_modules": ["model.visual.blocks.{*}"]}, "mindspeed_chunk: features.chunkmbs_plan.apply_modules: ['model"),
    ({"parallel.fsdp_plan.hook_modules": []}, "mindspeed_chunk: parallel.fsdp_plan.hook_modules: []: "),
    (
        {"features.loss_cfg.router_aux_loss_offload": True},
        "mindspeed_chunk: features.loss_cfg.router_aux_loss_offload: True: ",
    ),
    # last, for the host remembers keys that it does not know
    ({"chunk_kwargs_names": []}, "mindspeed_chunk: features.chunkmbs_plan.chunk_kwargs_names: []: unknown key"),
]


def test_a_wrong_setting_is_one_line_before_anything_starts(tmp_path):
    paths = []
    for number, (settings, _) in enumerate(WRONG):
        plan = {key: value for key, value in settings.items() if "." not in key}
        others = {key: value for key, value in settings.items() if "." in key}
        mbs = {"features.enable_chunk_mbs": True, "features.chunkmbs_plan": {**CHUNK_PLAN, **plan}}
        paths.append(str(write_config(tmp_path / f"{number}.yaml", {**OFFLOAD, **ALLTOALL, **mbs, **others})))
    told = read(paths, tmp_path)
    assert len(told) == len(WRONG), told
    for (settings, expected), line in zip(WRONG, told):
        assert line.startswith(str(expected)), (settings, told)


def test_the_hosts_own_yamls_are_read(tmp_path):
    """All that turn ChunkMBS on."""
    root = trainer_file().parents[3]
    paths = [
        str(path)
        for path in sorted((root / "examples").rglob("*.yaml"))
        if re.search(r"^\s+enable_chunk_mbs: true", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert paths
    assert read(paths, tmp_path, WORLD_SIZE="16") == ["None"] * len(paths)
