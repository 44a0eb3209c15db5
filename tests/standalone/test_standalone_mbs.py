"""ChunkMBS in the embedded trainer: numbers and collectives of one big batch, memory of a micro-chunk."""

import functools

import pytest
import torch
import torch.distributed as dist

from launcher import run_ranks
from mindspeed_chunk.config import ChunkMBSConfig, ConfigError
from mindspeed_chunk.standalone.config import load_config
from mindspeed_chunk.standalone.prepare import prepare
from mindspeed_chunk.tools.measure import GATHER, REDUCE_SCATTER, Collectives, LiveBytes
from standalone_ranks import MODEL, YAML, curves, gradients, read, trainer

STEPS = {2: 3, 4: 2}  # benchmarks/loss_curves.py takes more
SHORT = "data.dataset_param.basic_parameters.cutoff_len=16"
AUX = "features.loss_cfg.router_aux_loss_coef"
LAYERS = "model.language_model.layers"


def batch(size, accumulation=1):
    return [f"training.micro_batch_size={size}", f"training.gradient_accumulation_steps={accumulation}", SHORT]


def chunk_mbs(size=1, offload=True, recompute=True):
    return [
        "features.enable_chunk_mbs=true",
        f"features.chunkmbs_plan.chunk_mbs={size}",
        f"features.enable_activation_offload={str(offload).lower()}",
        f"features.recompute={str(recompute).lower()}",
    ]


PLAIN = ["parallel.ep_plan.dispatcher=alltoall", "parallel.ep_plan.moe_num_chunks=0"]
LINEAR = [f"{AUX}=0"]  # without the balance loss, which is not linear in the batch
RUNS = {
    **{
        f"{name}, {dispatcher}": [*overrides, *extra]
        for dispatcher, extra in {"alltoall": [*PLAIN, *LINEAR], "chunkmoe": LINEAR}.items()
        for name, overrides in {
            "one batch": batch(4),
            "accumulation": batch(1, 4),
            "ChunkMBS": [*batch(4), *chunk_mbs()],
        }.items()
    },
    "one batch, balance": [*batch(4), f"{AUX}=0.1"],
    "ChunkMBS, balance": [*batch(4), f"{AUX}=0.1", *chunk_mbs(3)],
    "ChunkMBS, balance, nothing around": [*batch(4), f"{AUX}=0.1", *chunk_mbs(2, offload=False, recompute=False)],
    "ChunkMBS, balance, offload alone": [*batch(4), f"{AUX}=0.1", *chunk_mbs(1, recompute=False)],
}


def compared_with(name):
    return "one batch, balance" if "balance" in name else f"one batch,{name.rpartition(',')[2]}"


@functools.cache
def trained(world_size):
    runs = {name: run for name, run in RUNS.items() if world_size == 2 or "alltoall" not in name}
    return run_ranks(curves, world_size, runs, STEPS[world_size])[0]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_steps_equal_those_of_one_big_batch(world_size):
    told = trained(world_size)
    for name, curve in told.items():
        for (loss, norm), (expected, expected_norm) in zip(curve, told[compared_with(name)], strict=True):
            assert loss == pytest.approx(expected, rel=1e-5), name
            assert norm == pytest.approx(expected_norm, rel=1e-5), name
    assert told["one batch, chunkmoe"][-1][0] < told["one batch, chunkmoe"][0][0] - 0.1
    assert told["one batch, balance"] != told["one batch, chunkmoe"]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_gradient_equals_that_of_one_big_batch(world_size):
    names = ("one batch, chunkmoe", "ChunkMBS, chunkmoe", "accumulation, chunkmoe", "one batch, balance")
    names += ("ChunkMBS, balance", "ChunkMBS, balance, offload alone")
    for told in run_ranks(gradients, world_size, {name: RUNS[name] for name in names}):
        for name in names:
            expected = told[compared_with(name)]
            assert told[name]["losses"] == pytest.approx(expected["losses"], rel=1e-6)
            assert told[name]["grads"].keys() == expected["grads"].keys()
            # the decay of linear attention: small differences of large sums, next to nothing in the first layer
            scale = {key: grad.abs().max() for key, grad in expected["grads"].items()}
            for decay in ("A_log", "dt_bias", "in_proj_a.weight"):
                own = [key for key in scale if key.endswith(decay)]
                scale |= dict.fromkeys(own, max(scale[key] for key in own))
            for parameter, grad in expected["grads"].items():
                error = (told[name]["grads"][parameter] - grad).abs().max() / scale[parameter]
                assert error < 1e-5, (name, parameter, error)


