"""The planner's parts, its command line, and what it refuses."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
import yaml

from json_records import assert_record
from launcher import HANG_S
from mindspeed_chunk.config import ChunkMBSConfig, ChunkMoEConfig, ConfigError
from mindspeed_chunk.hardware import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, collective_seconds
from mindspeed_chunk.known_devices import DEVICES
from mindspeed_chunk.planner import (
    GroupShape,
    LayerShape,
    Link,
    Sharding,
    balanced_rows,
    best_num_chunks,
    chunk_times,
    exchanges,
    expert_memory,
    load_device,
    load_model,
    state_bytes,
)
from mindspeed_chunk.planner.activations import POLICIES, BlockBytes, activations
from mindspeed_chunk.planner.compare.recipes import RECIPES
from mindspeed_chunk.planner.compare.ring import ring_problem
from mindspeed_chunk.planner.estimate import Estimator
from mindspeed_chunk.planner.fragments import fragments
from mindspeed_chunk.planner.layout import Layout
from mindspeed_chunk.planner.model import BUILT_IN
from mindspeed_chunk.planner.recommend import candidates, recommend
from mindspeed_chunk.planner.sequence import ulysses_problem
from mindspeed_chunk.planner.setting import Job, Setting
from mindspeed_chunk.planner.traffic import fsdp_traffic
from standalone_ranks import EXAMPLE

TINY = str(EXAMPLE / "tiny")
SHAPE = LayerShape(tokens=16384, hidden=2048, intermediate=512, experts=256, top_k=8, ep=8, element_size=2)
REST = "flops_bf16: 1, memory_gb_per_s: 1, intra_gb_per_s: 1, inter_gb_per_s: 1"
FEW = ("--nodes", "1", "--devices-per-node", "2", "--device", "h100")


def job(model="35b", device="ascend-910c", nodes=8, **changes):
    given = {"recipe": RECIPES["bf16-fsdp2"], "global_batch": 256, **changes}
    return Job(model=load_model(model), device=load_device(device), nodes=nodes, devices_per_node=8, **given)


def plan(*words):
    command = [sys.executable, "-m", "mindspeed_chunk.tools", "plan", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)


@pytest.mark.parametrize("name", [TINY, *BUILT_IN])
def test_parameters_are_transformers_own(name, tmp_path):
    """By name and shape, of the model on the meta device."""
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    if name != TINY:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", **BUILT_IN[name]}))
    config = Qwen3_5MoeConfig.from_pretrained(TINY if name == TINY else tmp_path)
    with torch.device("meta"):
        model = Qwen3_5MoeForConditionalGeneration._from_config(config)
    expected = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
    assert {parameter.name: parameter.shape for parameter in load_model(name).parameters()} == expected


def test_the_built_in_models_have_the_sizes_in_their_names():
    for name, total, active in (("35b", 35, 3), ("122b", 122, 10), ("397b", 397, 17)):
        model = load_model(name)
        assert round(model.num_parameters() / 1e9) == pytest.approx(total, abs=1)
        assert int(model.num_active() / 1e9) in (active - 1, active)
        assert model.source.startswith("https://huggingface.co/Qwen/Qwen3.5-") and model.source.endswith(f"-A{active}B")


def test_planner_needs_no_torch():
    code = (
        "import sys; import mindspeed_chunk.planner, mindspeed_chunk.planner.report; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_S)


def test_every_device_names_its_sources_and_a_file_has_units(tmp_path):
    assert all(device.sources for device in DEVICES.values())
    file = tmp_path / "device.yaml"
    content = {"memory_gb": 2, "flops_fp32": 3, "memory_gb_per_s": 4, "intra_gb_per_s": 5, "inter_gb_per_s": 6}
    file.write_text(yaml.safe_dump({**content, "call_us": 7, "intra_messages": [[100, 1], [200, 3]]}))
    found = load_device(str(file))
    assert (found.memory, found.flops, found.memory_rate) == (2e9, {"fp32": 3e12}, 4e9)
    assert (found.inter.seconds(6e9), found.call) == (1.0, pytest.approx(7e-6))
    assert [found.intra.seconds(n) for n in (0, 100, 150, 200, 300)] == [0, 1, 2, 3, 5]
    with pytest.raises(ConfigError, match="no matrix unit"):
        found.rate("bf16")
    assert Link(rate=10, latency=2).seconds(5) == 2.5


def test_collectives_take_the_slower_link():
    device = load_device("h100")
    assert collective_seconds(ALL_GATHER, 450e9, GroupShape(8, 8), device) == pytest.approx(7 / 8)
    assert collective_seconds(ALL_GATHER, 450e9, GroupShape(64, 8), device) == pytest.approx(450 * 7 / 8 / 8 / 50)
    assert collective_seconds(ALL_REDUCE, 50e9, GroupShape(8, 1), device) == pytest.approx(2 * 7 / 8)
    assert collective_seconds(ALL_TO_ALL, 50e9, GroupShape(16, 8), device) == pytest.approx(1 / 2)
    assert collective_seconds(ALL_TO_ALL, 1e9, GroupShape(1, 1), device) == 0
    # two nodes of four and a fast link between: each device gets its mates' S / 4 inside, three times
    device = dataclasses.replace(device, inter=Link(rate=450e10))
    for kind, times in ((ALL_GATHER, 1), (REDUCE_SCATTER, 1), (ALL_REDUCE, 2)):
        assert collective_seconds(kind, 450e9, GroupShape(8, 4), device) == pytest.approx(times * 3 / 4)
        assert collective_seconds(kind, 450e9, GroupShape(8, 1), device) == pytest.approx(times * 7 / 8 / 10)


def test_all_ranks_shards_add_up_to_the_model():
    model = load_model(TINY)
    for sharding in (Sharding(8, 1), Sharding(8, 2), Sharding(6, 2, expert_dim=0)):
        totals = [state_bytes(model, sharding, RECIPES["fp32"], rank).parameters for rank in range(sharding.ranks)]
        assert sum(totals) == 4 * model.num_parameters()


def test_a_layers_memory_falls_with_what_is_kept_and_with_chunks_but_little_with_two():
    peaks = {n: expert_memory(SHAPE, num_chunks=n, keep="rows").peak for n in (1, 2, 4, 8)}
    assert peaks[1] > peaks[2] > peaks[4] > peaks[8] and peaks[2] > 0.75 * peaks[1]
    kept = [expert_memory(SHAPE, keep=keep).kept for keep in ("activations", "rows", "input")]
    rows, order = 16384 * 8, 16384 * 8 * 8
    assert kept == [rows * (2048 + 1024) * 2 + order, rows * 2048 * 2 + order, order]


def test_a_chunk_too_many_costs_more_than_it_hides():
    times = {n: chunk_times(SHAPE, load_device("ascend-910c"), num_chunks=n) for n in (1, 2, 4, 8, 32)}
    assert times[1].exposed > times[2].exposed > times[4].exposed > times[8].exposed
    assert times[4].total < times[1].total and times[32].total > times[4].total
    choice = best_num_chunks(SHAPE, load_device("ascend-910c"))
    assert choice.num_chunks == min(choice.times, key=lambda n: choice.times[n].total) or choice.num_chunks < 8
    least = best_num_chunks(SHAPE, load_device("ascend-910c"), max_bytes=choice.memory[8].peak)
    assert least.num_chunks == 8 == best_num_chunks(SHAPE, load_device("ascend-910c"), max_bytes=0).num_chunks


@pytest.mark.parametrize("keep, out", [("activations", 48), ("input", 64)])
def test_a_packed_row_has_one_width_in_bytes_and_in_time(keep, out):
    """9 numbers of 2 bytes: 18 bytes end at 32, two rows' 36 at 48; the tail has 16 more."""
    shape = LayerShape(tokens=8, hidden=9, intermediate=4, experts=2, top_k=1, ep=2, element_size=2)
    device = dataclasses.replace(load_device("h100"), intra=Link(rate=1))
    assert chunk_times(shape, device, keep=keep).backward.communication == 4 * (out + 48)  # half of 8 rows, and back
    assert exchanges(shape, num_chunks=1, keep=keep).sent == 4 * (18 + out + 48 + 18)


