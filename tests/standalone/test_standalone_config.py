"""The embedded trainer's yaml: what is read, what is named in a warning, and every error as one line on every rank."""

import json
import os
import subprocess
import warnings

import pytest
import yaml

from launcher import HANG_S, busy, run_ranks, torchrun
from mindspeed_chunk.config import ChunkMoEConfig, ConfigError
from mindspeed_chunk.standalone import __main__ as command_line
from mindspeed_chunk.standalone.config import load_config
from mindspeed_chunk.standalone.model import match_modules
from mindspeed_chunk.standalone.prepare import prepare
from standalone_ranks import EXAMPLE, MODEL, YAML, read, user_errors

EXPERTS = "model.language_model.layers.{*}.mlp.experts"


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    """{name: (arguments, what the line must say)} of everything a user can get wrong, with the files it takes."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "list.yaml").write_text("- parallel\n- training\n")
    (folder / "broken.yaml").write_text("parallel: [1, 2\ntraining: {\n")
    (folder / "empty.yaml").write_text("")
    (folder / "bytes.yaml").write_bytes(b"parallel: \xff\xfe\n")
    (folder / "llama").mkdir()
    (folder / "llama" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "text").mkdir()
    (folder / "text" / "config.json").write_text("not json")
    small = json.loads((EXAMPLE / "tiny" / "config.json").read_text())
    small["text_config"]["vocab_size"] = 100
    (folder / "small").mkdir()
    (folder / "small" / "config.json").write_text(json.dumps(small))
    odd = json.loads((EXAMPLE / "tiny" / "config.json").read_text())
    odd["text_config"]["num_experts"] = 15
    (folder / "odd").mkdir()
    (folder / "odd" / "config.json").write_text(json.dumps(odd))

    def tiny(*overrides):
        return [YAML, MODEL, *overrides]

    def model(name):
        return [YAML, f"model.model_name_or_path={folder / name}"]

    return {
        "missing yaml": ([str(folder / "none.yaml")], ["none.yaml", "cannot be read"]),
        "a folder": ([str(folder)], [str(folder), "cannot be read"]),
        "not a mapping": ([str(folder / "list.yaml")], ["list.yaml", "must be a mapping"]),
        "empty": ([str(folder / "empty.yaml")], ["empty.yaml", "must be a mapping"]),
        "not parseable": ([str(folder / "broken.yaml")], ["broken.yaml:2: not valid yaml"]),
        "not text": ([str(folder / "bytes.yaml")], ["bytes.yaml:1: not UTF-8 text, at byte 10; save it as UTF-8"]),
        "section no mapping": (tiny("training=5"), ["training: 5: must be a mapping"]),
        "override without value": (tiny("training.lr"), ["training.lr: must read key.path=value"]),
        "override below a value": (tiny("training.lr.max=1"), ["training.lr.max=1", "`lr` is no mapping"]),
        "override no yaml": (tiny("training.lr=["), ["training.lr=[", "not valid yaml"]),
        "model path missing": (tiny("model.model_name_or_path="), ["model.model_name_or_path", "the trainer needs it"]),
        "no config folder": (model("none"), ["model.model_name_or_path", "none", "has no config.json"]),
        "another model": (model("llama"), ["model_type is 'llama'"]),
        "config no json": (model("text"), ["its config.json is not valid"]),
        "vocabulary": (model("small"), ["vocab_size is 100", "256"]),
        "experts by ranks": (model("odd"), ["parallel.expert_parallel_size: 2", "number of experts, 15"]),
        "ranks by ep": (tiny("parallel.expert_parallel_size=3"), ["parallel.expert_parallel_size: 3", "ranks, 2"]),
        "ep size zero": (tiny("parallel.expert_parallel_size=0"), ["parallel.expert_parallel_size: 0", ">= 1"]),
        "fsdp size": (tiny("parallel.fully_shard_parallel_size=1"), ["fully_shard_parallel_size: 1", "auto, 2"]),
        "dispatcher": (tiny("parallel.ep_plan.dispatcher=mc2"), ["dispatcher: 'mc2'", "alltoall, chunkmoe"]),
        "chunks": (tiny("parallel.ep_plan.moe_num_chunks=-1"), ["parallel.ep_plan.moe_num_chunks: -1", ">= 0"]),
        "back end": (tiny("parallel.ep_plan.chunk_moe_backend=npu"), ["ep_plan.chunk_moe_backend: 'npu'", "cpu"]),
        "chunk key": (tiny("parallel.ep_plan.moe_chunks=2"), ["parallel.ep_plan.moe_chunks", "moe_num_chunks"]),
        "no experts": (tiny("parallel.ep_plan.apply_modules=[]"), ["parallel.ep_plan.apply_modules", "experts"]),
        "these are none": (tiny("parallel.ep_plan.apply_modules=[lm_head]"), ["lm_head", "no gate_up_proj"]),
        "pattern ep": (tiny("parallel.ep_plan.apply_modules=[experts]"), ["ep_plan.apply_modules: 'experts'"]),
        "pattern fsdp": (tiny("parallel.fsdp_plan.apply_modules=[mtp]"), ["fsdp_plan.apply_modules: 'mtp'"]),
        "pattern recompute": (
            tiny("features.recompute_plan.apply_modules=['layers.{*}']"),
            ["features.recompute_plan.apply_modules", "layers.{*}", "matches no module"],
        ),
        "wildcard": (tiny("parallel.fsdp_plan.apply_modules=['l.{a}']"), ["{a} is not a wildcard"]),
        "names no list": (tiny("parallel.fsdp_plan.apply_modules=lm_head"), ["must be a list of names"]),
        "number": (tiny("training.lr=fast"), ["training.lr: 'fast': must be a number >= 0"]),
        "number boolean": (tiny("training.lr=true"), ["training.lr: True: must be a number"]),
        "number infinite": (tiny("training.clip_grad=.inf"), ["training.clip_grad: inf"]),
        "beta": (tiny("training.adam_beta2=1.0"), ["training.adam_beta2: 1.0", "< 1"]),
        "integer": (tiny("training.micro_batch_size=1.5"), ["training.micro_batch_size: 1.5: must be an integer >= 1"]),
        "integer boolean": (tiny("training.seed=true"), ["training.seed: True: must be an integer"]),
        "flag": (tiny("features.recompute=yes please"), ["features.recompute: 'yes please': must be a boolean"]),
        "optimizer": (tiny("training.optimizer=muon"), ["training.optimizer: 'muon'", "adamw"]),
        "dtype": (tiny("parallel.fsdp_plan.param_dtype=fp16"), ["param_dtype: 'fp16'", "bf16"]),
        "attention": (tiny("model.attn_implementation=flash_attention_2"), ["flash_attention_2", "sdpa, eager"]),
        "sequence": (tiny("data.dataset_param.basic_parameters.cutoff_len=1000000000"), ["cutoff_len", "tokens"]),
    }


def test_every_user_error_is_one_line_on_every_rank(bad):
    for seen in run_ranks(user_errors, 2, {name: arguments for name, (arguments, _) in bad.items()}):
        for name, (_, expected) in bad.items():
            code, stderr = seen[name]
            assert code == 2, (name, stderr)
            assert stderr.startswith("error: ") and stderr.count("\n") == 1, (name, stderr)
            for part in expected:
                assert part in stderr, (name, stderr)


@pytest.mark.parametrize("name", ["missing yaml", pytest.param("pattern fsdp", marks=pytest.mark.slow)])
def test_torchrun_ends_soon_and_the_line_comes_once(bad, name, tmp_path):
    command = [*torchrun(2), "--redirects", "3", "--log-dir", str(tmp_path), "-m", "mindspeed_chunk.standalone"]
    command += bad[name][0]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, env=env)
    told = [path.read_text() for path in tmp_path.rglob("stderr.log")]
    assert done.returncode != 0
    assert len(told) == 2
    # one rank reports it; the other one ends in silence, unless torchrun needs longer to stop it than that rank waits
    lines = [text for text in told if text]
    assert len(set(lines)) == 1 and (len(lines) == 1 or busy() > 1)
    line = lines[0]
    assert line.startswith("error: ") and line.count("\n") == 1


def test_rank_zero_alone_fails_for_metrics(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command_line, "GRACE_S", 0)
    overrides = ["parallel.expert_parallel_size=1", f"standalone.metrics_path={tmp_path}"]
    assert command_line.main([YAML, MODEL, *overrides]) == 2
    line = f"error: standalone.metrics_path: {str(tmp_path)!r}: Is a directory; give another file\n"
    assert capsys.readouterr().err == line


def test_tiny_yaml_needs_no_warning():
    config, told = load_config(YAML, [], 2)
    assert told == []
    assert config.ep.apply_modules == (EXPERTS,)
    assert config.ep_size == 2 and config.chunk_moe == ChunkMoEConfig(moe_num_chunks=4)
    assert config.global_batch_size(2) == 8


def test_overrides_are_read_as_yaml():
    overrides = ["training.lr=1e-4", "parallel.fsdp_plan.param_dtype=bf16", "features.recompute=false"]
    config, _ = load_config(YAML, [*overrides, "standalone.metrics_path=a/b"], 2)
    assert config.training.lr == 1e-4
    assert config.fsdp.param_dtype == "bfloat16"
    assert config.recompute_modules == ()
    assert str(config.metrics_path) == "a/b"


def test_keys_without_effect_are_named_in_one_warning():
    overrides = ["parallel.fsdp_plan.hook_modules=[lm_head]", "training.adam_fused=true", "tools.profile.enable=false"]
    _, told = load_config(YAML, overrides, 2)
    assert told == ["without effect in this trainer: tools, parallel.fsdp_plan.hook_modules, training.adam_fused"]


def test_a_misspelt_key_is_named_with_the_one_it_nearly_is():
    _, told = load_config(YAML, ["training.micro_batchsize=4", "features.enable_chunk_mb=true"], 2)
    assert told == [
        "features.enable_chunk_mb: True: unknown key; the nearest one is enable_chunk_mbs",
        "training.micro_batchsize: 4: unknown key; the nearest one is micro_batch_size",
    ]


def test_chunk_keys_with_another_dispatcher():
    plan = "parallel.ep_plan"
    _, told = load_config(YAML, [f"{plan}.dispatcher=alltoall"], 2)
    assert told == [f"{plan}.moe_num_chunks: no effect while {plan}.dispatcher is alltoall; set it to chunkmoe"]
    assert load_config(YAML, [f"{plan}.dispatcher=alltoall", f"{plan}.moe_num_chunks=0"], 2)[1] == []


def test_both_chunk_sizes_warn_among_the_others():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, told = load_config(YAML, ["parallel.ep_plan.moe_chunk_size=17"], 2)
    assert len(told) == 1 and "moe_num_chunks is used" in told[0]


def test_files_for_the_35b():
    """The two say what they are for, and differ in nothing else."""
    contents = []
    for name, chunks in (
        ("qwen3_5_35b_npu.yaml", {"moe_num_chunks": 2}),
        ("qwen3_5_35b_npu_memory.yaml", {"moe_num_chunks": 4, "chunk_moe_recompute": True}),
    ):
        config, _ = load_config(str(EXAMPLE / name), ["model.attn_implementation=sdpa"], 16)
        assert config.ep_size == 8 and config.ep.dispatcher == "chunkmoe"
        assert config.chunk_moe == ChunkMoEConfig(**chunks)
        contents.append(yaml.safe_load((EXAMPLE / name).read_text(encoding="utf-8")))
        for key in chunks:
            del contents[-1]["parallel"]["ep_plan"][key]
    assert contents[0] == contents[1]


def test_patterns():
    model = prepare(read()).model

    def match(*patterns):
        return list(match_modules(model, patterns, "path"))

    layers = "model.language_model.layers"
    assert match(f"{layers}.{{*}}") == [f"{layers}.{n}" for n in range(4)]
    assert match(f"{layers}.{{1-2}}.mlp") == [f"{layers}.1.mlp", f"{layers}.2.mlp"]
    assert match(f"{layers}.{{0-2}}", f"{layers}.{{2-3}}") == [f"{layers}.{n}" for n in range(4)]
    assert match("*.mlp.experts") == match(f"{layers}.?.mlp.experts") == match(EXPERTS)
    assert match("lm_head") == ["lm_head"]
    for nothing in ("lm_hea", "m_head", "lm.head", f"{layers}.{{7-9}}", f"{layers}.{{*}}.linear"):
        with pytest.raises(ConfigError, match="matches no module"):
            match(nothing)