def collectives(rank, world_size, runs):
    """FSDP2's calls and bytes in the second step of each run."""
    told = {}
    for name in runs:
        this = trainer(*RUNS[name])
        this.step(0)
        with Collectives() as seen:
            this.step(1)
        told[name] = dict(seen.calls), dict(seen.nbytes)
    return told


def test_parameters_are_gathered_once_a_direction_and_gradients_reduced_once():
    """Four ranks: an expert's unit spans the two that hold it, the others all four."""
    runs = ["accumulation, chunkmoe", "ChunkMBS, chunkmoe", "ChunkMBS, alltoall", "ChunkMBS, balance, nothing around"]
    for told in run_ranks(collectives, 4, runs, fill_nan=False):
        for name, (calls, nbytes) in told.items():
            if name.startswith("ChunkMBS"):
                assert calls == {(GATHER, 2): 8, (REDUCE_SCATTER, 2): 4, (GATHER, 4): 14, (REDUCE_SCATTER, 4): 7}, name
                accumulated, accumulated_bytes = told["accumulation, chunkmoe"]
                for ranks in (2, 4):
                    assert accumulated[GATHER, ranks] >= 4 * calls[GATHER, ranks]
                    assert accumulated_bytes[GATHER, ranks] >= 4 * nbytes[GATHER, ranks]
                    assert accumulated[REDUCE_SCATTER, ranks] == calls[REDUCE_SCATTER, ranks]
                    assert accumulated_bytes[REDUCE_SCATTER, ranks] == nbytes[REDUCE_SCATTER, ranks]


def peaks(rank, world_size, runs):
    """Highest bytes alive between the first block's entry and the last one's exit, forward and backward."""
    told = {}
    for name, overrides in runs.items():
        this = trainer(*overrides)
        this.step(0)
        watch, seen = LiveBytes(), []
        layers = this.model.model.language_model.layers

        def enter(block, args, watch=watch, seen=seen):
            args[0].register_hook(lambda grad: seen.append(watch.peak))
            watch.peak = watch.now

        def leave(block, args, output, watch=watch, seen=seen):
            seen.append(watch.peak)
            output.register_hook(lambda grad: setattr(watch, "peak", watch.now))

        layers[0].register_forward_pre_hook(enter, prepend=True)
        layers[-1].register_forward_hook(leave)
        with watch:
            this.backward(1)
        assert len(seen) == 2
        told[name] = max(seen)
    return told


@pytest.mark.slow
def test_activations_grow_by_hidden_states_alone():
    length, hidden = 384, 96
    common = [*LINEAR, f"data.dataset_param.basic_parameters.cutoff_len={length}"]
    runs = {
        (kind, size): [*batch(size)[:2], *common, *(chunk_mbs() if kind == "ChunkMBS" else [])]
        for kind in ("ChunkMBS", "none")
        for size in (1, 8)
    }
    unit = 7 * length * hidden * 4
    for told in run_ranks(peaks, 2, runs, fill_nan=False):
        growth = {kind: (told[kind, 8] - told[kind, 1]) / unit for kind in ("ChunkMBS", "none")}
        assert growth["ChunkMBS"] < 4, growth
        assert growth["none"] > 40, growth