def test_more_ahead_hides_no_less_and_holds_more():
    ahead = (0, 1, 3)
    times = [chunk_times(SHAPE, load_device("ascend-910c"), num_chunks=8, lookahead=n).exposed for n in ahead]
    peaks = [expert_memory(SHAPE, num_chunks=8, lookahead=n).peak for n in ahead]
    assert times[0] > times[1] >= times[2] and peaks[0] < peaks[1] < peaks[2]


def test_imbalance_is_at_most_ep():
    """A rank receives all rows of its group at most; with EP=1 there are only its own."""
    for ep, imbalance, factor in ((1, 3.0, 1), (2, 3.0, 2), (4, 3.0, 3)):
        shape = LayerShape(**{**SHAPE.__dict__, "ep": ep})
        assert [rows.received for rows in balanced_rows(shape, 2, imbalance)] == [factor * 8192 * 8] * 2
    alone = Setting(layout=Layout(dp=64), micro_batch=4)
    even, skewed = (Estimator(job(imbalance=imbalance))(alone) for imbalance in (1.0, 3.0))
    assert (even.memory, even.seconds) == (skewed.memory, skewed.seconds)


def test_exchanges_of_a_recompute():
    plain = exchanges(SHAPE, num_chunks=4)
    again, unread = (exchanges(SHAPE, num_chunks=4, recompute=True, skip_unread=skip) for skip in (False, True))
    alone = exchanges(SHAPE, num_chunks=4, keep="input", recompute=True, skip_unread=True)
    assert [each.calls for each in (plain, unread, again, alone)] == [16, 20, 24, 16]
    assert exchanges(LayerShape(**{**SHAPE.__dict__, "ep": 1}), num_chunks=4) == (0, 0)


def test_every_pass_reduce_scatters_as_in_mindspeed_mm():
    """Its train step never calls set_requires_gradient_sync; the embedded trainer does, and reduces once a step."""
    model, sharding, recipe = load_model("35b"), Sharding(64, 8), RECIPES["bf16-fsdp2"]
    for kind in (ALL_GATHER, REDUCE_SCATTER):
        one, four, last = (
            [(c.calls, c.nbytes) for c in fsdp_traffic(model, sharding, recipe, passes, **how) if c.kind == kind]
            for passes, how in ((1, {}), (4, {}), (4, {"sync_every_pass": False}))
        )
        assert four == [(4 * calls, 4 * nbytes) for calls, nbytes in one]
        assert last == (four if kind == ALL_GATHER else one)
    # what a pass exposes, all of them do; the optimizer runs once, while the links are free
    given = job(device="h100")
    exposed = [
        Estimator(given)(Setting(layout=Layout(dp=64), accumulation=n)).seconds["exposed gathers"] for n in (1, 4)
    ]
    assert exposed[1] == pytest.approx(4 * exposed[0], rel=0.02) and exposed[0] > 0


def test_policies():
    block = BlockBytes(total=100, core=30, input=10)
    found = {policy: activations(policy, block, 16, core_share=0.1) for policy in POLICIES}
    assert [found[policy].kept for policy in POLICIES] == [1600, 1120, 160, 40, 20]
    assert found["sqrt"].working == 400 and found["offload"].host == 140
    assert [found[policy].again for policy in POLICIES] == [0, 0.1, 1, 1, 1]


def test_context_limits():
    model = load_model("35b")
    assert ulysses_problem(model, 8, 4096) is ulysses_problem(model, 1, 4096) is ring_problem(model, 1, 4096) is None
    assert "heads" in ulysses_problem(model, 3, 4095)
    assert "DeltaNet" in ring_problem(model, 2, 4096)
    assert "do not divide a sequence" in ulysses_problem(model, 8, 4097)


def test_fp16_needs_loss_scaling_and_bf16_none():
    assert [name for name, recipe in RECIPES.items() if recipe.loss_scaling] == ["fp16"]
    assert {name: recipe.kept for name, recipe in RECIPES.items()} == {
        "fp32": 16, "bf16-fsdp2": 16, "bf16-megatron": 18, "fp16": 16, "fp8-tensorwise": 18, "fp8-blockwise": 13,
    }  # fmt: skip