def offloaded_buffers(rank, world_size):
    """Host buffers in use and at rest after each of some steps whose routing, and so whose sizes, differ."""
    this = trainer(*batch(4), *chunk_mbs(recompute=False))
    counts = []
    for step in range(6):
        this.step(step)
        counts.append(sum(map(len, this.offload.pool._free.values())))
    return counts


def test_host_buffers_are_used_again_whatever_the_routing():
    for counts in run_ranks(offloaded_buffers, 2):
        assert counts[-1] <= 1.1 * counts[0], counts


def selective(rank, world_size):
    """Recomputing part of a block, with and without ChunkMBS."""
    part = f"features.recompute_plan.apply_modules=['{LAYERS}.{{*}}.mlp']"
    runs = {
        "whole": batch(4),
        "part": [*batch(4), part],
        "part, ChunkMBS": [
            *batch(4), *chunk_mbs(), part, f"features.activation_offload_plan.apply_modules=['{LAYERS}.{{*}}']"
        ],
    }  # fmt: skip
    return curves(rank, world_size, runs, 3)


def test_selective_recompute():
    told = run_ranks(selective, 2)[0]
    for curve in (told["part"], told["part, ChunkMBS"]):
        for got, expected in zip(curve, told["whole"], strict=True):
            assert got == pytest.approx(expected, rel=1e-5)


def stumbles(rank, world_size):
    """A step whose second micro-chunk raises in the last block, then one that is as if nothing had been."""
    expected = [trainer(*RUNS["ChunkMBS, chunkmoe"]).step(number) for number in (0,)]
    this = trainer(*RUNS["ChunkMBS, chunkmoe"])
    norm = this.model.model.language_model.layers[3].post_attention_layernorm
    original, calls = norm.forward, []

    def stumble(*args):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("gives up")
        return original(*args)

    norm.forward = stumble
    with pytest.raises(RuntimeError, match="gives up"):
        this.step(0)
    norm.forward = original
    this.optimizer.zero_grad()
    return expected, [this.step(0)]


def test_an_exception_in_a_micro_chunk_leaves_nothing_behind():
    for expected, got in run_ranks(stumbles, 2):
        assert got == expected


BAD = {
    "chunk_mbs": (["features.chunkmbs_plan.chunk_mbs=0"], ["features.chunkmbs_plan.chunk_mbs: 0", ">= 1"]),
    "names": (["features.chunkmbs_plan.chunk_kwarg_names=null"], ["chunk_kwarg_names: None", "list of names"]),
    "misspelt": (["features.chunkmbs_plan.chunk_mb=2"], ["chunkmbs_plan.chunk_mb: 2", "the nearest one is chunk_mbs"]),
    "no modules": (["features.chunkmbs_plan.apply_modules=[]"], ["apply_modules: []", "needs the names"]),
    "not recomputed": (
        [f"features.recompute_plan.apply_modules=['{LAYERS}.{{0-2}}']"],
        [f"apply_modules: {LAYERS}.3: not in features.recompute_plan.apply_modules"],
    ),
    "not offloaded": (
        ["features.enable_activation_offload=true", f"features.activation_offload_plan.apply_modules=['{LAYERS}.0']"],
        [f": {LAYERS}.1, {LAYERS}.2, {LAYERS}.3: not in features.activation_offload_plan.apply_modules"],
    ),
    "recompute around": (
        ["features.recompute_plan.apply_modules=['model.language_model']"],
        [f"{LAYERS}.0", "inside modules of features.recompute_plan.apply_modules"],
    ),
    "twice": (
        [f"features.chunkmbs_plan.apply_modules=['{LAYERS}.{{*}}', '{LAYERS}.{{*}}.mlp']"],
        [f"{LAYERS}.0.mlp", "inside other modules of the list"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_misconfigurations_are_one_line_before_any_collective(name):
    overrides, expected = BAD[name]
    with pytest.raises(ConfigError) as caught:
        prepare(read("features.enable_chunk_mbs=true", *overrides))
    (line,) = str(caught.value).splitlines()
    assert all(part in line for part in expected), line


def test_wrong_batch_dimension():
    """The sequence is cut in the batch's place: told at the first block, on every rank."""
    wrong = [*batch(4), *chunk_mbs(), "features.chunkmbs_plan.batch_dim=1"]
    for told in run_ranks(first_error, 2, wrong):
        assert "features.chunkmbs_plan.batch_dim: 1: hidden_states is [4, 16, 96]" in told and "set it to 0" in told


def first_error(rank, world_size, overrides):
    try:
        trainer(*overrides).step(0)
    except ValueError as error:
        dist.barrier()
        return str(error)
    return "none"


def test_one_module_under_two_names_is_wrapped_once():
    patterns = f"features.chunkmbs_plan.apply_modules=['{LAYERS}.{{*}}', '{LAYERS}.2']"
    modules = prepare(read("features.enable_chunk_mbs=true", patterns)).modules
    assert list(modules.chunk) == [f"{LAYERS}.{n}" for n in range(4)]


def test_settings_are_read_and_what_they_do_not_do_is_told():
    on = "features.enable_chunk_mbs=true"
    config, told = load_config(YAML, [MODEL, on, "features.chunkmbs_plan.chunk_kwarg_names=[attention_mask]"], 2)
    pattern = (f"{LAYERS}.{{*}}",)
    assert config.chunk_mbs == ChunkMBSConfig(apply_modules=pattern, chunk_kwarg_names=("attention_mask",))
    assert len(told) == 1 and told[0].startswith("features.enable_activation_offload: 'off': ")
    _, told = load_config(YAML, [MODEL, on, "features.chunkmbs_plan.chunk_mbs=4", *chunk_mbs(4)], 2)
    assert told == ["features.chunkmbs_plan.chunk_mbs: 4: no effect, because training.micro_batch_size is 4"]
    assert load_config(YAML, [MODEL], 2)[0].chunk_mbs is None


def test_a_block_keeps_its_parameters_and_their_names():
    told = run_ranks(named_parameters, 2)[0]
    assert told["ChunkMBS"] == told["none"]


def named_parameters(rank, world_size):
    runs = {"none": batch(4), "ChunkMBS": [*batch(4), *chunk_mbs()]}
    return {
        name: {key: tuple(p.shape) for key, p in trainer(*overrides).model.state_dict().items()}
        for name, overrides in runs.items()
    }


def test_live_bytes_counts_storages_once():
    with LiveBytes() as watch:
        tensor = torch.ones(1000)
        view = tensor.view(10, 100)[3]
        assert watch.now == watch.peak == 4000
        tensor.add_(1)
        other = tensor + view.sum()
        assert watch.now == 8000
        del tensor, other
        assert watch.now == 4000, "a view keeps the whole"
        del view
        assert watch.now == 0 and watch.peak >= 8000


def contained(rank, world_size):
    """A unit in a container, reached past any attribute, and a unit under two names."""
    from torch.distributed.fsdp import fully_shard

    from mindspeed_chunk.standalone.parallel import hoist_units

    listed = torch.nn.Module()
    listed.parts = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
    fully_shard(listed.parts[0])
    twice = torch.nn.Module()
    twice.inner, twice.other = torch.nn.Module(), torch.nn.Module()
    twice.inner.part = twice.other.part = fully_shard(torch.nn.Linear(4, 4))
    told = []
    for block in (listed, twice):
        try:
            hoist_units(block)
        except ValueError as error:
            told.append(str(error))
    return told


def test_units_that_cannot_be_gathered_with_their_block_are_refused():
    (told,) = run_ranks(contained, 1)
    assert len(told) == 2 and all("is in a container or in two places" in line for line in told)