def test_the_recommendation_fits_is_the_fastest_and_says_why():
    given = job()
    estimator = Estimator(given)
    found = recommend(given, estimator)
    assert found.best.peak <= given.budget < given.device.memory
    assert all(each.peak <= given.budget for each in found.runners_up)
    # what was only counted comes last
    counted = [each.setting.policy == "none" for each in (found.best, *found.runners_up)]
    assert counted == sorted(counted) and not counted[0]
    measured = [each for each in found.runners_up if each.setting.policy != "none"]
    assert all(found.best.step <= 1.01 * each.step for each in measured)
    assert len({(each.setting.layout, each.setting.policy) for each in found.runners_up}) == 4
    assert any(f"EP={found.best.setting.layout.ep}" in line for line in found.why)
    unbalanced = recommend(job(imbalance=2.0))
    assert found.best.setting.layout.ep == unbalanced.best.setting.layout.ep == 1
    assert unbalanced.best.step == found.best.step and any("auxiliary loss" in line for line in unbalanced.why)
    across = recommend(job("122b", "ascend-910c-supernode", imbalance=2.0))
    assert across.best.setting.layout.ep > 1
    assert any("busiest rank's experts decide" in line for line in across.why)
    assert any("can ask for" in line for line in recommend(job(recipe=RECIPES["bf16-megatron"])).why)
    gone = recommend(job("397b"))
    assert gone.best is None and "Nothing fits" in gone.why[0]


@pytest.mark.parametrize("sequence", [4096, 32768])
def test_settings_that_are_not_timed_are_not_faster(sequence):
    """Where a setting fits, the same one with less kept is left out."""
    one = job(nodes=2, sequence=sequence)
    fitting = [each for each in map(Estimator(one), candidates(one)) if each.peak <= one.budget]
    found = recommend(one).of_layout
    for layout in {each.setting.layout for each in fitting}:
        of_layout = [each for each in fitting if each.setting.layout == layout]
        measured = [each for each in of_layout if each.setting.policy != "none"]
        fastest = min(each.step for each in measured or of_layout)
        assert fastest * (1 - 1e-9) <= found[layout].step <= fastest * (1.01 + 1e-9), layout


def test_the_yaml_is_one_that_the_features_take():
    setting = Setting(
        layout=Layout(ep=8, dp=64), micro_batch=4, chunk_mbs=2, policy="offload", num_chunks=4, keep="rows"
    )
    content = yaml.safe_load(fragments(job(), setting))
    chunk_moe = ChunkMoEConfig.from_mapping(content["parallel"]["ep_plan"])
    assert (chunk_moe.moe_num_chunks, chunk_moe.keep) == (4, "rows")
    assert ChunkMBSConfig.from_mapping(content["features"]["chunkmbs_plan"]).chunk_mbs == 2
    assert content["training"] == {"micro_batch_size": 4, "gradient_accumulation_steps": 1}
    assert content["features"]["recompute"] and content["features"]["enable_activation_offload"]


def test_a_frozen_vision_tower_is_frozen_in_the_yaml():
    """As the commented lines of MindSpeed-MM's Qwen3.5 examples have it; fsdp/models/modelhub.py reads it."""
    setting = Setting(layout=Layout(ep=8, dp=64))
    assert yaml.safe_load(fragments(job(train_vision=False), setting))["model"] == {"freeze": ["model.visual"]}
    assert "model" not in yaml.safe_load(fragments(job(), setting))


@pytest.mark.parametrize("batch, cp", [((1, 4, 0), 1), ((4, 1, 0), 1), ((8, 1, 2), 1), ((8, 1, 0), 8), ((3, 1, 0), 1)])
def test_logits_in_the_yaml_are_those_in_the_memory(batch, cp):
    """The head is cut along the sequence, so every sample of the micro batch has a chunk's logits at once."""
    setting = Setting(
        layout=Layout(cp=cp, dp=64 // cp), **dict(zip(("micro_batch", "accumulation", "chunk_mbs"), batch))
    )
    given = job(chunk_loss=1024)
    size = yaml.safe_load(fragments(given, setting))["features"]["chunkloss_plan"]["chunk_size"]
    at_once = setting.micro_batch * min(size, given.sequence // cp)
    assert 1024 - setting.micro_batch < at_once <= 1024
    assert Estimator(given)(setting).memory["head"] == at_once * given.model.vocab_size * (2 + 4 + 4)
    whole = setting.micro_batch * given.sequence // cp
    assert Estimator(job(chunk_loss=0))(setting).memory["head"] == whole * given.model.vocab_size * (2 + 4 + 4)


def test_the_command_prints_a_plan_and_json(tmp_path):
    page = tmp_path / "plan.html"
    done = plan(
        "--model",
        "35b",
        "--nodes",
        "8",
        "--devices-per-node",
        "8",
        "--device",
        "ascend-910c",
        "--json",
        "--html",
        str(page),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert_record("plan", report)
    titles = [each["title"].split(",")[0] for each in report["layouts"]]
    assert titles[1:3] == ["TP=8 DP=2 PP=4", "TP=4 DP=2 PP=8"]
    assert report["layouts"][1]["groups"]["pp"][0] == [0, 16, 32, 48]
    assert page.read_text().startswith("<!DOCTYPE html>")
    done = plan("--model", TINY, *FEW, "--sequence", "128", "--all")
    assert done.returncode == 0 and "for the yaml of MindSpeed-MM" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "words, told",
    [
        (("--model", "7b", *FEW), "--model: '7b'"),
        (("--model", str(EXAMPLE), *FEW), "config.json cannot be read"),
        (("--model", "35b", *FEW[:-1], "abacus"), "--device: 'abacus'"),
        (("--model", "35b", *FEW, "--global-batch", "3"), "--global-batch: 3"),
        (("--model", "35b", *FEW, "--nodes", "0"), "--nodes: 0"),
        (("--model", "35b", *FEW, "--precision", "int4"), "--precision: 'int4'"),
        (("--model", "35b", *FEW, "--precision", "fp32"), "--precision: 'fp32': h100 has no matrix unit"),
        (("--model", "35b", *FEW, "--imbalance", "0.5"), "--imbalance: 0.5"),
        (("--model", "35b", *FEW, "--imbalance", "inf"), "--imbalance: inf"),
        (("--model", "35b", *FEW, "--sequence", "7", "--global-batch", "1"), "no layout of 2 ranks"),
        (("--model", TINY, *FEW, "--html", "/no/such/folder/plan.html"), "--html"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line_and_exit_code_2(words, told, capsys, monkeypatch):
    from mindspeed_chunk.tools import plan as command

    monkeypatch.setattr(sys, "argv", ["plan", *words])
    assert command.main() == 2
    error = capsys.readouterr().err
    assert told in error and error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    "content, told",
    [
        ("[1]", "must be a mapping"),
        ("a: 1\n\tb: 2", "a tab where yaml allows only spaces"),
        ("memory_gb: 1", "is missing"),
        ("speed: 1", "unknown key"),
        (f"{{memory_gb: -1, {REST}}}", "must be a number of at least 0.001 and at most 1000000"),
        (f"{{memory_gb: 1, {REST}, intra_messages: [[1, 2]]}}", "at least two"),
    ],
)  # fmt: skip
def test_a_wrong_device_file_is_one_line(content, told, tmp_path):
    file = tmp_path / "device.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=told) as caught:
        load_device(str(file))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content, told",
    [
        ({"model_type": "llama"}, "model_type"),
        ({"model_type": "qwen3_5_moe", "text_config": {"hidden_size": "big"}}, "hidden_size"),
        ({"model_type": "qwen3_5_moe", "text_config": {"num_hidden_layers": 2, "layer_types": ["moe"]}}, "layer_types"),
        ([], "must be a mapping"),
    ],
)
def test_a_wrong_model_is_one_line(content, told, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=told) as caught:
        load_model(str(tmp_path))
    assert "\n" not in str(caught.value)
